"""The model of an engine: this rank's shards, in the engine's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import LoraConfig, ModelConfig
from megalith.config.lora import EXPERTS
from megalith.local_shards import local_shape_and_offset
from megalith.models.adapter_slots import AdapterSlots, add_adapter_slots
from megalith.models.adapters import add_adapters
from megalith.models.linear import Linear
from megalith.models.mixers.attention import SoftmaxOffset
from megalith.models.mixers.gated_delta_net import Decay
from megalith.models.mixers.kimi_delta_attention import ChannelDecay
from megalith.models.mixers.mamba2 import GatedGroupNorm, Skip, TimeStep
from megalith.models.moe import GroupedLinear
from megalith.models.norm import HeadNorms, Norm
from megalith.models.router import Router
from megalith.models.transformer import Transformer
from megalith.parallel.shards import to_local_parameters
from megalith.parallel.tensor.apply_tensor import apply_tensor
from megalith.parallel.tensor.lora_shards import shard_adapters
from megalith.parallel.tensor.roles import ROLES
from megalith.parallel.tensor.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class SlotSizes:
    """Number of adapters that an engine has room for, and their largest ranks."""

    slots: int
    """Number of adapters."""
    ranks: Mapping[str, int]
    """Largest rank by the name of a matrix, such as layers.0.self_attention.linear_qkv."""


@dataclass(frozen=True)
class SiteSlots:
    """The adapter slots of one weight matrix, for this rank's shard of it."""

    slots: AdapterSlots
    linear: Linear | GroupedLinear
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def fill(self, slot: int, pair: tuple[Tensor, Tensor] | None) -> None:
        """Fill a slot with this rank's shards of an adapter's full A and B, or clear the slot if `pair` is None."""
        if pair is None:
            return self.slots.fill(slot, None, None)
        a, b = pair
        first_row, rows = self.offset[-2], self.shape[-2]
        first_column, columns = self.offset[-1], self.shape[-1]
        b = b.narrow(-2, first_row, rows)
        b = self.linear.rows(b) if isinstance(self.linear, Linear) else b
        self.slots.fill(slot, a.narrow(-1, first_column, columns), b)


IN_FP32 = (Norm, HeadNorms, Decay, ChannelDecay, SoftmaxOffset, TimeStep, Skip, GatedGroupNorm)


def engine_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tp: Axis,
    lora: LoraConfig | None,
    slots: SlotSizes | None = None,
) -> tuple[Transformer, dict[str, SiteSlots]]:
    """Build this rank's shard of the model without values, and adapter slots keyed by matrix name.

    Matrices have the engine's dtype. Parameters that layers use in fp32 (norms, positions, decays, sinks, router
    bias) stay in fp32.
    """
    model = Transformer(config, compute_dtype=dtype, device="meta").requires_grad_(False)
    if lora is not None and lora.rank is not None:
        add_adapters(model, lora)
    for name, module in model.named_modules():
        if not isinstance(module, IN_FP32) and not name.endswith("position_embeddings"):
            for kind, parameter in module.named_parameters(recurse=False):
                if not (isinstance(module, Router) and kind == "bias"):
                    parameter.data = parameter.data.to(dtype)
    tensor = apply_tensor(model, tp, sequence_parallel=False)
    if tensor is not None:
        shard_adapters(model, tensor)
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    sites = {} if slots is None else _add_slots(model, slots, dtype, tensor)
    to_local_parameters(model)
    return model.requires_grad_(False).eval(), sites


def _add_slots(
    model: Transformer, sizes: SlotSizes, dtype: torch.dtype, tensor: TensorParallel | None
) -> dict[str, SiteSlots]:
    """Add slots for adapters to a model that tensor parallelism has sharded."""
    is_row = {name: tensor is not None and _style(name) == "row" for name in sizes.ranks}
    reduces = {name: tensor.reduce for name, row in is_row.items() if row}
    shards = {name: local_shape_and_offset(model.get_submodule(name).weight) for name in sizes.ranks}
    slots = add_adapter_slots(model, sizes.slots, sizes.ranks, dtype, reduces)
    return {name: SiteSlots(each, model.get_submodule(name), *shards[name]) for name, each in slots.items()}


def _style(name: str) -> str | None:
    site = name.rpartition(".")[2]
    return None if f".{EXPERTS}" in name else ROLES[site].style
