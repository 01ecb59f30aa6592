"""Mapping rules for Mamba-2 mixers, shared by several families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.bridge.rows import RowRun, Rule, same
from megalith.bridge.settings import Tree, check_layer_types
from megalith.config import ModelConfig
from megalith.errors import ConfigError


def _sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Return the numbers of rows of x, B and dt."""
    width = model.mamba_heads * model.mamba_head_dim
    return width, model.mamba_num_groups * model.mamba_state_dim, model.mamba_heads


def _by_group(model: ModelConfig, parts: list[int]) -> list[RowRun]:
    """Order rows by group. The rows are those of consecutive sub-matrices with the row counts `parts`; each group gets
    its rows of all of them.
    """
    groups = model.mamba_num_groups
    starts = [sum(parts[:n]) for n in range(len(parts))]
    runs, ours = [], 0
    for group in range(groups):
        for start, rows in zip(starts, parts, strict=True):
            count = rows // groups
            runs.append(RowRun(0, start + group * count, ours, count))
            ours += count
    return runs


def _zxbcdt(model: ModelConfig, rows: int) -> list[RowRun]:
    """Order rows by group: z, x, B, C and dt. Hugging Face has all z, all x, all B, all C, all dt."""
    width, state, heads = _sizes(model)
    return _by_group(model, [width, width, state, state, heads])


def _xbc(model: ModelConfig, rows: int) -> list[RowRun]:
    width, state, _ = _sizes(model)
    return _by_group(model, [width, state, state])


def mamba_tensors(theirs: str, ours: str = "layers.{layer}.self_attention.") -> dict[str, Rule]:
    """Return the mapping rules of a Mamba-2 mixer whose Hugging Face names begin with `theirs`."""
    return {
        f"{ours}linear_zxbcdt.weight": Rule((f"{theirs}in_proj.weight",), _zxbcdt),
        f"{ours}linear_zxbcdt.bias": Rule((f"{theirs}in_proj.bias",), _zxbcdt),
        f"{ours}conv_xbc.weight": Rule((f"{theirs}conv1d.weight",), _xbc),
        f"{ours}conv_xbc.bias": Rule((f"{theirs}conv1d.bias",), _xbc),
        f"{ours}time_step.weight": same(f"{theirs}A_log"),
        f"{ours}time_step.bias": same(f"{theirs}dt_bias"),
        f"{ours}skip.weight": same(f"{theirs}D"),
        f"{ours}gated_norm.weight": same(f"{theirs}norm.weight"),
        f"{ours}linear_out.weight": same(f"{theirs}out_proj.weight"),
        f"{ours}linear_out.bias": same(f"{theirs}out_proj.bias"),
    }


def _number(value: Any) -> float | None:
    """Return a number from config.json, in which infinity is written as an object. None if the value is not a
    number.
    """
    if isinstance(value, dict):
        return math.inf if value.get("__float__") == "Infinity" else None
    return value if type(value) in (int, float) else None


class StepLimit:
    """Maps `time_step_limit`, the smallest and the largest step size. The default is no limits."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        limit = hf_config.get("time_step_limit")
        if limit is None:
            return {}
        values = [_number(value) for value in limit] if isinstance(limit, list | tuple) else []
        if len(values) != 2 or None in values:
            raise ConfigError(f"config.json has time_step_limit {limit!r}, which is not a pair of numbers")
        if values[0] == 0 and values[1] == math.inf:
            return {}
        if not 0 <= values[0] < values[1] < math.inf:
            raise ConfigError(
                f"config.json has time_step_limit {limit!r}; use no limits, or two finite ones in "
                "ascending order"
            )
        return {"mamba_dt_limit": [float(value) for value in values]}

    def write(self, model: ModelConfig) -> Tree:
        return {} if model.mamba_dt_limit is None else {"time_step_limit": model.mamba_dt_limit}


class MambaHeads:
    """Maps `mamba_n_heads` and `mamba_d_head`.

    Their product must be `mamba_expand` · hidden_size, or the value of `width_key`.

    Args:
        heads: number of heads if config.json omits it.
        width_key: key of the product; None means it follows from mamba_expand.
        width: the product if config.json omits the key; null means mamba_expand · hidden_size.
    """

    def __init__(self, heads: int = 128, width_key: str | None = None, width: int | None = None):
        self._heads, self._width_key, self._width = heads, width_key, width

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        heads = hf_config.get("mamba_n_heads", self._heads) or self._heads
        width = hf_config.get(self._width_key, self._width) if self._width_key else None
        if width is None:
            expand = hf_config.get("mamba_expand", 2)
            if type(expand) is not int:
                raise ConfigError(f"config.json has mamba_expand {expand!r}; it must be a whole number")
            width = expand * hf_config["hidden_size"]
        size = hf_config.get("mamba_d_head", "auto")
        size = width // heads if size == "auto" else size
        if type(size) is not int or heads * size != width:
            raise ConfigError(
                f"config.json has mamba_n_heads {heads} and mamba_d_head {size!r}, whose product is not {width}; "
                "correct them"
            )
        return {"mamba_num_heads": heads, "mamba_head_dim": size}

    def write(self, model: ModelConfig) -> Tree:
        width, hidden = model.mamba_heads * model.mamba_head_dim, model.hidden_size
        tree = {"mamba_n_heads": model.mamba_heads, "mamba_d_head": model.mamba_head_dim}
        if self._width_key:
            return tree | {self._width_key: width}
        if width % hidden:
            raise ConfigError(
                f"its mamba_num_heads × mamba_head_dim, {width}, is not a multiple of hidden_size {hidden}, but "
                "transformers stores the quotient as a whole number (mamba_expand)"
            )
        return tree | {"mamba_expand": width // hidden}


class ExpandedHeads:
    """Checks `expand`: transformers computes the width both from `expand` and from the heads."""

    def __init__(self, heads: str, size: str):
        self._heads, self._size = heads, size

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        expand, hidden = hf_config.get("expand", 2), hf_config["hidden_size"]
        sizes = hf_config.get(self._heads, 128), hf_config.get(self._size, 64)
        width = None if None in sizes else sizes[0] * sizes[1]
        if expand is None or width is None or expand * hidden != width:
            raise ConfigError(
                f"config.json has expand {expand} and hidden_size {hidden}, whose product is not the heads' width "
                f"{width}; correct them"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        width, hidden = model.mamba_heads * model.mamba_head_dim, model.hidden_size
        if width % hidden:
            raise ConfigError(
                f"its mamba_num_heads × mamba_head_dim, {width}, is not a multiple of hidden_size {hidden}, but "
                "transformers stores the quotient as a whole number (expand)"
            )
        return {"expand": width // hidden}


class MixerLayers:
    """Maps `layer_types` to attention or to the other mixer, `variant`, per layer.

    Args:
        kind: the other mixer's name in the list.
        variant: the other mixer's name in experimental_attention_variant.
        older: names that older files have → current ones.
        default: kind of all layers if config.json omits the list.
    """

    def __init__(
        self, kind: str, variant: str, older: Mapping[str, str] | None = None, default: str | None = None
    ):
        self._kind, self._variant, self._older = kind, variant, older or {}
        self._default = default or kind

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        kinds = hf_config.get("layer_types")
        if kinds is None:
            kinds = [self._default] * hf_config["num_hidden_layers"]
        kinds = [self._older.get(kind, kind) for kind in kinds]
        check_layer_types(kinds, ("full_attention", self._kind))
        return {
            "experimental_attention_variant": self._variant,
            "linear_attention_freq": [int(kind == self._kind) for kind in kinds],
        }

    def write(self, model: ModelConfig) -> Tree:
        others = model.linear_attention_layers
        kinds = [("full_attention", self._kind)[layer in others] for layer in range(model.num_layers)]
        return {"layer_types": kinds}
