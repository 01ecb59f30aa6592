"""The sharding table of tensor parallelism.

For each module of a model: the sharded dimension of its parameters, whether its linear is column- or row-parallel, and
whether the gradient on a rank is partial, so that it must be summed over the axis.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.adapters import ADAPTER
from megalith.models.norm import HeadNorms, HeadsNorm

ROWS, COLUMNS, REPLICATED = 0, 1, None  # the sharded dimension of a weight [out, in]
NEVER, UNDER_SP, ALWAYS = "never", "under sequence parallelism", "always"


@dataclass(frozen=True)
class Role:
    """Sharding of a module's parameters, style of its linear (column, row or None), and when gradients are partial."""

    weight: int | None
    bias: int | None = REPLICATED
    style: str | None = None
    partial_weight: str = NEVER
    partial_bias: str = NEVER


ROLES = {
    # module: weight, bias, style, partial gradients of weight and bias
    "word_embeddings": Role(ROWS),  # lookup in the local rows, summed over ranks
    "adapter": Role(
        REPLICATED, partial_weight=ALWAYS
    ),  # TokenRows: those in the local rows of the vocabulary
    "position_embeddings": Role(REPLICATED, partial_weight=UNDER_SP),
    "tokentype_embeddings": Role(REPLICATED, partial_weight=UNDER_SP),
    "layernorm": Role(
        REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP
    ),  # of the embedding and of BERT's head
    "relative_attention_bias": Role(COLUMNS),  # local heads
    "embedding_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "hidden_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "linear_join": Role(REPLICATED, REPLICATED, None, UNDER_SP),
    "input_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "linear_qkv": Role(ROWS, ROWS, "column"),
    "linear_q_proj": Role(ROWS, REPLICATED, "column"),
    "linear_q_down_proj": Role(REPLICATED, REPLICATED, None, UNDER_SP),  # latents of local tokens
    "q_down_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "linear_q_up_proj": Role(ROWS, REPLICATED, "column"),
    "linear_kv_down_proj": Role(REPLICATED, REPLICATED, None, UNDER_SP),
    "kv_down_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "linear_kv_up_proj": Role(ROWS, REPLICATED, "column"),
    "linear_q": Role(ROWS, ROWS, "column"),  # cross-attention
    "linear_kv": Role(ROWS, ROWS, "column"),
    "q_layernorm": Role(REPLICATED, REPLICATED, None, ALWAYS, ALWAYS),  # each rank applies it to its heads
    "k_layernorm": Role(REPLICATED, REPLICATED, None, ALWAYS, ALWAYS),
    "softmax_offset": Role(ROWS),  # local heads
    "linear_proj": Role(COLUMNS, REPLICATED, "row", NEVER, UNDER_SP),  # the bias is added after the reduction
    "linear_in": Role(ROWS, ROWS, "column"),  # gated delta net: local heads
    "linear_gates": Role(ROWS, ROWS, "column"),
    "linear_decay_down": Role(
        REPLICATED, REPLICATED, None, UNDER_SP
    ),  # Kimi Delta Attention: of local tokens
    "linear_decay_up": Role(ROWS, ROWS, "column"),
    "linear_gate_down": Role(REPLICATED, REPLICATED, None, UNDER_SP),
    "linear_gate_up": Role(ROWS, ROWS, "column"),
    "linear_zxbcdt": Role(ROWS, ROWS, "column"),  # Mamba-2: local groups of heads
    "linear_bcx": Role(ROWS, ROWS, "column"),  # short convolution: local units
    "conv": Role(ROWS, ROWS),
    "conv_xbc": Role(ROWS, ROWS),
    "time_step": Role(ROWS, ROWS),
    "skip": Role(ROWS),
    "gated_norm": Role(ROWS),
    "decay": Role(ROWS, ROWS),
    "out_norm": Role(REPLICATED, REPLICATED, None, ALWAYS, ALWAYS),
    "linear_out": Role(COLUMNS, REPLICATED, "row", NEVER, UNDER_SP),
    "post_attention_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "pre_cross_attn_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "post_cross_attn_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "pre_mlp_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "linear_fc1": Role(ROWS, ROWS, "column"),
    "linear_fc2": Role(COLUMNS, REPLICATED, "row", NEVER, UNDER_SP),
    "post_mlp_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "router": Role(
        REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP
    ),  # experts are sharded by expert_parallel.py
    "shared_expert_gate": Role(REPLICATED, REPLICATED, None, UNDER_SP),
    "final_layernorm": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),
    "output_layer": Role(ROWS),  # logits of the local rows
    "dense": Role(REPLICATED, REPLICATED, None, UNDER_SP, UNDER_SP),  # BERT's head: applied to local tokens
    "vocabulary": Role(ROWS, ROWS),  # the output bias
    "score": Role(REPLICATED, REPLICATED, None, UNDER_SP),  # applied to local tokens
    "pooler": Role(REPLICATED),  # applied to full sequences on every rank
    "binary_head": Role(REPLICATED),
    "units": Role(ROWS, ROWS),  # one value per output of a column-parallel linear
}
# With fewer groups than ranks, several ranks share a group: each has some of its query heads, and its key and value, in
# Mamba-2 some of its heads, and its B and C. No sharding of the rows gives that, so every rank holds the full matrix
# and uses the rows it needs.
SHARED_LINEAR = Role(REPLICATED, REPLICATED, "column", ALWAYS, ALWAYS)
SHARED = {
    "linear_qkv": SHARED_LINEAR,
    "linear_kv": SHARED_LINEAR,
    "linear_zxbcdt": SHARED_LINEAR,
    "conv_xbc": Role(REPLICATED, REPLICATED, None, ALWAYS, ALWAYS),
}
# A norm with weights per head: each rank has those of its heads. The sum of squares is reduced over the ranks.
HEADS_NORM = Role(ROWS)
# The matrices of an adapter, by the style of its linear (lora_shards.py).
ADAPTER_ROLES = {
    ("column", "lora_A"): Role(REPLICATED, REPLICATED, None, UNDER_SP),  # applied to local tokens
    ("column", "lora_B"): Role(ROWS),
    ("row", "lora_A"): Role(COLUMNS),
    ("row", "lora_B"): Role(REPLICATED, REPLICATED, None, UNDER_SP),
    (None, "lora_A"): Role(REPLICATED, REPLICATED, None, UNDER_SP),  # MLA's latents of local tokens
    (None, "lora_B"): Role(REPLICATED, REPLICATED, None, UNDER_SP),
    ("column", "lora_magnitude"): Role(ROWS),  # DoRA: one value per row
    ("row", "lora_magnitude"): Role(REPLICATED, REPLICATED, None, UNDER_SP),
    (None, "lora_magnitude"): Role(REPLICATED, REPLICATED, None, UNDER_SP),
}
SHARED_B = Role(REPLICATED, REPLICATED, None, ALWAYS)  # keys or values of a shared group


def shared_modules(config: ModelConfig, ranks: int) -> frozenset[str]:
    """Return the names of the modules that have fewer KV or Mamba-2 groups than there are tensor-parallel `ranks`."""
    names = {
        ("linear_qkv", "linear_kv"): config.query_groups,
        ("linear_zxbcdt", "conv_xbc"): config.mamba_num_groups,
    }
    return frozenset(name for modules, groups in names.items() if groups < ranks for name in modules)


def role_of(
    name: str, module: nn.Module, shared: Collection[str] = (), owner: nn.Module | None = None
) -> Role:
    """Return the role of a module, found by its name. Experts have none (EXPERT_SHARDING in expert_parallel.py).

    Args:
        name: qualified name of the module.
        module: module with this name.
        shared: names of the modules with fewer groups than tensor-parallel ranks (`shared_modules`).
        owner: the parent module. If its class has `roles`, the role named there is used.

    Raises:
        ConfigError: the module has no role.
    """
    linear, _, matrix = name.partition(ADAPTER)
    linear = linear.rpartition(".")[2]
    linear = getattr(owner, "roles", {}).get(linear, linear)
    if matrix:
        kind, part = matrix.replace("initial_", "lora_").split(".")
        return (
            SHARED_B
            if linear in shared and kind != "lora_A" and part != "q"
            else ADAPTER_ROLES[ROLES[linear].style, kind]
        )
    if isinstance(module, HeadsNorm | HeadNorms):
        return HEADS_NORM
    if linear not in ROLES:
        raise ConfigError(
            f"tensor parallelism has no role for {name}: give {type(owner).__name__} a class attribute "
            f'roles = {{"{linear}": ...}} with one of {", ".join(ROLES)}'
        )
    return SHARED[linear] if linear in shared else ROLES[linear]
