"""Names of Megatron core's tensors where they differ from those of table.py, and how tensor ranks cut each.

Transformer Engine keeps a norm with the matrix behind it, but for that before experts. A distributed checkpoint has
that name also for layers without it. Experts are numbered in the name (`local_experts`), or a `weightN` of one module
each (Transformer Engine's grouped GEMM), or one matrix (`weight1`, `weight2`), or a dimension (distributed).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.config import ModelConfig

LAYER = re.compile(r"^(decoder|encoder)\.layers\.(\d+)\.")
FURTHER_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")
FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
FUSED_LATENT_NORMS = {
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
WITH_STATE = re.compile(
    r"(linear_(?:qkv|proj|fc1|fc2|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)|eh_proj)\.weight\d*$"
)
"""What Transformer Engine may keep FP8 state for; its `_extra_state` is None here."""

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
)
LATENTS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
GATED = ("linear_fc1.weight", "linear_fc1.bias")  # by rows; with a gate each rank has its gate, then its up


def layer_of(name: str) -> int | None:
    """The number of a tensor's layer; None: it is of none."""
    return int(found[2]) if (found := LAYER.match(name)) else None


def plain_name(name: str) -> str:
    """A stored name with norms, grouped experts and further layers under table.py's names."""
    for fused, own in {**FUSED_NORMS, **FUSED_LATENT_NORMS}.items():
        name = name.replace(fused, own)
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")  # in core 0.20's rank files
    return GROUPED.sub(r".experts.local_experts.\3.\1.\2", name)


def stored_name(name: str, model: ModelConfig, transformer_engine: bool, distributed: bool = False) -> str:
    """The name that the layers of Transformer Engine, or those without, give to a tensor of table.py."""
    layer, further = layer_of(name), FURTHER_LAYER.match(name)
    if layer is None and further is None:
        return name
    layer = model.num_layers + int(further[1]) if further else layer
    latent = model.multi_latent_attention
    for fused, own in (FUSED_LATENT_NORMS if latent else FUSED_NORMS).items():
        apart = transformer_engine and own == ".pre_mlp_layernorm." and layer in model.expert_layers
        if (transformer_engine or (distributed and not latent)) and not apart:
            name = name.replace(own, fused)
    if model.moe_grouped_gemm and transformer_engine and not distributed:
        name = EXPERT.sub(r".experts.\2.\3\1", name)
    return name


def states_beside(names: Sequence[str], transformer_engine: bool) -> Iterator[str]:
    """The names of the `_extra_state` that a module has beside the tensors with these names."""
    for name in names:
        if WITH_STATE.search(name):
            yield WITH_STATE.sub(r"\1._extra_state", name)
            if transformer_engine and name.endswith("self_attention.linear_proj.weight"):
                yield name.replace("linear_proj.weight", "core_attention._extra_state")
        elif name == "output_layer.bias":  # BERT's
            yield "output_layer._extra_state"


def cut_of(name: str, gated: bool, latents: str = "copies") -> str:
    """How tensor ranks have a tensor: "rows", "columns", "gated", or "copies".

    `latents` is how they have the matrices that make latents: copies with Transformer Engine, without it rows.
    """
    if name.endswith(LATENTS):
        return latents
    if name.endswith(COLUMNS):
        return "columns"
    if name.endswith(GATED):
        return "gated" if gated else "rows"
    return "rows" if name.endswith(ROWS) else "copies"


def shard_of(tensor: Tensor, kind: str, rank: int, ranks: int) -> Tensor:
    """A tensor rank's shard of a tensor, memory of its own."""
    if kind == "copies" or ranks == 1:
        return tensor.clone()
    if kind == "gated":
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(ranks, dim=1 if kind == "columns" else 0)[rank].clone()


def joined(shards: Sequence[Tensor], kind: str) -> Tensor:
    """The tensor whose shards, of all tensor ranks, these are."""
    if kind == "copies":
        return shards[0]
    if kind == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards), dim=1 if kind == "columns" else 0)


def experts_together(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's tensors with each layer's experts as `weight1` [hidden, ·] and `weight2` [·, hidden].

    Their memory is that of matrices [experts, in, out].
    """
    together: dict[str, list[Tensor]] = {}
    for name in list(state):
        if found := EXPERT.search(name):
            which = f"{name[: found.start()]}.experts.weight{found[2][-1]}"
            together.setdefault(which, []).append(state.pop(name).T)
    for name, matrices in together.items():
        stacked = torch.stack(matrices)
        state[name] = stacked.view(stacked.shape[1], -1) if name[-1] == "1" else stacked.flatten(0, 1)
    return state


def experts_apart(state: dict[str, Any], experts: int) -> dict[str, Any]:
    """The reverse, with table.py's names for all. Raises RuntimeError where the sizes do not divide."""
    apart: dict[str, Any] = {}
    for name, value in state.items():
        before, _, which = name.rpartition(".")
        if not before.endswith(".experts") or which not in ("weight1", "weight2"):
            apart[plain_name(name)] = value
            continue
        rows = value.shape[0] if which == "weight1" else value.shape[0] // experts
        for expert, matrix in enumerate(value.view(experts, rows, -1)):
            apart[f"{before}.local_experts.{expert}.linear_fc{which[-1]}.weight"] = matrix.T
    return apart
