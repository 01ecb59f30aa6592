"""Environments of skyrl-gym by name: `rl.environment: skyrl_gym:gsm8k`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalith.errors import ConfigError


def make_environment(identity: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a factory that creates environments with this id from a prompt's columns (`extras` in SkyRL).

    Raises:
        ConfigError: if skyrl-gym is not installed or has no such environment.
    """
    try:
        import skyrl_gym
    except ImportError as error:
        raise ConfigError(
            f"rl.environment is skyrl_gym:{identity}, but skyrl-gym cannot be imported ({error}); pip install skyrl-gym"
        ) from None
    registered = sorted(getattr(skyrl_gym.envs.registration, "registry", {}))
    if registered and identity not in registered:
        raise ConfigError(
            f"rl.environment is skyrl_gym:{identity}, which skyrl-gym does not have; choose one of "
            f"{', '.join(registered)}"
        )
    return lambda columns: skyrl_gym.make(identity, env_config={}, extras=dict(columns))
