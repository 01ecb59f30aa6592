"""Base class and field annotations of configuration sections, and validation errors.

A section is a pydantic model: typed, closed to unknown keys, with a docstring under each field. That text is used for
the command line's help, the JSON Schema for editors and the reference page.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib.util
import itertools
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from megalith.errors import ConfigError

NOT_YET = "not yet"
"""Annotates a setting whose name is taken for what this version does not have: it is documented as that alone."""

Mark = TypeVar("Mark")


class Decides(enum.Enum):
    """Effect of a setting besides memory and speed. Annotates a field, or sets the default of a section.

    Resuming with another FUNCTION is an error; with other SAMPLES or UPDATES it prints a note.
    """

    FUNCTION = "which function the weights are"
    REACH = "how far rotary positions reach: the function too, but a run that begins from other weights may choose it"
    SAMPLES = "which samples are trained on, and in which order"
    UPDATES = "how a sample moves the weights"
    NOTHING = "none of these"


@dataclass(frozen=True)
class Resolved:
    """Annotation of a field whose value may come from a rule or another field."""

    by: str | None
    """Property that holds the resolved value. None: the value is part of other fields' values."""


class Needs:
    """Annotation of a field that a run reads only together with another setting."""

    def __init__(
        self, path: str, *values: Any, above: int | None = None, but: Any = None, strict: bool = False
    ):
        """Require `path`, a field of the same section or `section.field`.

        The field must have one of `values`, be `above` a number, or differ from `but`; with none of these, it must be
        set. If the requirement is not met, a value other than the default prints a note, or is an error with `strict`.
        """
        self.path, self._values, self._above, self._but, self.strict = path, values, above, but, strict

    def found(self, section: Section, whole: Section | None) -> Any:
        """Return the other setting's value for a field of `section`; `whole` is the full configuration."""
        *outer, name = self.path.split(".")
        return getattr(getattr(whole, outer[0]) if outer else section, name)

    def met(self, section: Section, whole: Section | None) -> bool:
        """Return True if the field is read, or if that cannot be decided without `whole`."""
        if whole is None and "." in self.path:
            return True
        value = self.found(section, whole)
        if self._above is not None:
            return value > self._above
        if self._but is not None:
            return value != self._but
        return value in self._values if self._values else value is not None

    def __str__(self) -> str:
        values = [_spelled(value) for value in self._values]
        values += [
            f"{word} {each}"
            for word, each in (("above", self._above), ("but", self._but))
            if each is not None
        ]
        return f"{self.path} {' or '.join(values)}".strip()


def _spelled(value: Any) -> str:
    """Return a value as written in a run file."""
    return "left out" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Shrinks:
    """Annotation of a field: its value in the small model of a parity run (parity/check.py)."""

    def __init__(self, to: Any):
        """`to` is the value, or a function of the value and its section that gives it."""
        self._to = to

    def value(self, value: Any, section: Section) -> Any:
        return self._to(value, section) if callable(self._to) else self._to


KEPT = Shrinks(lambda value, section: value)
DEFAULT = Shrinks(None)
"""Leaves the field out, whatever its default."""


class Section(BaseModel):
    """Group of settings. Rejects unknown keys and assignment (see `RunConfig.with_settings`)."""

    decides: ClassVar[Decides] = Decides.NOTHING
    """Default of `Decides` for the section's fields. `shrinks` works in the same way."""
    shrinks: ClassVar[Shrinks] = DEFAULT
    needs: ClassVar[Needs | None] = None
    """Requirement of all fields that the class itself adds, in addition to their own."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Set the fields' descriptions. pydantic's own mechanism would take a fifth of the time of `megalith
        --help`."""
        for name, text in _texts(cls.__module__).get(cls.__name__, {}).items():
            if name in cls.model_fields:
                cls.model_fields[name].description = text
        cls.__hash__ = None  # as of lists: pydantic then copies a default, and no two objects share one

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise ConfigError, because configurations are immutable."""
        if name.startswith("_"):
            return super().__setattr__(name, value)
        section = type(self).__name__.removesuffix("Config").lower()
        path = f"SECTION.{name}" if section == "run" else f"{section}.{name}"
        raise ConfigError(
            f"{name} cannot be assigned, because a configuration is checked as a whole; use config = "
            f'config.with_settings({{"{path}": {value!r}}}), which returns a new one'
        )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans for numbers: `--train.train_iters` without a value would mean one iteration."""
        if isinstance(value, bool):
            annotation = cls.model_fields[info.field_name].annotation
            if bool not in (annotation, *typing.get_args(annotation)):
                raise PydanticCustomError(
                    "no_truth",
                    "a value is needed, not true or false; on the command line a name without a value is true",
                )
        return value

    @classmethod
    def _mark(cls, name: str, kind: type[Mark], default: Mark | None = None) -> Mark | None:
        return next((mark for mark in cls.model_fields[name].metadata if isinstance(mark, kind)), default)

    @classmethod
    def deciding(cls, *what: Decides) -> list[str]:
        """Return the names of the fields that decide one of `what`."""
        return [name for name in cls.model_fields if cls._mark(name, Decides, cls.decides) in what]

    @classmethod
    def needed(cls, name: str) -> list[Needs]:
        """Return the requirements for a run to read the field."""
        home = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", ()))
        own = [mark for mark in cls.model_fields[name].metadata if isinstance(mark, Needs)]
        return own if home.needs is None else [home.needs, *own]

    def unread(self, whole: Section | None = None) -> dict[str, Needs]:
        """Return the fields that are not read, each with its unmet requirement. `whole`: see Needs."""
        lacks = (
            (name, next((n for n in needs if not n.met(self, whole)), None))
            for name, _, needs in _conditions(type(self))
        )
        return {name: need for name, need in lacks if need is not None}

    def refuse_unmet(self, path: str, whole: Section | None = None) -> None:
        """Raise ConfigError for a non-default field whose strict requirement is not met."""
        for name, default, needs in _conditions(type(self)):
            value = getattr(self, name)
            if value == default:
                continue
            need = next((each for each in needs if not each.met(self, whole)), None)
            if need is not None and need.strict:
                outer, found = "" if "." in need.path else f"{path}.", need.found(self, whole)
                raise ConfigError(
                    f"{path}.{name} is {value}, but it takes {outer}{need}, which is "
                    f"{'not set' if found is None else found}; set it, or leave {name} out"
                )

    def shrunk(self, whole: Section) -> dict[str, Any]:
        """Return the fields of a parity run that differ from their defaults."""
        marks = {name: self._mark(name, Shrinks, self.shrinks) for name in type(self).model_fields}
        unread = self.unread(whole)
        return {
            name: mark.value(getattr(self, name), self)
            for name, mark in marks.items()
            if mark is not DEFAULT and name not in unread
        }

    def resolved(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield these fields with their resolved values."""
        for name in names:
            by = self._mark(name, Resolved, Resolved(name)).by
            if by is not None:
                yield name, getattr(self, by)


@functools.cache
def _conditions(section: type[Section]) -> list[tuple[str, Any, list[Needs]]]:
    """Return the fields with requirements, as (name, default, requirements). Cached: the planner calls it thousands of
    times."""
    fields = section.model_fields.items()
    return [(name, field.default, needs) for name, field in fields if (needs := section.needed(name))]


@functools.cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of each class's attributes in a module."""
    source = importlib.util.find_spec(module).loader.get_source(module)
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        node.name: {
            field.target.id: " ".join(text.value.value.split())
            for field, text in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
        for node in classes
    }


_PLAIN_WORDS = {
    "extra_forbidden": "there is no such setting",
    "int_parsing": "a whole number is needed",
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_parsing": "a number is needed",
    "float_type": "a number is needed",
    "bool_parsing": "true or false is needed",
    "bool_type": "true or false is needed",
    "string_type": "text is needed (quote it)",
    "list_type": "a list is needed",
    "model_type": "keys with values are needed",
}
LONGEST_SHOWN = 200


def as_config_error(error: ValidationError) -> ConfigError:
    """Return one sentence per invalid field: its path, its value and the rule."""
    sentences = [_sentence(item) for item in error.errors()]
    return ConfigError(*dict.fromkeys(sentences))


def _sentence(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
    rule = _PLAIN_WORDS.get(item["type"]) or item["msg"][0].lower() + item["msg"][1:]
    value = repr(item["input"])
    if len(value) > LONGEST_SHOWN:
        value = value[: LONGEST_SHOWN - 1] + "…"
    return f"{path} is {value}: {rule}"


def _is_union_branch(part: str | int) -> bool:
    """Return True if `part` is the name of a tried type, which pydantic adds to the location of a union's error."""
    return isinstance(part, str) and (
        part in {"str", "int", "float", "bool"} or part.startswith("constrained-") or "[" in part
    )
