"""Help text, reference page and JSON Schema, generated from the fields' docstrings."""

from __future__ import annotations

import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megalith.config.aliases import ALIASES, OTHER_NAMES, Already, Choose, Derive, Rename
from megalith.config.base import NOT_YET
from megalith.config.rules.objective_spellings import ObjectiveSpelling
from megalith.config.run import RunConfig


@dataclass(frozen=True)
class Setting:
    """Description of one field: dotted path, type, default and text."""

    path: str
    type: str
    default: str
    text: str
    not_yet: bool = False


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield every field of `model`, including nested sections."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = _section(field.annotation)
        if inner is None or field.default is None:
            words = (_type_words(field.annotation), _default_words(field), field.description or "")
            yield Setting(path, *words, NOT_YET in field.metadata)
        if inner is not None:
            yield from settings(inner, path + ".")


def section_text(section: type[BaseModel]) -> str:
    """Return the first line of a section's docstring."""
    return (section.__doc__ or "").strip().splitlines()[0]


def help_text(width: int = 100) -> str:
    """Return the help of all settings by section, as the command line accepts them."""
    lines = []
    for name, field in RunConfig.model_fields.items():
        lines += ["", f"{name}: {section_text(field.annotation)}"]
        for setting in settings(field.annotation, name + "."):
            if setting.not_yet:
                continue
            lines.append(f"  --{setting.path} {setting.type}{_shown(setting.default)}")
            lines += textwrap.wrap(setting.text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += ["", "Megatron's spellings, accepted as well:"]
    lines += [f"  --{name}: {meaning}" for name, meaning in alias_words()]
    return "\n".join(lines[1:])


def reference_page() -> str:
    """Return docs/configuration.md, with one table per section."""
    out = [
        "# Configuration reference",
        "",
        "Made from the fields by `megalith config reference`; do not edit. In YAML a setting stands under its",
        "section; on the command line it is `--section.name value`. `-` means absent.",
    ]
    for name, field in RunConfig.model_fields.items():
        out += ["", f"## {name}", "", section_text(field.annotation), ""]
        out += ["| setting | type | default | what it does |", "|---|---|---|---|"]
        for s in settings(field.annotation):
            cells = (f"`{s.path}`", _cell(s.type), f"`{s.default}`" if s.default else "-", _cell(s.text))
            if not s.not_yet:
                out.append("| " + " | ".join(cells) + " |")
    out += ["", "## Megatron's spellings", "", "| spelling | meaning |", "|---|---|"]
    out += [f"| `{name}` | {_cell(meaning)} |" for name, meaning in alias_words()]
    out += ["", "## Names in other systems", "", "They are refused, with ours in the error.", ""]
    out += ["| there | here |", "|---|---|"]
    out += [f"| `{name}` | {_cell(ours)} |" for name, ours in OTHER_NAMES.items()]
    out += ["", "## Not yet", "", "Names that are kept for what this version does not have.", ""]
    out += ["| setting | what it will be |", "|---|---|"]
    out += [f"| `{s.path}` | {_cell(s.text)} |" for s in settings(RunConfig) if s.not_yet]
    return "\n".join(out) + "\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a run file, including Megatron-LM's spellings."""
    schema = RunConfig.model_json_schema()
    for field in RunConfig.model_fields.values():
        properties = schema["$defs"][field.annotation.__name__]["properties"]
        for key, inner in field.annotation.model_fields.items():
            if NOT_YET in inner.metadata:
                properties[key] = {"const": inner.default, "description": f"Not yet: {inner.description}"}
    for name, meaning in ALIASES.items():
        section, key = name.split(".")
        definition = schema["$defs"][RunConfig.model_fields[section].annotation.__name__]
        definition["properties"].setdefault(key, _alias_schema(meaning, schema))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _alias_schema(
    meaning: Rename | Choose | Already | Derive | ObjectiveSpelling, schema: dict[str, Any]
) -> dict[str, Any]:
    words = {"description": _meaning(meaning)}
    match meaning:
        case Rename(path=path):
            section, key = path.split(".")
            definition = schema["$defs"][RunConfig.model_fields[section].annotation.__name__]
            return {**definition["properties"][key], **words}
        case Already(takes=takes) if isinstance(takes, tuple):
            return {"enum": list(takes), **words}
        case Already(takes=takes):
            return {"type": _JSON_TYPES[takes], **words}
        case Derive(takes=takes):
            return {"type": _JSON_TYPES[takes], **words}
        case Choose(values=values, off=off):
            taken = [*values, None] if off else list(values)
            return {"type": "boolean", **words} if True in values else {"enum": taken, **words}
        case ObjectiveSpelling(takes=takes) if takes is bool:
            return {"type": ["boolean", "null"], **words}
        case ObjectiveSpelling(takes=takes):
            return {"enum": [*takes, None], **words} if takes else words


_JSON_TYPES = {bool: "boolean", int: "integer", str: "string"}


def alias_words() -> Iterator[tuple[str, str]]:
    """Return each accepted spelling with its meaning."""
    for name, meaning in ALIASES.items():
        yield name, _meaning(meaning)


def _meaning(meaning: Rename | Choose | Already | Derive | ObjectiveSpelling) -> str:
    match meaning:
        case Rename(path=path, for_url=for_url):
            return path + (f"; a URL: {for_url}" if for_url else "")
        case Choose(path=path, values=values, off=off):
            spelled = values if True not in values else {"true": values[True]}
            if spelled.get("true", True) is None:
                spelled = {"false": values[False]}
            each = [f"{value}: {path} = {own}" for value, own in spelled.items()]
            return "; ".join([*each, *([f"null: {off} = false"] if off else [])])
        case Derive(path=path, note=note) | ObjectiveSpelling(path=path, note=note):
            return f"sets {path}" + (f": {note}" if note else "")
        case Already(note=note):
            return f"accepted; {note}"


def _section(annotation: Any) -> type[BaseModel] | None:
    for option in typing.get_args(annotation) or (annotation,):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _default_words(field: FieldInfo) -> str:
    default = field.default
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:.12g}" if isinstance(default, float) else str(default)


def _shown(default: str) -> str:
    return f"  (default {default})" if default else ""


def _type_words(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_words(arguments[0])
    if origin is typing.Literal:
        return "|".join(str(a) for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return "|".join(_type_words(a) for a in arguments if a is not type(None))
    if origin is list:
        return f"list of {_type_words(arguments[0])}"
    if annotation is Any:
        return "values"
    return {"int": "int", "float": "float", "str": "text", "bool": "true|false"}.get(
        annotation.__name__, annotation.__name__
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
