"""What each key of a config.json may hold: checked before any of it is reckoned with, for the file is a stranger's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.errors import ConfigError

MOST_LAYERS = 10_000
LARGEST = 2**31 - 1

# fmt: off
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "first_k_dense_replace")
COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "original_max_position_embeddings", "sliding_window", "sliding_window_pattern",
    "n_embd", "n_inner", "n_head", "n_positions", "num_experts", "num_local_experts", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "decoder_sparse_step", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)
NUMBERS = (
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
)
NAMES = ("model_type", "rope_type", "type", "topk_method")
OBJECTS = ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention")  # of these keys again
LISTS = {"architectures": str, "layer_types": str, "mlp_only_layers": int, "short_factor": float, "long_factor": float}
# fmt: on


def check_kinds(theirs: Mapping[str, Any], where: str = "config.json") -> None:
    """Raises ConfigError for a key of the tables above whose value is of another kind; null says nothing anywhere."""
    for key, value in theirs.items():
        if value is not None and (rule := _broken_rule(key, value)):
            raise ConfigError(
                f"{where} has {key} {_short(value)}, which is not {rule}; correct it, or fetch it again"
            )
        if key in OBJECTS and value:
            check_kinds(value, f"{where}'s {key}")


def _broken_rule(key: str, value: Any) -> str | None:
    if key in LAYER_COUNTS:
        return (
            None if _is_count(value) and value <= MOST_LAYERS else f"a number of layers up to {MOST_LAYERS:,}"
        )
    if key in COUNTS:
        return None if _is_count(value) else f"a whole number from 0 to {LARGEST:,}"
    if key in NUMBERS:
        return None if _is_number(value) and value > 0 else "a number above 0"
    if key in NAMES:
        return None if isinstance(value, str) else "a name"
    if key in OBJECTS:
        return None if isinstance(value, dict) else "an object"
    if key in LISTS:
        fits = {str: lambda one: isinstance(one, str), int: _is_count, float: _is_number}[LISTS[key]]
        whole = isinstance(value, list) and all(map(fits, value))
        return None if whole else f"a list of {'names' if LISTS[key] is str else 'numbers'}"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
