"""What every section of the configuration is made of, and how its mistakes are told.

A section is a pydantic model: typed, closed to unknown keys, its documentation standing under each field.
That one text is the help of the command line, the JSON Schema for editors and the reference page.
"""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from megalith.errors import ConfigError


class Section(BaseModel):
    """A group of settings. Unknown keys are refused; assignment is checked like loading."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """True is no number here: `--train.train_iters` with its value forgotten would be one iteration."""
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *typing.get_args(annotation)):
            raise PydanticCustomError("no_truth", "a value is needed, not true or false")
        return value


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
