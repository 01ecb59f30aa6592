"""Rows that map the RoPE of a `config.json` to Megalith's settings and back.

Both spellings are read: `rope_theta` with `rope_scaling`, and `rope_parameters` (transformers 5). The older one is
written, because every version of transformers and other loaders read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from megalith.bridge.settings import LAYER_KINDS, Tree
from megalith.config import ModelConfig
from megalith.config.rope_scaling import RopeScaling
from megalith.errors import ConfigError

MSCALES = ("mscale", "mscale_all_dim")  # YaRN of DeepSeek only
# Parameters of each kind of scaling, by the names that RopeScaling and config.json share.
PARTS = {
    kind: [
        name
        for name in RopeScaling.model_fields
        if name not in ("type", *MSCALES, *RopeScaling(type=kind).unread())
    ]
    for kind in get_args(RopeScaling.model_fields["type"].annotation)
}
PLAIN = ("default", None)


def rope_settings(hf_config: Mapping[str, Any]) -> Tree:
    """Return the rotary settings under either of their keys.

    Raises ConfigError if both keys are present and differ: transformers then uses only `rope_scaling`, without the
    other's rope_theta, and other loaders use `rope_parameters`.
    """
    new, old = hf_config.get("rope_parameters") or {}, hf_config.get("rope_scaling") or {}
    if new and old:
        base = old.get("rope_theta") or hf_config.get("rope_theta")
        one, other = (_plainly({"rope_theta": base, **settings}) for settings in (new, old))
        if differing := [key for key in {**one, **other} if one.get(key) != other.get(key)]:
            raise ConfigError(
                f"config.json has rope_parameters and rope_scaling, which differ in {', '.join(differing)}, and "
                "loaders disagree on which of them is used; keep only rope_parameters, with everything in it, "
                "including rope_theta"
            )
    return dict(new or old)


def _plainly(settings: Tree) -> Tree:
    named = {("rope_type" if key == "type" else key): value for key, value in settings.items()}
    return {"rope_type": "default"} | {key: value for key, value in named.items() if value is not None}


class Rope:
    """Maps rope_theta and rope_scaling to rotary_base and rope_scaling."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = rope_settings(hf_config)
        if kinds := [kind for kind in LAYER_KINDS if kind in rope]:
            raise ConfigError(
                f"config.json has rotary settings for each kind of layer ({', '.join(kinds)}), "
                "but in this family all layers must have the same; write rope_type and the other "
                "keys directly in rope_parameters"
            )
        fields: Tree = {"position_embedding_type": "rope"}
        fields["rotary_base"] = rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in PLAIN:
            fields["rope_scaling"] = _scaling(kind, rope, hf_config)
        return fields

    def write(self, model: ModelConfig) -> Tree:
        scaling = model.rope_scaling
        return {
            "rope_theta": model.rotary_base,
            "rope_scaling": scaling and {"rope_type": scaling.type, **_parts(scaling)},
        }


@dataclass(frozen=True)
class RopeByLayer:
    """Maps the RoPE settings, with a separate, unscaled base for sliding-window layers (Gemma 3).

    `base` and `local_base` are the bases of both kinds of layers if config.json omits them. `nested` writes
    `rope_parameters` by kind of layer, for families without `rope_local_base_freq`.
    """

    base: float = 1e6
    local_base: float = 10000.0
    nested: bool = False

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope, scaling = hf_config.get("rope_parameters") or {}, hf_config.get("rope_scaling") or {}
        if others := sorted(set(rope) - set(LAYER_KINDS)):
            raise ConfigError(
                f"config.json has rope_parameters with {', '.join(others)}; in this family, they must be inside the "
                f"entry of a kind of layer: {' or '.join(LAYER_KINDS)}"
            )
        full = rope_settings({"rope_parameters": rope.get("full_attention"), "rope_scaling": scaling})
        local = rope.get("sliding_attention") or {}
        if local.get("rope_type") not in PLAIN:
            raise ConfigError(
                f"config.json scales the rotary positions of sliding-window layers ({local['rope_type']}), which "
                "is not supported"
            )
        base = full.get("rope_theta") or hf_config.get("rope_theta") or self.base
        fields = Rope().read(_with_rope(hf_config, {**full, "rope_theta": base}))
        kinds = hf_config.get("layer_types") or ["sliding_attention"]
        if hf_config.get("sliding_window") and "sliding_attention" in kinds:
            old = None if self.nested else hf_config.get("rope_local_base_freq")
            local_base = local.get("rope_theta") or old or self.local_base
            if not self.nested or local_base != base or "rope_scaling" in fields:
                fields["rotary_base_local"] = local_base
        return fields

    def write(self, model: ModelConfig) -> Tree:
        tree, local_base = Rope().write(model), model.rotary_base_local or model.rotary_base
        if not self.nested:
            return tree | {"rope_local_base_freq": local_base}
        scaling = tree["rope_scaling"] or {"rope_type": "default"}
        local = {"rope_type": "default", "rope_theta": local_base}
        return {
            "rope_parameters": {
                "full_attention": {**scaling, "rope_theta": tree["rope_theta"]},
                "sliding_attention": local,
            }
        }


@dataclass(frozen=True)
class PartialRope:
    """Maps `partial_rotary_factor`, the fraction of each head that RoPE rotates, and the other RoPE settings.

    `share` and `base` are the config.json keys of the fraction and of the RoPE base.
    """

    default: float  # fraction if config.json omits it
    share: str = "partial_rotary_factor"
    base: str = "rope_theta"

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = rope_settings(hf_config)
        percent = rope.pop("partial_rotary_factor", None) or hf_config.get(self.share) or self.default
        rope.setdefault("rope_theta", hf_config.get(self.base))
        return Rope().read(_with_rope(hf_config, rope)) | {"rotary_percent": percent}

    def write(self, model: ModelConfig) -> Tree:
        tree = Rope().write(model)
        return {self.base: tree.pop("rope_theta"), self.share: model.rotary_percent, **tree}


class LongRope:
    """Maps the RoPE settings like PartialRope, and LongRoPE with Phi-3's config.json keys."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = rope_settings(hf_config)
        if rope.pop("type", rope.get("rope_type")) not in PLAIN:
            rope["rope_type"] = "longrope"  # older versions use other names
            if original := hf_config.get("original_max_position_embeddings"):
                rope["original_max_position_embeddings"] = original  # has priority in transformers
        return PartialRope(1.0).read(_with_rope(hf_config, rope))

    def write(self, model: ModelConfig) -> Tree:
        scaling, tree = model.rope_scaling, PartialRope(1.0).write(model)
        if scaling is not None and scaling.type == "longrope":
            parts = _parts(scaling)
            tree["original_max_position_embeddings"] = original = parts.pop(
                "original_max_position_embeddings"
            )
            if scaling.factor == model.max_position_embeddings / original:
                del parts["factor"]  # the default
            tree["rope_scaling"] = {"type": "longrope", **parts}
        return tree


def _with_rope(hf_config: Mapping[str, Any], settings: Tree) -> Tree:
    return {**hf_config, "rope_parameters": settings, "rope_scaling": None}


def _scaling(kind: str, rope: Mapping[str, Any], hf_config: Mapping[str, Any]) -> Tree:
    if kind not in PARTS:
        raise ConfigError(
            f"config.json has rotary scaling of type {kind!r}, which is not "
            f"supported; supported: {', '.join(PARTS)}"
        )
    parts = PARTS[kind]
    unknown = set(rope) - {"rope_theta", "rope_type", "type", *parts}
    unknown = {key for key in unknown if rope[key] is not None and (key, rope[key]) not in HARMLESS}
    if unknown:
        raise ConfigError(
            f"config.json has rotary scaling {kind} with {', '.join(sorted(unknown))}, which is "
            "not supported; use a model without it"
        )
    fields = {key: rope[key] for key in parts if rope.get(key) is not None}
    max_length = hf_config.get("max_position_embeddings")
    if "original_max_position_embeddings" in parts:
        stated = hf_config.get(
            "original_max_position_embeddings"
        )  # transformers copies it into the rotary settings
        original = fields.setdefault("original_max_position_embeddings", stated or max_length)
        if stated not in (None, original):
            raise ConfigError(
                f"config.json has original_max_position_embeddings {stated}, "
                f"but its rotary scaling has {original}; remove the wrong one of the two"
            )
    if "factor" in parts and "factor" not in fields:
        fields["factor"] = _derived_factor(
            kind, rope, max_length, fields.get("original_max_position_embeddings")
        )
    if missing := [name for name in REQUIRED if name in parts and name not in fields]:
        raise ConfigError(
            f"config.json has rotary scaling {kind} without {' and '.join(missing)}, which have no default; add the "
            "model's values"
        )
    return {"type": kind, **fields}


def _derived_factor(kind: str, rope: Mapping[str, Any], length: Any, original: Any) -> float:
    """Return the ratio of the two lengths. In transformers it is LongRoPE's factor, and also YaRN's if that is null."""
    if not (kind == "longrope" or (kind == "yarn" and "factor" in rope)):
        raise ConfigError(f"config.json has rotary scaling {kind} without factor; add the model's factor")
    if not length or not original:
        raise ConfigError(
            f"config.json has {kind} without max_position_embeddings and original_max_position_embeddings, "
            "from which its factor follows; add these two keys"
        )
    return length / original


REQUIRED = ("low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
HARMLESS = (("truncate", True), ("partial_rotary_factor", 1.0))


def _parts(scaling: RopeScaling) -> Tree:
    parts = {key: getattr(scaling, key) for key in PARTS[scaling.type]}
    return {key: value for key, value in parts.items() if value is not None and (key, value) not in HARMLESS}
