"""Rows that map a `config.json` to a ModelConfig and back.

A row's `read` takes the config.json and returns settings; `write` takes a model and returns keys. Both raise
ConfigError for a value that the other side cannot express. A family can express a model if writing its config.json and
reading it again gives the same model (`differences`), so a setting without a row is detected.

RoPE is read in both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` (transformers 5). The older one
is written, because every version of transformers and other loaders read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from megalith.config import ModelConfig, RunConfig
from megalith.config.base import Decides
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


LAYER_KINDS = ("full_attention", "sliding_attention")


def rope_settings(hf_config: Mapping[str, Any]) -> Tree:
    """Return the rotary settings under either of their keys.

    Raises ConfigError if both keys are present and differ: transformers then uses `rope_scaling` alone, without the
    other's rope_theta, and other loaders use `rope_parameters`.
    """
    new, old = hf_config.get("rope_parameters") or {}, hf_config.get("rope_scaling") or {}
    if new and old:
        base = old.get("rope_theta") or hf_config.get("rope_theta")
        one, other = (_plainly({"rope_theta": base, **settings}) for settings in (new, old))
        if differing := [key for key in {**one, **other} if one.get(key) != other.get(key)]:
            raise ConfigError(
                "config.json has rope_parameters and rope_scaling, which differ in "
                f"{', '.join(differing)}, and it depends on the loader which one is used; keep "
                "one: put everything, including rope_theta, into rope_parameters"
            )
    return dict(new or old)


def _plainly(settings: Tree) -> Tree:
    named = {("rope_type" if key == "type" else key): value for key, value in settings.items()}
    return {"rope_type": "default"} | {key: value for key, value in named.items() if value is not None}


class Rope:
    """Maps rotary_base and rope_scaling."""

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
    """Maps RoPE with a separate, unscaled base in sliding-window layers (Gemma 3).

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
                f"config.json has rope_parameters with {', '.join(others)}, which this family needs under a kind of "
                f"layer: {' or '.join(LAYER_KINDS)}"
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
    """Maps RoPE on a fraction of each head's dimensions.

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
    """Maps RoPE as PartialRope does, and LongRoPE under Phi-3's keys of config.json."""

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
        original = fields.setdefault("original_max_position_embeddings", max_length)
        if hf_config.get("original_max_position_embeddings") not in (None, original):
            raise ConfigError(
                f"config.json has original_max_position_embeddings {hf_config['original_max_position_embeddings']}, "
                f"but its rotary scaling has {original}; keep the right one and remove the other"
            )
    if kind == "longrope" and "factor" not in fields:  # transformers derives it from the two lengths
        if not max_length or not fields["original_max_position_embeddings"]:
            raise ConfigError(
                "config.json has longrope without max_position_embeddings and original_max_position_embeddings, from "
                "which its factor follows; add them"
            )
        fields.setdefault("factor", max_length / fields["original_max_position_embeddings"])
    return {"type": kind, **fields}


HARMLESS = (("truncate", True), ("partial_rotary_factor", 1.0))


def _parts(scaling: RopeScaling) -> Tree:
    parts = {key: getattr(scaling, key) for key in PARTS[scaling.type]}
    return {key: value for key, value in parts.items() if value is not None and (key, value) not in HARMLESS}


Tree = dict[str, Any]
REQUIRED = object()


class ConfigRow(Protocol):
    """Row of a family's configuration table."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        """Return settings of ModelConfig from a config.json."""

    def write(self, model: ModelConfig) -> Tree:
        """Return keys of a config.json for a model."""


@dataclass(frozen=True)
class Field:
    """Maps one setting to its key. `values` maps the key's values to the setting's."""

    setting: str
    key: str
    default: Any = REQUIRED  # the key's value if config.json omits it
    values: Mapping[Any, Any] | None = None
    alias: str | None = None  # another spelling of the key

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        value = hf_config.get(self.key, hf_config.get(self.alias, self.default))
        if self.alias in hf_config and hf_config[self.alias] != value:
            raise ConfigError(
                f"config.json has {self.key} {value!r} and {self.alias} {hf_config[self.alias]!r}, "
                "two names of one setting with different values; remove one of them"
            )
        if value is REQUIRED:
            raise ConfigError(f"config.json has no {self.key}, which gives model.{self.setting}; add it")
        if value is None:
            if self.default is REQUIRED:
                raise ConfigError(
                    f"config.json has {self.key} null, but model.{self.setting} needs a value; set {self.key}"
                )
            return {}
        if self.values is not None:
            if isinstance(value, list | dict) or value not in self.values:
                raise ConfigError(
                    f"config.json has {self.key} {value!r}, which is not supported; supported: "
                    f"{', '.join(map(repr, self.values))}"
                )
            value = self.values[value]
        return {self.setting: value}

    def write(self, model: ModelConfig) -> Tree:
        [(_, value)] = model.resolved([self.setting])
        if self.values is not None:
            spellings = [
                key_value for key_value, setting_value in self.values.items() if setting_value == value
            ]
            if not spellings:
                raise ConfigError(f"{self.setting} {value!r} has no equivalent for {self.key}")
            value = spellings[0]
        return {self.key: value}


class FixedSettings:
    """Sets settings that all models of the family share and config.json omits: FixedSettings(swiglu=True)."""

    def __init__(self, **fields: Any):
        self._fields = fields

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return dict(self._fields)

    def write(self, model: ModelConfig) -> Tree:
        return {}


class RequiredKeys:
    """Rejects a config.json in which a key does not have the required value: RequiredKeys(hidden_act="silu").

    An omitted key has the required value, unless `defaults` gives another default.
    """

    def __init__(self, defaults: Mapping[str, Any] | None = None, **keys: Any):
        self._keys, self._defaults = keys, defaults or {}

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        for key, only in self._keys.items():
            value = hf_config.get(key, self._defaults.get(key, only))
            if value != only:
                raise ConfigError(
                    f"config.json has {key} {value!r}, but models of this family are supported "
                    f"only with {only!r}"
                )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return dict(self._keys)


class WrittenKeys:
    """Writes keys that do not affect the model, because their default fits only a published model."""

    def __init__(self, **keys: Any):
        self._keys = keys

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return dict(self._keys)


@dataclass(frozen=True)
class SameInAllLayers:
    """Maps a list with one value per layer, which must be the same for all layers."""

    key: str
    value: Any

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        others = [value for value in hf_config.get(self.key) or () if value != self.value]
        if others:
            raise ConfigError(
                f"config.json has {self.key} with {others[0]!r}, but models of this family are "
                f"supported only with {self.value!r}"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {self.key: [self.value] * model.num_layers}


@dataclass(frozen=True)
class Window:
    """Maps `sliding_window`, the number of keys that a query attends to, including its own, in every layer."""

    default: int | None  # window if config.json omits it

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        window = hf_config.get("sliding_window", self.default)
        return {} if window is None else {"window_size": [window - 1, 0]}

    def write(self, model: ModelConfig) -> Tree:
        return {"sliding_window": model.windows[0]}


def check_layer_types(kinds: Collection[str] | None, supported: Collection[str]) -> None:
    """Raise ConfigError for a kind of layer that the family does not support."""
    if unknown := [kind for kind in kinds or () if kind not in supported]:
        raise ConfigError(
            f"config.json has layer_types with {unknown[0]!r}, but models of this family are "
            f"supported only with {' and '.join(supported)}"
        )


@dataclass(frozen=True)
class WindowsByLayer:
    """Maps windows in the layers that `layer_types` calls sliding_attention, or in all but every N-th layer."""

    every: int | None = None  # N if config.json has neither key; None: windows in all layers
    default: int | None = 4096  # window if config.json omits it
    pattern: str | None = "sliding_window_pattern"  # key of N
    unused: int | None = None  # window to write if no layer has one
    first: bool = False  # layer 0 is the first without a window, not layer N - 1

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        window = hf_config.get("sliding_window", self.default)
        kinds = hf_config.get("layer_types")
        check_layer_types(kinds, LAYER_KINDS)
        if window is None or (kinds and "sliding_attention" not in kinds):
            return {}
        every = hf_config.get(self.pattern, self.every)
        if not kinds and isinstance(every, str):
            raise ConfigError(
                f"config.json has {self.pattern} {every!r} and no layer_types; add layer_types, with sliding_attention "
                "or full_attention for each layer"
            )
        if kinds:
            skip = [int(kind == "sliding_attention") for kind in kinds]
        elif self.first and every:
            skip = [int(layer % every > 0) for layer in range(hf_config["num_hidden_layers"])]
        else:
            skip = every
        return {"window_size": [window - 1, 0], "window_attn_skip_freq": skip}

    def write(self, model: ModelConfig) -> Tree:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in model.windows]
        return {"sliding_window": max(filter(None, model.windows), default=self.unused), "layer_types": kinds}


LATENT_EPSILON = 1e-6  # of the latents' norms in transformers, whatever rms_norm_eps is


def conversion_notes(model: ModelConfig) -> list[str]:
    """Return notes on differences between Megalith's and transformers' computation that config.json cannot express."""
    if not model.multi_latent_attention or model.layernorm_epsilon == LATENT_EPSILON:
        return []
    return [
        f"norms of latents use layernorm_epsilon {model.layernorm_epsilon:g} here, as in "
        f"Megatron-LM and vLLM; transformers uses {LATENT_EPSILON:g}, so its logits differ"
    ]


def function_settings(model: ModelConfig) -> Tree:
    """Return the resolved settings of `model` that affect its function, without settings that it does not use."""
    unread = model.unread(RunConfig(model=model))
    decides = model.fields_deciding(Decides.FUNCTION, Decides.REACH)
    fields = dict(model.resolved(name for name in decides if name not in unread))
    if fields.get("rope_scaling") is not None:
        fields["rope_scaling"] = _with_magnitude(fields["rope_scaling"])
    return fields


def _with_magnitude(scaling: RopeScaling) -> RopeScaling:
    """Return YaRN scaling with an explicit attention_factor, without the rounding error of Megatron's mscale."""
    if scaling.type != "yarn" or (scaling.mscale and scaling.mscale_all_dim):
        return scaling
    factor = round(scaling.attention_factor or scaling.magnitude(), 12)
    return scaling.model_copy(update={"attention_factor": factor})


def differences(model: ModelConfig, other: ModelConfig, ignore: Collection[str] = ()) -> list[str]:
    """Return the settings that make two models differ in function, as text: `swiglu True, not False`."""
    return [f"{name} {one!r}, not {two!r}" for name, one, two in changed_settings(model, other, ignore)]


def changed_settings(
    model: ModelConfig, other: ModelConfig, ignore: Collection[str] = ()
) -> list[tuple[str, Any, Any]]:
    """Return the settings that make two models differ in function, with both values.

    Settings that one of them does not read (such as expert sizes of a dense model) are ignored.
    """
    one, two = function_settings(model), function_settings(other)
    return [
        (name, one[name], two[name])
        for name in one
        if name in two and one[name] != two[name] and name not in ignore
    ]
