"""What every section of the configuration is made of, and the errors for its mistakes.

A section is a pydantic model: typed, closed to unknown keys, its documentation standing under each field.
That one text is the help of the command line, the JSON Schema for editors and the reference page.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib.util
import inspect
import itertools
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from megalith.errors import ConfigError

NOT_YET = "not yet"
"""Annotates a setting whose name is taken for what this version does not have: it is documented as that alone."""


class Decides(enum.Enum):
    """What a setting decides beside memory and speed; stands in the annotation of a field, or once for its section.

    A run that goes on from a checkpoint with another FUNCTION is refused, with others of SAMPLES or UPDATES it says so.
    """

    FUNCTION = "which function the weights are"
    SAMPLES = "which samples are trained on, and in which order"
    UPDATES = "how a sample moves the weights"
    NOTHING = "none of these"


@dataclass(frozen=True)
class Resolved:
    """Stands in the annotation of a field that may be left to a rule or said by another field."""

    by: str | None
    """The property that has its value once all are heard; None: it is heard in those of other fields alone."""


class Section(BaseModel):
    """A group of settings. Unknown keys are refused; assignment is checked like loading."""

    decides: ClassVar[Decides] = Decides.NOTHING
    """Of the fields that do not say it themselves."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        defer_build=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Gives every field its text; pydantic's own way to it takes a fifth of the time of `megalith --help`."""
        for name, text in _texts(cls.__module__).get(cls.__name__, {}).items():
            if name in cls.model_fields:
                cls.model_fields[name].description = text

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """True is no number here: `--train.train_iters` with its value forgotten would be one iteration."""
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *typing.get_args(annotation)):
            raise PydanticCustomError("no_truth", "a value is needed, not true or false")
        return value

    @classmethod
    def deciding(cls, *what: Decides) -> list[str]:
        """The fields that decide one of `what`."""
        return [
            name
            for name, field in cls.model_fields.items()
            if next((mark for mark in field.metadata if isinstance(mark, Decides)), cls.decides) in what
        ]

    def resolved(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """These fields with their values once rules and other fields are heard."""
        for name in names:
            marks = type(self).model_fields[name].metadata
            by = next((mark.by for mark in marks if isinstance(mark, Resolved)), name)
            if by is not None:
                yield name, getattr(self, by)


@functools.cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """Of each class in a module's source, its attributes with the text that stands under them."""
    source = importlib.util.find_spec(module).loader.get_source(module)
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        node.name: {
            field.target.id: inspect.cleandoc(text.value.value)
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
    """One sentence for each field that pydantic refused: its path, its value, and what it should be."""
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
    """Pydantic adds the name of the tried type to the location of a union's error, like `list[int]`."""
    return isinstance(part, str) and (part in {"str", "int", "float", "bool"} or "[" in part)
