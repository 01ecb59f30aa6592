"""A `config.json` as a ModelConfig and back: each family lists what says what, in rows that read both ways.

A row's `read` takes the config.json and gives fields of ours, `write` takes a model and gives keys of theirs. Both
raise ConfigError for a value that the other side cannot say. A family is right for a model when writing its
configuration and reading it again gives the same model (`differences`): a field that a family knows nothing of shows
itself there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megalith.config import ModelConfig, RunConfig
from megalith.config.base import Decides
from megalith.config.rules.unused import unread_settings
from megalith.errors import ConfigError

Tree = dict[str, Any]
REQUIRED = object()


class Setting(Protocol):
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

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        value = theirs.get(self.theirs, self.default)
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


@dataclass(frozen=True)
class WindowsByLayer:
    """As Window, for the layers that `layer_types` calls sliding_attention; or for all but every N-th."""

    every: int  # N, where config.json says neither
    default: int = 4096

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        window = theirs.get("sliding_window", self.default)
        kinds = theirs.get("layer_types")
        if window is None or (kinds and "sliding_attention" not in kinds):
            return {}
        every = theirs.get("sliding_window_pattern", self.every)
        skip = [int(kind == "sliding_attention") for kind in kinds] if kinds else every
        return {"window_size": [window - 1, 0], "window_attn_skip_freq": skip}

    def write(self, model: ModelConfig) -> Tree:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in model.windows]
        return {"sliding_window": max(filter(None, model.windows), default=None), "layer_types": kinds}


def meaning(model: ModelConfig) -> Tree:
    """What decides which function the weights are: every field of it that this model reads, resolved."""
    unread = unread_settings(RunConfig(model=model), "model")
    return dict(model.resolved(name for name in model.deciding(Decides.FUNCTION) if name not in unread))


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
