"""Values of an Oumi configuration's keys, converted to the types of the key table.

`read_sections` flattens the sections into an `OumiKeys`. Unknown keys and values of the wrong type become problems,
which `translate_oumi` reports together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from megalith.dialects.oumi.oumi_keys import ALL_KEYS, KEYS, VERL_PREFIX, MustBe, Read, row_of
from megalith.errors import did_you_mean

DATASET_LISTS = ("data.train.datasets", "data.validation.datasets", "data.test.datasets")


@dataclass(frozen=True)
class OumiDataset:
    """An entry of data.train.datasets or data.validation.datasets."""

    name: str | None
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sample_count: int | None = None


@dataclass
class OumiKeys:
    """The keys of a configuration, and the run that is being built from them.

    `keys["training.seed"]` is the value, or Oumi's default if the key is omitted. `"training.seed" in keys` is True if
    the configuration sets it.
    """

    values: dict[str, Any]
    """By full key, such as `training.seed` or `data.train.datasets[0].split`."""
    world_size: int | None = None
    tree: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The sections of the run file."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    """Keys that have been read; the others have no effect."""

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        row = ALL_KEYS[key]
        return self.values.get(key, row.value if isinstance(row, MustBe) else row.default)

    def __contains__(self, key: str) -> bool:
        self.read.add(key)
        return key in self.values

    def set(self, path: str, value: Any) -> None:
        """Set a Megalith setting, such as `train.seed`."""
        section, _, name = path.partition(".")
        self.tree.setdefault(section, {})[name] = value

    def value_of(self, *keys: str, default: Any) -> Any:
        """Return the value of several keys with the same meaning, or `default` if none is set.

        verl's overrides take precedence over `training`, as in Oumi. Other keys with different values are a problem.
        """
        self.read |= {*keys}
        set_values = {key: self.values[key] for key in keys if self.values.get(key) is not None}
        if any(key.startswith(VERL_PREFIX) for key in set_values):
            set_values = {
                k: v
                for k, v in set_values.items()
                if k.startswith(VERL_PREFIX) or not k.startswith("training.")
            }
        if len({str(value) for value in set_values.values()}) > 1:
            values = ", ".join(f"{key} is {value}" for key, value in set_values.items())
            self.problems.append(
                f"{values}: these keys have the same meaning; keep one of them, or make them equal"
            )
        return next(iter(set_values.values()), default)


def read_sections(keys: OumiKeys, tree: Mapping[str, Any]) -> None:
    """Read the sections of a configuration into `keys`, with values converted to the table's types."""
    sections = sorted({key.partition(".")[0] for key in KEYS})
    for section, values in tree.items():
        if section not in sections:
            hint = did_you_mean(str(section), sections) or f"; sections: {', '.join(sections)}"
            keys.problems.append(f"Oumi has no section {section!r}{hint}")
        elif isinstance(values, Mapping):
            _flatten(keys, section, values)
        elif values is not None:
            keys.problems.append(f"section {section!r} is {values!r}; it must be a mapping of keys to values")


def _flatten(keys: OumiKeys, prefix: str, values: Mapping[str, Any], row_prefix: str = "") -> None:
    """Read the values of the section `prefix` into `keys`. `row_prefix` is its name in the key table, with `[]` for
    indices.
    """
    row_prefix = row_prefix or prefix
    for name, value in values.items():
        key, row_key = f"{prefix}.{name}", f"{row_prefix}.{name}"
        row, is_section = row_of(row_key), any(other.startswith(f"{row_key}.") for other in ALL_KEYS)
        if row_key in DATASET_LISTS:
            for index, entry in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(entry, Mapping):
                    _flatten(keys, f"{key}[{index}]", entry, f"{row_key}[]")
                else:
                    keys.problems.append(
                        f"{key}[{index}] is {entry!r}; a dataset is a mapping with keys such as dataset_name"
                    )
        elif isinstance(value, Mapping) and (
            is_section or (row is None and value and row_key.startswith(VERL_PREFIX[:-1]))
        ):
            _flatten(keys, key, value, row_key)
        elif value is None and is_section:
            continue
        elif is_section:
            keys.problems.append(f"{key} is {value!r:.60}; it must be a mapping of keys to values")
        elif row is None:
            keys.problems.append(f"Oumi has no key {key}{_key_hint(row_key)}")
        elif not isinstance(row[1], Read):
            keys.values[key] = value
        # null keeps the default
        elif value is not None and (converted := _convert(keys, key, row[1], value)) is not None:
            keys.values[key] = converted


def _key_hint(key: str) -> str:
    """Suggest the nearest key, preferably in the same section, otherwise one with the same name elsewhere."""
    section, _, name = key.rpartition(".")
    siblings = [other.rpartition(".")[2] for other in ALL_KEYS if other.rpartition(".")[0] == section]
    namesakes = [other for other in ALL_KEYS if other.rpartition(".")[2] == name]
    if longer := [other for other in siblings if other.endswith(f"_{name}")]:
        return f"; did you mean {longer[0]!r}?"
    if namesakes:
        return f"; did you mean {namesakes[0]}?"
    if hint := did_you_mean(name, siblings, 1):
        return hint
    by_name = {other.rpartition(".")[2]: other for other in reversed(ALL_KEYS)}
    near = get_close_matches(name, by_name, 1, 0.7)
    return f"; did you mean {by_name[near[0]]}?" if near else "; docs/from_oumi.md lists the supported keys"


def _convert(keys: OumiKeys, key: str, row: Read, value: Any) -> Any:
    """Return the value as the row's type, or None and add a problem if it has another type."""
    try:
        if row.kind in ("int", "count", "float") and not isinstance(value, bool):
            number = float(value)
            if row.kind == "float" and math.isfinite(number):
                return number
            if row.kind != "float" and number == int(number) and (number > 0 or row.kind == "int"):
                return int(number)
        elif row.kind in ("bool", "text") and isinstance(value, {"bool": bool, "text": str}[row.kind]):
            return value
        elif row.kind == "text" and value is False:
            return "no"  # YAML reads `no` as False
        elif row.kind == "list" and isinstance(value, str | list):
            return [value] if isinstance(value, str) else value
        elif row.kind == "dict" and isinstance(value, Mapping):
            return dict(value)
    except (TypeError, ValueError, OverflowError):
        pass
    kind = {
        "int": "a whole number",
        "count": "a whole number above 0",
        "float": "a number",
        "bool": "true or false",
        "dict": "a mapping of keys to values",
    }.get(row.kind, f"a {row.kind}")
    keys.problems.append(f"{key} is {value!r:.60}; it must be {kind}")
    return None


def read_datasets(keys: OumiKeys, split: str) -> list[OumiDataset]:
    """Return the entries of data.SPLIT.datasets."""
    by_index: dict[str, dict[str, Any]] = {}
    for key, value in keys.values.items():
        index, bracket, name = key.removeprefix(f"data.{split}.datasets[").partition("].")
        if bracket and index.isdigit():
            by_index.setdefault(index, {})[name.removeprefix("dataset_")] = value
    return [
        OumiDataset(entry.get("name"), entry.get("path"), entry.get("subset"), entry.get("split") or "train",
                    entry.get("kwargs") or {}, entry.get("sample_count"))
        for entry in by_index.values()
    ]  # fmt: skip
