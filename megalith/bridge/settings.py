"""A `config.json` as a ModelConfig and back: each family lists what says what, in rows that read both ways.

A row's `read` takes the config.json and gives fields of ours, `write` takes a model and gives keys of theirs. Both
raise ConfigError for a value that the other side cannot say. A family is right for a model when writing its
configuration and reading it again gives the same model (`differences`): a field that a family knows nothing of shows
itself there.

Rotary frequencies in a config.json: `rope_theta` with `rope_scaling`, or both in `rope_parameters` (transformers 5).

Both spellings are read. The older one is written, which every version of transformers and other loaders understand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from megalith.config import ModelConfig, RunConfig
from megalith.config.base import Decides
from megalith.config.dense import RopeScaling
from megalith.errors import ConfigError

MSCALES = ("mscale", "mscale_all_dim")  # of yarn: DeepSeek's alone have them
# What each kind of scaling is made of, by the names that RopeScaling and config.json share.
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


def rope_settings(theirs: Mapping[str, Any]) -> Tree:
    """Return the rotary settings under either of their keys.

    Raises ConfigError where both keys are there and differ: transformers takes `rope_scaling` alone then, without the
    rope_theta of the other, and other loaders take `rope_parameters`.
    """
    new, old = theirs.get("rope_parameters") or {}, theirs.get("rope_scaling") or {}
    if new and old:
        base = old.get("rope_theta") or theirs.get("rope_theta")
        one, other = (_plainly({"rope_theta": base, **settings}) for settings in (new, old))
        if differing := [key for key in {**one, **other} if one.get(key) != other.get(key)]:
            raise ConfigError(
                f"config.json has rope_parameters and rope_scaling, which differ in {', '.join(differing)}, and "
                "loaders disagree on which of them counts; keep one: put all that is meant, with rope_theta, into "
                "rope_parameters"
            )
    return dict(new or old)


def _plainly(settings: Tree) -> Tree:
    named = {("rope_type" if key == "type" else key): value for key, value in settings.items()}
    return {"rope_type": "default"} | {key: value for key, value in named.items() if value is not None}


class Rope:
    """The row of a family's table for rotary_base and rope_scaling."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        given = rope_settings(theirs)
        if kinds := [kind for kind in LAYER_KINDS if kind in given]:
            raise ConfigError(
                f"config.json has rotary settings for each kind of layer ({', '.join(kinds)}), but models of this "
                "family are built here with the same for all layers; give rope_type and the rest without them"
            )
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
        given, scaling = theirs.get("rope_parameters") or {}, theirs.get("rope_scaling") or {}
        if others := sorted(set(given) - set(LAYER_KINDS)):
            raise ConfigError(
                f"config.json has rope_parameters with {', '.join(others)}, which have to be under the kind of layer "
                f"that they are of in this family: {' or '.join(LAYER_KINDS)}"
            )
        whole = rope_settings({"rope_parameters": given.get("full_attention"), "rope_scaling": scaling})
        local = given.get("sliding_attention") or {}
        if local.get("rope_type") not in PLAIN:
            raise ConfigError(
                f"config.json scales the rotary positions of layers with a window ({local['rope_type']}), which "
                "cannot be here"
            )
        base = whole.get("rope_theta") or theirs.get("rope_theta") or 1e6
        fields = Rope().read(_with_rope(theirs, {**whole, "rope_theta": base}))
        kinds = theirs.get("layer_types") or ["sliding_attention"]
        if theirs.get("sliding_window") and "sliding_attention" in kinds:
            fields["rotary_base_local"] = (
                local.get("rope_theta") or theirs.get("rope_local_base_freq") or 10000.0
            )
        return fields

    def write(self, model: ModelConfig) -> Tree:
        return Rope().write(model) | {"rope_local_base_freq": model.rotary_base_local or model.rotary_base}


@dataclass(frozen=True)
class PartialRope:
    """As Rope, of a share of each head's dimensions; `share` and `base` are its keys and that of rotary_base."""

    default: float  # the share where config.json leaves it out
    share: str = "partial_rotary_factor"
    base: str = "rope_theta"

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        given = rope_settings(theirs)
        percent = given.pop("partial_rotary_factor", None) or theirs.get(self.share) or self.default
        given.setdefault("rope_theta", theirs.get(self.base))
        return Rope().read(_with_rope(theirs, given)) | {"rotary_percent": percent}

    def write(self, model: ModelConfig) -> Tree:
        tree = Rope().write(model)
        return {self.base: tree.pop("rope_theta"), self.share: model.rotary_percent, **tree}


class LongRope:
    """As PartialRope, with LongRoPE as Phi-3 spells it."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        given = rope_settings(theirs)
        if given.pop("type", given.get("rope_type")) not in PLAIN:
            given["rope_type"] = "longrope"  # which has had other names there
            if original := theirs.get("original_max_position_embeddings"):
                given["original_max_position_embeddings"] = original  # which wins there
        return PartialRope(1.0).read(_with_rope(theirs, given))

    def write(self, model: ModelConfig) -> Tree:
        scaling, tree = model.rope_scaling, PartialRope(1.0).write(model)
        if scaling is not None and scaling.type == "longrope":
            parts = _parts(scaling)
            tree["original_max_position_embeddings"] = original = parts.pop(
                "original_max_position_embeddings"
            )
            if scaling.factor == model.max_position_embeddings / original:
                del parts["factor"]  # what it is by itself
            tree["rope_scaling"] = {"type": "longrope", **parts}
        return tree


def _with_rope(theirs: Mapping[str, Any], settings: Tree) -> Tree:
    return {**theirs, "rope_parameters": settings, "rope_scaling": None}


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
        original = fields.setdefault("original_max_position_embeddings", longest)
        if theirs.get("original_max_position_embeddings") not in (None, original):
            raise ConfigError(
                f"config.json has original_max_position_embeddings {theirs['original_max_position_embeddings']}, but "
                f"its rotary scaling has {original}; put the one that is meant there, and leave the other out"
            )
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
    return {key: value for key, value in parts.items() if value is not None and (key, value) not in HARMLESS}


Tree = dict[str, Any]
REQUIRED = object()


class ConfigRow(Protocol):
    """A row of a family's table."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        """Fields of ModelConfig from a config.json."""

    def write(self, model: ModelConfig) -> Tree:
        """Keys of a config.json for a model."""


@dataclass(frozen=True)
class Field:
    """One field of ours under its key there; `values` translates, theirs → ours, what is spelled differently."""

    ours: str
    theirs: str
    default: Any = REQUIRED  # of theirs, where config.json leaves it out
    values: Mapping[Any, Any] | None = None
    other: str | None = None  # a further name that the key has in some files

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        value = theirs.get(self.theirs, theirs.get(self.other, self.default))
        if self.other in theirs and theirs[self.other] != value:
            raise ConfigError(
                f"config.json has {self.theirs} {value!r} and {self.other} {theirs[self.other]!r}, which mean the "
                "same; leave one out"
            )
        if value is REQUIRED:
            raise ConfigError(f"config.json has no {self.theirs}, which gives model.{self.ours}; add it")
        if value is None:
            if self.default is REQUIRED:
                raise ConfigError(
                    f"config.json has no {self.theirs} but null; give model.{self.ours} a value"
                )
            return {}
        if self.values is not None:
            if isinstance(value, list | dict) or value not in self.values:
                raise ConfigError(
                    f"config.json has {self.theirs} {value!r}, which has no equal here; known: "
                    f"{', '.join(map(repr, self.values))}"
                )
            value = self.values[value]
        return {self.ours: value}

    def write(self, model: ModelConfig) -> Tree:
        [(_, value)] = model.resolved([self.ours])
        if self.values is not None:
            spellings = [theirs for theirs, ours in self.values.items() if ours == value]
            if not spellings:
                raise ConfigError(f"{self.ours} {value!r} has no equal under {self.theirs}")
            value = spellings[0]
        return {self.theirs: value}


class Ours:
    """What every model of the family is, and its config.json need not say: Ours(swiglu=True)."""

    def __init__(self, **fields: Any):
        self._fields = fields

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        return dict(self._fields)

    def write(self, model: ModelConfig) -> Tree:
        return {}


class Theirs:
    """Keys of theirs that have only this value here: Theirs(hidden_act="silu").

    `absent` gives what a key means where config.json leaves it out and that is something else.
    """

    def __init__(self, absent: Mapping[str, Any] | None = None, **keys: Any):
        self._keys, self._absent = keys, absent or {}

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        for key, only in self._keys.items():
            value = theirs.get(key, self._absent.get(key, only))
            if value != only:
                raise ConfigError(
                    f"config.json has {key} {value!r}, but models of this family are built here with {only!r} alone"
                )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return dict(self._keys)


class Writes:
    """Keys of theirs that say nothing of the model, written because their default is that of a published one."""

    def __init__(self, **keys: Any):
        self._keys = keys

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return dict(self._keys)


@dataclass(frozen=True)
class EveryLayer:
    """A list of theirs with one value for each layer, which has to be the same for all."""

    theirs: str
    value: Any

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        others = [value for value in theirs.get(self.theirs) or () if value != self.value]
        if others:
            raise ConfigError(
                f"config.json has {self.theirs} with {others[0]!r}, but models of this family are built here with "
                f"{self.value!r} alone"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {self.theirs: [self.value] * model.num_layers}


@dataclass(frozen=True)
class Window:
    """`sliding_window`, the keys that a query sees with its own: `window_size` for every layer."""

    default: int | None  # where config.json leaves it out

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        window = theirs.get("sliding_window", self.default)
        return {} if window is None else {"window_size": [window - 1, 0]}

    def write(self, model: ModelConfig) -> Tree:
        return {"sliding_window": model.windows[0]}


def check_layer_types(kinds: Collection[str] | None, known: Collection[str]) -> None:
    """Raises ConfigError for a kind of layer that the family does not have here."""
    if strange := [kind for kind in kinds or () if kind not in known]:
        raise ConfigError(
            f"config.json has layer_types with {strange[0]!r}, but models of this family are built here with "
            f"{' and '.join(known)} alone"
        )


@dataclass(frozen=True)
class WindowsByLayer:
    """As Window, for the layers that `layer_types` calls sliding_attention; or for all but every N-th."""

    every: int  # N, where config.json says neither
    default: int = 4096

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        window = theirs.get("sliding_window", self.default)
        kinds = theirs.get("layer_types")
        check_layer_types(kinds, LAYER_KINDS)
        if window is None or (kinds and "sliding_attention" not in kinds):
            return {}
        every = theirs.get("sliding_window_pattern", self.every)
        skip = [int(kind == "sliding_attention") for kind in kinds] if kinds else every
        return {"window_size": [window - 1, 0], "window_attn_skip_freq": skip}

    def write(self, model: ModelConfig) -> Tree:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in model.windows]
        return {"sliding_window": max(filter(None, model.windows), default=None), "layer_types": kinds}


LATENT_EPSILON = 1e-6  # transformers' of the norms of latents, whatever rms_norm_eps says


def notes_on(model: ModelConfig) -> list[str]:
    """What transformers computes otherwise although its config.json says the same."""
    if not model.multi_latent_attention or model.layernorm_epsilon == LATENT_EPSILON:
        return []
    return [
        f"norms of latents have layernorm_epsilon {model.layernorm_epsilon:g} here, as in Megatron-LM and vLLM; "
        f"transformers takes {LATENT_EPSILON:g} for them, so its logits differ"
    ]


def meaning(model: ModelConfig) -> Tree:
    """What decides which function the weights are: every field of it that this model reads, resolved."""
    unread = model.unread(RunConfig(model=model))
    decides = model.deciding(Decides.FUNCTION, Decides.REACH)
    fields = dict(model.resolved(name for name in decides if name not in unread))
    if fields.get("rope_scaling") is not None:
        fields["rope_scaling"] = _with_magnitude(fields["rope_scaling"])
    return fields


def _with_magnitude(scaling: RopeScaling) -> RopeScaling:
    """YaRN's attention_factor as a number, explicit or not, without the rounding of Megatron's mscale."""
    if scaling.type != "yarn" or (scaling.mscale and scaling.mscale_all_dim):
        return scaling
    factor = round(scaling.attention_factor or scaling.magnitude(), 12)
    return scaling.model_copy(update={"attention_factor": factor})


def differences(model: ModelConfig, other: ModelConfig, leave_out: Collection[str] = ()) -> list[str]:
    """The fields in which two models compute different things, as text: `swiglu True, not False`."""
    return [f"{name} {ours!r}, not {theirs!r}" for name, ours, theirs in changed(model, other, leave_out)]


def changed(
    model: ModelConfig, other: ModelConfig, leave_out: Collection[str] = ()
) -> list[tuple[str, Any, Any]]:
    """The fields in which two models compute different things, with the value of each.

    Fields that one of them does not read, for example of experts that it has not, are left to the one that says so.
    """
    one, two = meaning(model), meaning(other)
    return [
        (name, one[name], two[name])
        for name in one
        if name in two and one[name] != two[name] and name not in leave_out
    ]
