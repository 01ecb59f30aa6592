"""Base class and field annotations of configuration sections, and validation errors.

A section is a pydantic model that rejects unknown keys. The docstring under each field is its description in the
command line's help, the JSON Schema for editors and the reference page. A new setting is such a field and the code that
reads it; everything else is generated.
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
"""Annotation of a setting that is reserved for a planned feature and is documented as such."""

Annotation = TypeVar("Annotation")


class Decides(enum.Enum):
    """The effect of a setting besides memory and speed. Annotates a field, or sets the default of a section.

    A run cannot resume if a FUNCTION setting has changed. If a SAMPLES or UPDATES setting has, it prints a note.
    """

    FUNCTION = "the function that the weights compute"
    REACH = "the function, only by the reach of RoPE; a run that starts from other weights may change it"
    SAMPLES = "the samples and their order"
    UPDATES = "the weight update of a sample"
    NOTHING = "none of these"


@dataclass(frozen=True)
class Resolved:
    """Annotation of a field whose value may come from a rule or another field."""

    by: str | None
    """Property with the resolved value. None: the value is part of other fields' values."""


class RequiresSetting:
    """Annotation of a field that has an effect only if another setting has a certain value."""

    def __init__(
        self,
        path: str,
        *values: Any,
        greater_than: int | None = None,
        unless: Any = None,
        strict: bool = False,
    ):
        """Require another setting.

        If the requirement is not met, a value other than the default prints a note, or raises an error with `strict`.

        Args:
            path: the other setting, a field of the same section or `section.field`.
            values: accepted values of the other setting. A list is accepted if it contains one of them. Without this
                argument, the other setting must be set.
            greater_than: the other setting must be greater than this.
            unless: the other setting must differ from this value, or from each value of a tuple.
            strict: raise an error if the requirement is not met.
        """
        self.path, self._values, self.strict = path, values, strict
        self._greater_than, self._unless = greater_than, unless

    def current_value(self, section: Section, config: Section | None) -> Any:
        """Return the other setting's value for a field of `section`; `config` is the full configuration."""
        *outer, name = self.path.split(".")
        return getattr(getattr(config, outer[0]) if outer else section, name)

    def is_met(self, section: Section, config: Section | None) -> bool:
        """Return True if the field has an effect, or if that cannot be decided without `config`."""
        if config is None and "." in self.path:
            return True
        value = self.current_value(section, config)
        if self._greater_than is not None:
            return value > self._greater_than
        if self._unless is not None:
            excluded = self._unless if isinstance(self._unless, tuple) else (self._unless,)
            return value not in excluded
        values = value if isinstance(value, list) else [value]
        return any(each in self._values for each in values) if self._values else value is not None

    def __str__(self) -> str:
        conditions = [_yaml_text(value) for value in self._values]
        if self._greater_than is not None:
            conditions.append(f"above {self._greater_than}")
        if self._unless is not None:
            excluded = self._unless if isinstance(self._unless, tuple) else (self._unless,)
            conditions.append(f"other than {' or '.join(map(str, excluded))}")
        return f"{self.path} {' or '.join(conditions)}".strip()


def _yaml_text(value: Any) -> str:
    """Return a value as written in a run file."""
    return "left out" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Section(BaseModel):
    """Group of settings. Rejects unknown keys and assignment (see `RunConfig.with_settings`)."""

    decides: ClassVar[Decides] = Decides.NOTHING
    """Default of `Decides` for the section's fields."""
    requires: ClassVar[RequiresSetting | None] = None
    """Requirement of all fields that the class itself adds, in addition to their own."""
    shares_requirement: ClassVar[bool] = False
    """True for a part of several sections whose fields have the section's requirement."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Set the fields' descriptions. pydantic's own mechanism takes a fifth of `megalith --help`'s time."""
        for name, text in _field_docstrings(cls.__module__).get(cls.__name__, {}).items():
            if name in cls.model_fields:
                cls.model_fields[name].description = text
        cls.__hash__ = None  # unhashable, so that pydantic copies a section used as a default

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
    def _reject_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans for numbers: `--train.train_iters` without a value would mean one iteration."""
        if isinstance(value, bool):
            annotation = cls.model_fields[info.field_name].annotation
            if bool not in (annotation, *typing.get_args(annotation)):
                raise PydanticCustomError(
                    "bool_for_number",
                    "it needs a value other than true or false; on the command line, a name without a "
                    "value means true",
                )
        return value

    @classmethod
    def _annotation(
        cls, name: str, kind: type[Annotation], default: Annotation | None = None
    ) -> Annotation | None:
        return next((item for item in cls.model_fields[name].metadata if isinstance(item, kind)), default)

    @classmethod
    def fields_deciding(cls, *effects: Decides) -> list[str]:
        """Return the names of the fields that decide one of `effects`."""
        return [name for name in cls.model_fields if cls._annotation(name, Decides, cls.decides) in effects]

    @classmethod
    def requirements(cls, name: str) -> list[RequiresSetting]:
        """Return the requirements under which the field has an effect."""
        home = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", ()))
        annotated = [item for item in cls.model_fields[name].metadata if isinstance(item, RequiresSetting)]
        requires = cls.requires if home.shares_requirement else home.requires
        return annotated if requires is None else [requires, *annotated]

    def unread(self, config: Section | None = None) -> dict[str, RequiresSetting]:
        """Return the fields that have no effect in this run, each with its unmet requirement. `config`: see
        RequiresSetting.
        """
        unmet = (
            (name, next((r for r in requirements if not r.is_met(self, config)), None))
            for name, _, requirements in _requirements(type(self))
        )
        return {name: requirement for name, requirement in unmet if requirement is not None}

    def check_requirements(self, path: str, config: Section | None = None) -> None:
        """Raise ConfigError for a non-default field whose strict requirement is not met."""
        for name, default, requirements in _requirements(type(self)):
            value = getattr(self, name)
            if value == default:
                continue
            unmet = next((r for r in requirements if not r.is_met(self, config)), None)
            if unmet is not None and unmet.strict:
                outer, current = "" if "." in unmet.path else f"{path}.", unmet.current_value(self, config)
                raise ConfigError(
                    f"{path}.{name} is {value}, but it requires {outer}{unmet}, which is "
                    f"{'not set' if current is None else current}; meet the requirement, or leave {path}.{name} out"
                )

    def resolved(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield these fields with their resolved values."""
        for name in names:
            by = self._annotation(name, Resolved, Resolved(name)).by
            if by is not None:
                yield name, getattr(self, by)


@functools.cache
def _requirements(section: type[Section]) -> list[tuple[str, Any, list[RequiresSetting]]]:
    """Return the fields with requirements as (name, default, requirements). Cached for the planner's many calls."""
    fields = section.model_fields.items()
    return [(name, field.default, needs) for name, field in fields if (needs := section.requirements(name))]


@functools.cache
def _field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of each class's fields in a module."""
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


_ERROR_TEXTS = {
    "extra_forbidden": "there is no such setting",
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "string_type": "it must be text (quote it)",
    "list_type": "it must be a list",
    "model_type": "it must be a mapping of keys to values",
}
MAX_VALUE_LENGTH = 200


def as_config_error(error: ValidationError) -> ConfigError:
    """Return one sentence per invalid field: its path, its value and the rule."""
    sentences = [_sentence(item) for item in error.errors()]
    return ConfigError(*dict.fromkeys(sentences))


def _sentence(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
    rule = _ERROR_TEXTS.get(item["type"]) or item["msg"][0].lower() + item["msg"][1:]
    value = repr(item["input"])
    if len(value) > MAX_VALUE_LENGTH:
        value = value[: MAX_VALUE_LENGTH - 1] + "…"
    return f"{path} is {value}: {rule}"


def _is_union_branch(part: str | int) -> bool:
    """Return True if `part` is the name of a tried type, which pydantic adds to the location of a union's error."""
    return isinstance(part, str) and (
        part in {"str", "int", "float", "bool"} or part.startswith("constrained-") or "[" in part
    )
