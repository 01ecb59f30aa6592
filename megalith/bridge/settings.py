"""Rows that map a `config.json` to a ModelConfig and back.

A row's `read` takes the config.json and returns settings; `write` takes a model and returns keys. Both raise
ConfigError for a value that the other side cannot express. A family can express a model if writing its config.json and
reading it again gives the same model (`differences`), so a setting without a row is detected.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megalith.config import ModelConfig
from megalith.errors import ConfigError

LAYER_KINDS = ("full_attention", "sliding_attention")


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
    """Maps one config.json key to one setting. `values` maps values of the key to values of the setting."""

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
            raise ConfigError(
                f"config.json has no {self.key}, which determines model.{self.setting}; add {self.key}"
            )
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
        if value is None and self.setting == "num_experts":
            raise ConfigError("num_experts is not set, but models of this family have experts")
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


class TrainingNoise:
    """Warns if a key enables noise on the experts' input in training, which Megalith does not add."""

    def __init__(self, key: str):
        self._key = key

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if noise := hf_config.get(self._key):
            warnings.warn(
                f"config.json has {self._key} {noise!r}: transformers adds noise to the experts' input in training, "
                "Megalith adds none",
                stacklevel=4,
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {}


@dataclass(frozen=True)
class SameInAllLayers:
    """Maps a list with one value per layer to a single setting. All values must be equal."""

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
    """Maps `sliding_window`, the number of keys that a query attends to (including its own), to every layer."""

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
    """Maps `sliding_window` to the layers that `layer_types` calls sliding_attention, or to all but each N-th."""

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
