"""Settings that the benchmarks of optimizers and of µP share: a Transformer over bytes, without dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.config import RunConfig

TEXT_MODEL: Mapping[str, Any] = {
    "model.vocab_size": 257,
    "model.position_embedding_type": "rope",
    "model.swiglu": True,
    "model.normalization": "RMSNorm",
    "model.add_bias_linear": False,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "data.mock": True,
    "optim.adam_beta2": 0.95,
    "runtime.compile": False,
}
"""Values of these settings, by section.key."""


def is_set(config: RunConfig, path: str) -> bool:
    """Return True if the configuration sets `path`, section.key, itself."""
    section, _, key = path.partition(".")
    return key in getattr(config, section).model_fields_set


def with_defaults(config: RunConfig, defaults: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with these values, by section.key, for settings that it does not set itself."""
    return config.with_settings({path: value for path, value in defaults.items() if not is_set(config, path)})
