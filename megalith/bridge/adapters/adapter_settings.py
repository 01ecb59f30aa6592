"""Settings of `lora` that depend on the adapters or the base of a run."""

from __future__ import annotations

from typing import Any

from megalith.bridge.adapters.open_adapters import adapter_family, open_peft
from megalith.bridge.family import build_on_meta
from megalith.bridge.load import with_init_from
from megalith.bridge.peft.peft_modules import EMBEDDING, is_tied, resolve_saved_modules
from megalith.bridge.peft.peft_tokens import resolve_tokens
from megalith.config import LoraConfig, RunConfig
from megalith.errors import ConfigError

STORED_SETTINGS = (
    "rank",
    "alpha",
    "targets",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "modules_to_save",
    "trainable_token_indices",
)
"""Settings of `lora` that a PEFT folder determines."""


def with_saved_modules(config: RunConfig) -> RunConfig:
    """Return `config` with Megalith's names for the modules in `lora.modules_to_save` and for the matrices in
    `lora.trainable_token_indices`.

    Raises ConfigError for a module that the model lacks or that cannot be trained, and for a module in both settings.
    """
    names, tokens, model = config.lora.modules_to_save, config.lora.trainable_token_indices, config.model
    if names is None and tokens is None:
        return config
    try:
        family = adapter_family(model)
    except ConfigError:  # no family has such a model: only Megalith's names remain
        build_on_meta(model, config.lora)
        return config
    settings: dict[str, Any] = {}
    if names is not None:
        settings["lora.modules_to_save"] = resolve_saved_modules(names, family, model)
    if tokens is not None:
        settings["lora.trainable_token_indices"] = tokens = resolve_tokens(tokens, family, model)
        if both := sorted(tokens.keys() & {*(settings.get("lora.modules_to_save") or ())}):
            raise ConfigError(
                f"lora.modules_to_save and lora.trainable_token_indices both name {both[0]}, which is then trained "
                f"in full anyway; leave {both[0]} out of one of them"
            )
    return config.with_settings(settings)


def trains_tied_embedding(config: RunConfig) -> bool:
    """Return True if `lora.modules_to_save` contains an embedding that is tied to the output matrix.

    The base's configuration is read from `model.init_from`.
    """
    if config.lora.modules_to_save is None:
        return False
    config = with_saved_modules(with_init_from(config))
    return is_tied(config.model) and EMBEDDING in (config.lora.modules_to_save or ())


def with_lora_load(config: RunConfig) -> RunConfig:
    """Return `config` with the settings of the adapters in `lora.load`.

    Raises ConfigError if one of them is set to another value.
    """
    lora = config.lora
    if lora.load is None:
        return config
    folder = open_peft(lora.load, config.model)
    folder.check_trained(lora.modules_to_save)
    stored = folder.lora
    for name in STORED_SETTINGS:
        value, stored_value, default = (getattr(each, name) for each in (lora, stored, LoraConfig()))
        same = (
            stored.parts(config.model) == lora.parts(config.model)
            if name == "targets"
            else value == stored_value
        )
        if value != default and not same:
            raise ConfigError(
                f"lora.{name} is {value}, but the adapters in {lora.load}, which lora.load points to, have "
                f"{stored_value}; leave lora.{name} out"
            )
    return config.with_settings({f"lora.{name}": getattr(stored, name) for name in STORED_SETTINGS})
