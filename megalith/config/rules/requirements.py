"""Settings that must have one value because of another setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megalith.config.model import ModelConfig
from megalith.errors import ConfigError


def require(model: ModelConfig, required: Mapping[str, Any], reason: str) -> None:
    """Raise ConfigError, with `reason` in its message, if a setting does not have its required value."""
    for name, needed in required.items():
        if (value := getattr(model, name)) != needed:
            raise ConfigError(
                f"model.{name} is {_yaml(value)}, {reason}; set model.{name} to {_yaml(needed)}"
            )


def _yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
