"""Read an Oumi YAML file and its command-line overrides into a tree of sections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megalith.config.other_systems import extension_error, format_error
from megalith.config.yaml_loader import parse_yaml
from megalith.errors import ConfigError


def read_configuration(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sections of an Oumi YAML file with overrides applied and `${…}` references resolved.

    Args:
        path: the file; None starts from an empty configuration.
        overrides: words such as `--training.max_steps=2`, `training.max_steps=2` or `--training.max_steps`, `2`.

    Raises:
        ConfigError: the file cannot be read or is not an Oumi configuration, or an override is malformed.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        if sentence := extension_error(path):
            raise ConfigError(sentence)
        try:
            tree = parse_yaml(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the configuration {path} cannot be read: {error}") from None
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the configuration {path} is not valid YAML: {' '.join(str(error).split())}"
            ) from None
        if not isinstance(tree, dict):
            raise ConfigError(
                f"the configuration {path} is a {type(tree).__name__}; it must have sections: model, data, training"
            )
        if sentence := format_error(path, tree, expected="Oumi"):
            raise ConfigError(sentence)
        if {"optim", "train", "parallel"} & tree.keys():
            raise ConfigError(
                f"{path} is a Megalith run file; run megalith train {path}, or sft, dpo or grpo"
            )
    for key, value in read_overrides(overrides):
        _set_override(tree, key, value)
    return resolve_references(tree, tree)


def read_overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Parse command-line overrides. Yields keys and values. Raises ConfigError for a malformed one."""
    left = list(words)
    while left:
        word = left.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--") and left and not left[0].startswith("--"):
            text, equals = left.pop(0), "="
        if not equals or "." not in key:
            raise ConfigError(f"{word!r} is not an override; write it as --training.max_steps=2")
        try:
            yield key, parse_yaml(text)
        except yaml.YAMLError:
            raise ConfigError(f"the value of {word} is not valid YAML; correct it") from None


def _set_override(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a.b[0].c in a tree and create missing levels."""
    parts: list[str | int] = [
        int(part) if part.isdigit() else part for part in re.split(r"\.|\[|\]\.?", key) if part
    ]
    here: Any = tree
    for part, after in zip(parts, [*parts[1:], None]):
        if isinstance(part, int):
            if not isinstance(here, list) or part > len(here):
                raise ConfigError(
                    f"{key} names entry {part}, but the list has fewer entries; add the earlier ones first"
                )
            if part == len(here):
                here.append(None)
        elif not isinstance(here, dict):
            raise ConfigError(
                f"{key} names {part!r} inside {here!r}, which is not a mapping; correct the override"
            )
        inner = here[part] if isinstance(here, list) else here.get(part)
        if after is None:
            here[part] = value
        elif not isinstance(inner, dict | list):
            here[part] = [] if isinstance(after, int) else {}
        here = here[part]


def resolve_references(value: Any, tree: Mapping[str, Any]) -> Any:
    """Return `value` with references such as `${model.model_max_length}` replaced by the values in `tree`."""
    if isinstance(value, dict):
        return {key: resolve_references(inner, tree) for key, inner in value.items()}
    if isinstance(value, list):
        return [resolve_references(inner, tree) for inner in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def lookup(match: re.Match[str]) -> Any:
        here: Any = tree
        for part in match[1].split("."):
            here = here.get(part) if isinstance(here, dict) else None
        if here is None or isinstance(here, dict | list):
            raise ConfigError(
                f"{value} refers to {match[1]}, which has no value in this configuration; write the value out"
            )
        return here

    single = re.fullmatch(r"\$\{([^}]+)\}", value)
    return lookup(single) if single else re.sub(r"\$\{([^}]+)\}", lambda match: str(lookup(match)), value)
