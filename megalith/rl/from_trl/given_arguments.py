"""The arguments that another system's object or dict gives, and which of them are not its class's defaults."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Mapping
from typing import Any

# Fields copied to a second object of the class, whose other fields are then what the class makes of its defaults.
MADE_WITH = ("output_dir", "use_cpu", "bf16", "fp16")


@dataclasses.dataclass(frozen=True)
class GivenArguments:
    """Arguments by name, with enums as their values."""

    values: dict[str, Any]
    changed: dict[str, Any]
    """All of a dict's; of an object those that differ from its class's defaults."""
    defaults: dict[str, Any]
    """Empty for a dict."""


def given_arguments(args: Mapping[str, Any] | object | None) -> GivenArguments:
    """Read a dict, a dataclass object such as TRL's GRPOConfig, or an object with attributes, which is as a dict."""
    if not dataclasses.is_dataclass(args):
        values = dict(args if isinstance(args, Mapping) else vars(args) if args is not None else {})
        values = {name: plain(value) for name, value in values.items() if not name.startswith("_")}
        return GivenArguments(values, values, {})
    names = [field.name for field in dataclasses.fields(args)]
    values = {name: plain(getattr(args, name)) for name in names}
    defaults = _class_defaults(args)
    changed = {name: value for name, value in values.items() if value != defaults.get(name)}
    return GivenArguments(values, changed, defaults)


def plain(value: Any) -> Any:
    """Return an enum's value, and anything else as it is."""
    return value.value if isinstance(value, enum.Enum) else value


def _class_defaults(args: Any) -> dict[str, Any]:
    """Return the defaults of the object's class by name, as its own __post_init__ leaves them."""
    fields = dataclasses.fields(args)
    made_with = {field.name: getattr(args, field.name) for field in fields if field.name in MADE_WITH}
    made_from: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made_from = type(args)(**made_with)
    except Exception:  # a class that wants more than these: its fields' defaults are compared
        pass
    declared = {field.name: _declared(field) for field in fields}
    made = {name: plain(getattr(made_from, name, value)) for name, value in declared.items()}
    return made | {name: plain(declared[name]) for name in made_with}


def _declared(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()
