"""Sizes of a parity run: all features at small sizes.

A laptop's CPU trains it in a second, and every axis can shard it: 4 layers, heads for 4 ranks, a padded vocabulary,
sequences for 4 context-parallel ranks. Fields name these functions in `Shrinks`. A function takes a field's value and
its section.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalith.config.dense import DenseModel, RopeScaling
    from megalith.config.model import ModelConfig

LAYERS, HEAD_DIM, SEQUENCE, VOCABULARY, PADDED_TO, BATCH = 4, 8, 32, 131, 10, 8
MOST_HEADS = 16
WINDOW = 11  # tokens before a query's own: fewer than in the sequences
EXPERTS, EXPERT_GROUPS, BEST_GROUPS = 8, 4, 2
HIGHEST_RATE = 1e-3  # above it a tiny model's optimizer makes much of the last bit


def query_groups(_: int, model: DenseModel) -> int:
    """Return KV heads with the same ratio to query heads, at most 16; 0 for MHA."""
    return 0 if model.num_attention_heads == model.query_groups else min(2, model.query_groups)


def heads(_: int | None, model: DenseModel) -> int:
    return min((query_groups(0, model) or 4) * (model.num_attention_heads // model.query_groups), MOST_HEADS)


def hidden(_: int | None, model: DenseModel) -> int:
    return heads(None, model) * HEAD_DIM


def ffn(value: int | None, model: DenseModel) -> int | None:
    """Return the MLP width in proportion, as a multiple of 8."""
    return value and 8 * math.ceil(hidden(None, model) * value / model.hidden_size / 8)


def window_skip(value: int | list[int] | None, _: DenseModel) -> int | list[int] | None:
    """Return the layers without a window, limited to the first 4."""
    return (value * LAYERS)[:LAYERS] if isinstance(value, list) else value and min(value, LAYERS)


def value_heads_of_delta(_: int, model: ModelConfig) -> int:
    """Return value heads with the same ratio to key heads, at most 16 in all."""
    return min(
        heads_of_delta(0, model) * (model.linear_num_value_heads // model.linear_num_key_heads), MOST_HEADS
    )


def heads_of_delta(_: int, model: ModelConfig) -> int:
    return min(model.linear_num_key_heads, 4)


def scaling(value: RopeScaling | None, model: DenseModel) -> RopeScaling | None:
    """Return RoPE scaling with LongRoPE's factors for the remaining pairs and an original length below the sequence
    length."""
    if value is None or value.type != "longrope":
        return value
    pairs = int(HEAD_DIM * model.rotary_percent) // 2
    factors = {name: getattr(value, name)[:pairs] for name in ("short_factor", "long_factor")}
    return value.model_copy(update={"original_max_position_embeddings": SEQUENCE // 2, **factors})


def experts_of_token(value: int, model: ModelConfig) -> int:
    if model.moe_router_group_topk:
        return 2 * min(model.moe_router_group_topk, BEST_GROUPS)
    return min(value, EXPERTS // 2)


def expert_layers(value: int | list[int], _: ModelConfig) -> int | list[int]:
    """Return the layers with experts; a dense first layer stays dense."""
    return [value[0], *[1] * (LAYERS - 1)] if isinstance(value, list) else value


def tokenizer(_: str | None, data: Any) -> str | None:
    """Return a tokenizer with an end of document if the run needs one."""
    return (
        "NullTokenizer"
        if data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
        else None
    )
