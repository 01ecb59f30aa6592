"""Patterns over parameter names, for `optim.param_groups`.

A pattern is a glob for the full name, or `re:` followed by a regular expression that matches anywhere in the name.
Names are the same as in checkpoints and do not depend on the layout.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from megalith.config import OptimConfig
from megalith.config.optim import REGEX, ParamGroup
from megalith.errors import ConfigError, nearest_of, shorten


def matches(pattern: str, name: str) -> bool:
    """Return True if the pattern matches the parameter name."""
    if pattern.startswith(REGEX):
        return re.search(pattern.removeprefix(REGEX), name) is not None
    return fnmatchcase(name, pattern)


def group_of(name: str, config: OptimConfig) -> ParamGroup | None:
    """Return the first group of `config.param_groups` whose pattern matches the name, or None."""
    return next((group for group in config.param_groups if matches(group.pattern, name)), None)


def check_patterns(names: Collection[str], config: OptimConfig) -> None:
    """Raise ConfigError if a pattern of `config.param_groups` applies to no parameter.

    Args:
        names: all trained parameters of the model, in any order.
        config: optimizer settings.
    """
    applied = {id(group_of(name, config)) for name in names}
    for group in config.param_groups:
        if id(group) in applied:
            continue
        taken = [name for name in sorted(names) if matches(group.pattern, name)]
        if taken:
            raise ConfigError(
                f"optim.param_groups: {group.pattern!r} matches only {shorten(taken)}, to which an earlier pattern "
                f"applies; move {group.pattern!r} before that pattern, or remove it"
            )
        raise ConfigError(
            f"optim.param_groups: {group.pattern!r} matches none of the model's {len(names)} trained "
            f"parameters{nearest_of(group.pattern, sorted(names))}; correct the pattern, or remove its group"
        )
