"""The table of tensor parallelism: of each module of a model, which dimension of its parameters is sharded, which style
its linear has, and when a rank's gradient is a part of a sum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalith.errors import ConfigError
from megalith.models.adapters import ADAPTER
from megalith.models.norm import HeadNorms, HeadsNorm

ROWS, COLUMNS, WHOLE = 0, 1, None  # placements: the dimension of [out, in] that is sharded, or replicated
NEVER, UNDER_SP, ALWAYS = "never", "under sequence parallelism", "always"


@dataclass(frozen=True)
class Role:
    """How a module's parameters stand over the axis, its linear's style, and when a rank's gradient is a part of a
    sum."""

    weight: int | None
    bias: int | None = WHOLE
    style: str | None = None
    partial_weight: str = NEVER
    partial_bias: str = NEVER


ROLES = {
    # module: weight, bias, style, partial gradients of weight and bias
    "word_embeddings": Role(ROWS),  # lookup of a rank's rows, summed
    "position_embeddings": Role(WHOLE, partial_weight=UNDER_SP),
    "tokentype_embeddings": Role(WHOLE, partial_weight=UNDER_SP),
    "layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),  # of the embedding, and of BERT's head
    "relative_attention_bias": Role(COLUMNS),  # each rank its heads
    "embedding_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "hidden_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "linear_join": Role(WHOLE, WHOLE, None, UNDER_SP),
    "input_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "linear_qkv": Role(ROWS, ROWS, "column"),
    "linear_q_proj": Role(ROWS, WHOLE, "column"),
    "linear_q_down_proj": Role(WHOLE, WHOLE, None, UNDER_SP),  # narrow: each rank its tokens' latents
    "q_down_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "linear_q_up_proj": Role(ROWS, WHOLE, "column"),
    "linear_kv_down_proj": Role(WHOLE, WHOLE, None, UNDER_SP),
    "kv_down_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "linear_kv_up_proj": Role(ROWS, WHOLE, "column"),
    "linear_q": Role(ROWS, ROWS, "column"),  # of cross-attention
    "linear_kv": Role(ROWS, ROWS, "column"),
    "q_layernorm": Role(WHOLE, WHOLE, None, ALWAYS, ALWAYS),  # each rank sees its own heads
    "k_layernorm": Role(WHOLE, WHOLE, None, ALWAYS, ALWAYS),
    "softmax_offset": Role(ROWS),  # each rank its heads
    "linear_proj": Role(COLUMNS, WHOLE, "row", NEVER, UNDER_SP),  # the bias is added after the sum
    "linear_in": Role(ROWS, ROWS, "column"),  # of a gated delta net, each rank its heads
    "linear_gates": Role(ROWS, ROWS, "column"),
    "conv": Role(ROWS, ROWS),
    "decay": Role(ROWS, ROWS),
    "out_norm": Role(WHOLE, WHOLE, None, ALWAYS, ALWAYS),
    "linear_out": Role(COLUMNS, WHOLE, "row", NEVER, UNDER_SP),
    "post_attention_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "pre_cross_attn_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "post_cross_attn_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "pre_mlp_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "linear_fc1": Role(ROWS, ROWS, "column"),
    "linear_fc2": Role(COLUMNS, WHOLE, "row", NEVER, UNDER_SP),
    "post_mlp_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "router": Role(
        WHOLE, WHOLE, None, UNDER_SP, UNDER_SP
    ),  # experts themselves are cut in expert_parallel.py
    "shared_expert_gate": Role(WHOLE, WHOLE, None, UNDER_SP),
    "final_layernorm": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),
    "output_layer": Role(ROWS),  # logits of a rank's rows: see tensor_parallel.py
    "dense": Role(WHOLE, WHOLE, None, UNDER_SP, UNDER_SP),  # BERT's head: each rank its tokens
    "vocabulary": Role(ROWS, ROWS),  # the bias behind a rank's rows
    "pooler": Role(WHOLE),  # of whole sequences, alike on every rank
    "binary_head": Role(WHOLE),
    "units": Role(ROWS, ROWS),  # what each unit behind a column-parallel matrix has for itself
}
# Fewer KV groups than ranks: several ranks share a group, each with some of its query heads and all of its key and
# value head. No cut of the rows gives that, so every rank holds the matrix and reads its own rows of it.
SHARED_QKV = Role(WHOLE, WHOLE, "column", ALWAYS, ALWAYS)
# A norm with weights for each head: a rank has those of its own. Over all together the sum of squares is made whole.
HEADS_NORM = Role(ROWS)
# An adapter's matrices, by the style of the linear that they stand beside: see lora_shards.py.
ADAPTER_ROLES = {
    ("column", "lora_A"): Role(WHOLE, WHOLE, None, UNDER_SP),  # of a rank's tokens
    ("column", "lora_B"): Role(ROWS),
    ("row", "lora_A"): Role(COLUMNS),
    ("row", "lora_B"): Role(WHOLE, WHOLE, None, UNDER_SP),
}
SHARED_B = Role(WHOLE, WHOLE, None, ALWAYS)  # of the keys or values of a shared group


def role_of(name: str, module: nn.Module, shares_groups: bool, owner: nn.Module | None = None) -> Role:
    """The role of the module of this name in a model; experts have none (CUTS in expert_parallel.py).

    `shares_groups`: there are fewer KV groups than tensor-parallel ranks. Of an `owner` whose class has `roles`, a
    linear has the one named there. Raises ConfigError for a module without a role.
    """
    linear, _, matrix = name.partition(ADAPTER)
    linear = linear.rpartition(".")[2]
    linear = getattr(owner, "roles", {}).get(linear, linear)
    shared = shares_groups and linear in ("linear_qkv", "linear_kv")
    if matrix:
        kind, part = matrix.split(".")
        return (
            SHARED_B
            if shared and kind == "lora_B" and part != "q"
            else ADAPTER_ROLES[ROLES[linear].style, kind]
        )
    if isinstance(module, HeadsNorm | HeadNorms):
        return HEADS_NORM
    if linear not in ROLES:
        raise ConfigError(
            f"tensor parallelism knows no role for {name}: give {type(owner).__name__} a class attribute "
            f'roles = {{"{linear}": ...}} with one of {", ".join(ROLES)}'
        )
    return SHARED_QKV if shared else ROLES[linear]
