"""Reads another system's configuration object or dict, and compares its arguments with the defaults of its class."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Mapping
from typing import Any

# Fields copied to a second object of the class, whose other fields then have the defaults that the class computes.
COPIED_FIELDS = ("output_dir", "use_cpu", "bf16", "fp16")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments by name; enum members are replaced by their values."""

    values: dict[str, Any]
    changed: dict[str, Any]
    """For a dict all entries; for an object, the values that differ from the class's defaults."""
    defaults: dict[str, Any]
    """Defaults of the object's class; empty for a dict."""


def read_arguments(args: Mapping[str, Any] | object | None) -> Arguments:
    """Read a dict, a dataclass object such as TRL's GRPOConfig, or another object.

    An object that is not a dataclass is read as a dict of its attributes.
    """
    if not dataclasses.is_dataclass(args):
        values = dict(args if isinstance(args, Mapping) else vars(args) if args is not None else {})
        values = {name: plain(value) for name, value in values.items() if not name.startswith("_")}
        return Arguments(values, values, {})
    names = [field.name for field in dataclasses.fields(args)]
    values = {name: plain(getattr(args, name)) for name in names}
    defaults = _class_defaults(args)
    changed = {name: value for name, value in values.items() if value != defaults.get(name)}
    return Arguments(values, changed, defaults)


def plain(value: Any) -> Any:
    """Return an enum's value; return anything else unchanged."""
    return value.value if isinstance(value, enum.Enum) else value


def _class_defaults(args: Any) -> dict[str, Any]:
    """Return the defaults of the object's class by name, as they are after its __post_init__."""
    fields = dataclasses.fields(args)
    copied = {field.name: getattr(args, field.name) for field in fields if field.name in COPIED_FIELDS}
    instance: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            instance = type(args)(**copied)
    except Exception:  # the class needs more arguments: use its declared defaults
        pass
    declared = {field.name: _declared(field) for field in fields}
    computed = {name: plain(getattr(instance, name, value)) for name, value in declared.items()}
    return computed | {name: plain(declared[name]) for name in copied}


def _declared(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()
