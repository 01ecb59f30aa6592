"""Rotary frequencies in a config.json: `rope_theta` with `rope_scaling`, or both in `rope_parameters` (transformers 5).

Both spellings are read. The older one is written, which every version of transformers and other loaders understand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.settings import Tree
from megalith.config.model import ModelConfig
from megalith.config.rope_scaling import RopeScaling
from megalith.errors import ConfigError

# What each kind of scaling is made of, by the names that RopeScaling and config.json share.
PARTS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
PLAIN = ("default", None)


class Rope:
    """The row of a family's table for rotary_base and rope_scaling."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        given = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        fields: Tree = {"position_embedding_type": "rope"}
        fields["rotary_base"] = given.get("rope_theta") or theirs.get("rope_theta") or 10000.0
        kind = given.get("rope_type", given.get("type"))
        if kind not in PLAIN:
            fields["rope_scaling"] = _scaling(kind, given, theirs)
        return fields

    def write(self, model: ModelConfig) -> Tree:
        scaling = model.rope_scaling
        return {
            "rope_theta": model.rotary_base,
            "rope_scaling": scaling and {"rope_type": scaling.type, **_parts(scaling)},
        }


class RopeByLayer:
    """As Rope, with a base of its own, never scaled, for layers with a window (Gemma 3)."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        given = theirs.get("rope_parameters") or {}
        whole = given.get("full_attention") or theirs.get("rope_scaling") or {}
        local = given.get("sliding_attention") or {}
        if local.get("rope_type") not in PLAIN:
            raise ConfigError(
                f"config.json scales the rotary positions of layers with a window ({local['rope_type']}), which "
                "cannot be here"
            )
        base = whole.get("rope_theta") or theirs.get("rope_theta") or 1e6
        fields = Rope().read({**theirs, "rope_parameters": {**whole, "rope_theta": base}})
        kinds = theirs.get("layer_types") or ["sliding_attention"]
        if theirs.get("sliding_window") and "sliding_attention" in kinds:
            fields["rotary_base_local"] = (
                local.get("rope_theta") or theirs.get("rope_local_base_freq") or 10000.0
            )
        return fields

    def write(self, model: ModelConfig) -> Tree:
        return Rope().write(model) | {"rope_local_base_freq": model.rotary_base_local or model.rotary_base}


class LongRope:
    """As Rope, with LongRoPE as Phi-3 spells it, and heads that turn in part."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        given = dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})
        percent = given.pop("partial_rotary_factor", None) or theirs.get("partial_rotary_factor") or 1.0
        if given.pop("type", given.get("rope_type")) not in PLAIN:
            given["rope_type"] = "longrope"  # which has had other names there
        return Rope().read({**theirs, "rope_parameters": given}) | {"rotary_percent": percent}

    def write(self, model: ModelConfig) -> Tree:
        scaling = model.rope_scaling
        tree = Rope().write(model) | {"partial_rotary_factor": model.rotary_percent}
        if scaling is not None and scaling.type == "longrope":
            parts = _parts(scaling)
            tree["original_max_position_embeddings"] = original = parts.pop(
                "original_max_position_embeddings"
            )
            if scaling.factor == model.max_position_embeddings / original:
                del parts["factor"]  # what it is by itself
            tree["rope_scaling"] = {"type": "longrope", **parts}
        return tree


def _scaling(kind: str, given: Mapping[str, Any], theirs: Mapping[str, Any]) -> Tree:
    if kind not in PARTS:
        raise ConfigError(f"config.json has rotary scaling of type {kind!r}; known here: {', '.join(PARTS)}")
    parts = PARTS[kind]
    strange = set(given) - {"rope_theta", "rope_type", "type", *parts}
    strange = {key for key in strange if given[key] is not None and (key, given[key]) not in HARMLESS}
    if strange:
        raise ConfigError(
            f"config.json has rotary scaling {kind} with {', '.join(sorted(strange))}, which is not known here"
        )
    fields = {key: given[key] for key in parts if given.get(key) is not None}
    longest = theirs.get("max_position_embeddings")
    if "original_max_position_embeddings" in parts:
        original = theirs.get("original_max_position_embeddings") if kind == "longrope" else None
        fields.setdefault("original_max_position_embeddings", original or longest)
    if kind == "longrope" and "factor" not in fields:  # there it follows from the two lengths
        if not longest or not fields["original_max_position_embeddings"]:
            raise ConfigError(
                "config.json has longrope without max_position_embeddings and original_max_position_embeddings, from "
                "which its factor follows; add them"
            )
        fields.setdefault("factor", longest / fields["original_max_position_embeddings"])
    return {"type": kind, **fields}


HARMLESS = (("truncate", True), ("partial_rotary_factor", 1.0))


def _parts(scaling: RopeScaling) -> Tree:
    parts = {key: getattr(scaling, key) for key in PARTS[scaling.type]}
    return {key: value for key, value in parts.items() if value is not None}
