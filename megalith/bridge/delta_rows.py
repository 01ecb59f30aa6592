"""Row orders of delta nets' matrices and convolutions: by key head, with the value heads that share it."""

from __future__ import annotations

from megalith.bridge.rows import by_group
from megalith.config import ModelConfig


def delta_rows(model: ModelConfig) -> list[int]:
    """Return the numbers of rows of all queries, all keys, all values and all gates z."""
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    return [keys, keys, values, values]


def _key_heads(model: ModelConfig) -> int:
    return model.linear_num_key_heads


QUERY_KEY_VALUE_GATE = by_group(_key_heads, delta_rows)
QUERY_KEY_VALUE = by_group(_key_heads, lambda model: delta_rows(model)[:3])
STRENGTH_STEP = by_group(_key_heads, lambda model: [model.linear_num_value_heads] * 2)
"""The rows of linear_gates, of which b gives the write strength and a the step size."""
