"""Spellings of Megatron core's tensor names that differ from table.py, and the split of each tensor over TP ranks.

Transformer Engine stores a norm with the linear after it, except before experts; distributed checkpoints use that name
for layers without Transformer Engine too. Experts are numbered in the name (`local_experts`), or are `weightN` of one
module (Transformer Engine's grouped GEMM), one matrix (`weight1`, `weight2`), or a dimension (distributed checkpoints).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.megatron.hybrid_rows import PART
from megalith.config import ModelConfig

LAYER = re.compile(r"^(decoder|encoder)\.layers\.(\d+)\.")
MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")
TE_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
TE_MIXER_NORMS = {  # of mixers other than attention
    "gated_delta_net": ".self_attention.in_proj.layer_norm_",
    "mamba2": ".mixer.in_proj.layer_norm_",
}
TE_LATENT_NORMS = {
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
HAS_EXTRA_STATE = re.compile(
    r"(linear_(?:qkv|proj|fc1|fc2|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)|eh_proj|in_proj|out_proj)"
    r"\.weight(?:\d*|\.z)$"
)
"""Modules for which Transformer Engine may store FP8 state. Their `_extra_state` is None here."""

ROWS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight",
    "core_attention.softmax_offset",
    "eh_proj.weight",
    ".A_log",
    ".dt_bias",
    ".mixer.D",
    ".mixer.norm.weight",
)
LATENTS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
GATED = ("linear_fc1.weight", "linear_fc1.bias")  # by rows; with a gate, each rank has its gate, then its up


def layer_of(name: str) -> int | None:
    """Return the layer index in a tensor name, or None if it has none."""
    return int(match[2]) if (match := LAYER.match(name)) else None


def renumber_layers(name: str, offset: int) -> str:
    """Return a tensor's name with `offset` added to its layer index."""
    return LAYER.sub(lambda match: f"{match[1]}.layers.{int(match[2]) + offset}.", name)


def plain_name(name: str) -> str:
    """Return table.py's name for a stored name of a norm, grouped expert or MTP layer."""
    for fused, plain in {**TE_NORMS, **TE_LATENT_NORMS}.items():
        name = name.replace(fused, plain)
    for fused in TE_MIXER_NORMS.values():
        name = name.replace(fused, ".input_layernorm.")
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")  # in core 0.20's rank files
    return GROUPED.sub(r".experts.local_experts.\3.\1.\2", name)


def stored_name(name: str, model: ModelConfig, transformer_engine: bool, distributed: bool = False) -> str:
    """Return the name of a tensor of table.py in layers with or without Transformer Engine."""
    layer, mtp = layer_of(name), MTP_LAYER.match(name)
    if layer is None and mtp is None:
        return name
    layer = model.num_layers + int(mtp[1]) if mtp else layer
    latent = model.multi_latent_attention
    if (mixer := model.recurrent_mixer(layer)) in TE_MIXER_NORMS:
        name = name.replace(".input_layernorm.", TE_MIXER_NORMS[mixer])
    for fused, plain in (TE_LATENT_NORMS if latent else TE_NORMS).items():
        separate = transformer_engine and plain == ".pre_mlp_layernorm." and layer in model.expert_layers
        if (transformer_engine or (distributed and not latent)) and not separate:
            name = name.replace(plain, fused)
    if model.moe_grouped_gemm and transformer_engine and not distributed:
        name = EXPERT.sub(r".experts.\2.\3\1", name)
    return name


def extra_states(names: Sequence[str], transformer_engine: bool) -> Iterator[str]:
    """Yield the `_extra_state` names of the modules of these tensors."""
    for name in names:
        if HAS_EXTRA_STATE.search(name):
            yield HAS_EXTRA_STATE.sub(r"\1._extra_state", name)
            if transformer_engine and name.endswith("self_attention.linear_proj.weight"):
                yield name.replace("linear_proj.weight", "core_attention._extra_state")
        elif name == "output_layer.bias":  # BERT's
            yield "output_layer._extra_state"


def tp_split(name: str, gated: bool, latents: str = "copies") -> str:
    """Return how a tensor is split over TP ranks: "rows", "columns", "gated" or "copies".

    `latents` is the split of MLA's down projections: "copies" with Transformer Engine, else "rows".
    """
    if name.endswith(LATENTS):
        return latents
    if name.endswith(COLUMNS):
        return "columns"
    if name.endswith(GATED):
        return "gated" if gated else "rows"
    return "rows" if name.endswith(ROWS) or PART.match(name) else "copies"


def shard_of(tensor: Tensor, kind: str, rank: int, ranks: int) -> Tensor:
    """Return a copy of a TP rank's shard of a tensor."""
    if kind == "copies" or ranks == 1:
        return tensor.clone()
    if kind == "gated":
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(ranks, dim=1 if kind == "columns" else 0)[rank].clone()


def join_shards(shards: Sequence[Tensor], kind: str) -> Tensor:
    """Return the tensor from the shards of all TP ranks."""
    if kind == "copies":
        return shards[0]
    if kind == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards), dim=1 if kind == "columns" else 0)


def stack_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace each layer's expert matrices in `state` by GroupedMLP's stacked ones, and return it.

    `weight1` is [in, experts · out] and `weight2` [experts · in, out], where `in` and `out` are the sizes of one
    expert's matrix. Both are views of a contiguous [experts, in, out] tensor.
    """
    by_name: dict[str, list[Tensor]] = {}
    for name in list(state):
        if match := EXPERT.search(name):
            stacked_name = f"{name[: match.start()]}.experts.weight{match[2][-1]}"
            by_name.setdefault(stacked_name, []).append(state.pop(name).T)
    for name, matrices in by_name.items():
        stacked = torch.stack(matrices)
        state[name] = stacked.view(stacked.shape[1], -1) if name[-1] == "1" else stacked.flatten(0, 1)
    return state


def unstack_experts(state: dict[str, Any], experts: int) -> dict[str, Any]:
    """Reverse `stack_experts`, with table.py's names. Raises RuntimeError if the sizes are not divisible."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        before, _, which = name.rpartition(".")
        if not before.endswith(".experts") or which not in ("weight1", "weight2"):
            result[plain_name(name)] = value
            continue
        rows = value.shape[0] if which == "weight1" else value.shape[0] // experts
        for expert, matrix in enumerate(value.view(experts, rows, -1)):
            result[f"{before}.local_experts.{expert}.linear_fc{which[-1]}.weight"] = matrix.T
    return result
