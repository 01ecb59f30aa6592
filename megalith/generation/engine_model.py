"""An engine's part of a model: this rank's shards, in the engine's dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megalith.comm.collectives import Axis
from megalith.config import LoraConfig, ModelConfig
from megalith.models.adapters import add_adapters
from megalith.models.mixers.attention import SoftmaxOffset
from megalith.models.mixers.gated_delta_net import Decay
from megalith.models.mixers.mamba2 import GatedGroupNorm, Skip, TimeStep
from megalith.models.norm import HeadNorms, Norm
from megalith.models.router import Router
from megalith.models.transformer import Transformer
from megalith.parallel.replication import replica_axes
from megalith.parallel.shards import LocalShard, local_shard, to_local_parameters
from megalith.parallel.tensor.lora_shards import shard_adapters
from megalith.parallel.tensor.tensor_parallel import apply_tensor

IN_FP32 = (Norm, HeadNorms, Decay, SoftmaxOffset, TimeStep, Skip, GatedGroupNorm)


def engine_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, tp: Axis, lora: LoraConfig | None
) -> Transformer:
    """Build this rank's part of the model, without values.

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
    to_local_parameters(model)
    return model.requires_grad_(False).eval()


def named_shards(chunks: Iterable[torch.nn.Module]) -> dict[str, LocalShard]:
    """Return this rank's shards of parameters and persistent buffers. A tied tensor appears under its first name."""
    named: dict[str, LocalShard] = {}
    seen: set[int] = set()
    for chunk in chunks:
        copies = replica_axes(chunk)
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[name] = local_shard(tensor, copies.get(name))
    return named
