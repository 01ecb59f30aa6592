"""Oumi's YAML and overrides → a run of ours: keys to values, values to settings, and all that is wrong in one error.

What one key says alone stands in the table (oumi_keys.py). Here are those that decide together: layout, batch, steps,
precision, schedule, rewards. Nothing of it touches a disk or needs PyTorch; model and data are opened by oumi_run.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from megalith.config import RunConfig
from megalith.config.aliases import by_content, by_ending
from megalith.config.yaml_loader import parse_yaml
from megalith.dialects.oumi import oumi_meanings, oumi_objective
from megalith.dialects.oumi.oumi_keys import (
    ALL,
    ENGINE_KEYS,
    IN_VERL,
    KEYS,
    Assigns,
    Idle,
    Only,
    Read,
    row_of,
)
from megalith.errors import ConfigError, MegalithError, did_you_mean

TRAINERS = {"MEGATRON_GRPO": "grpo", "TRL_SFT": "sft", "TRL_DPO": "dpo"}
LISTS = ("data.train.datasets", "data.validation.datasets", "data.test.datasets")


@dataclass(frozen=True)
class DatasetAsked:
    """An entry of data.train.datasets."""

    name: str | None
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sample_count: int | None = None


@dataclass
class Asked:
    """The keys of a configuration: `asked["training.seed"]` is its value, or Oumi's default where it was omitted."""

    values: dict[str, Any]
    world_size: int | None = None
    tree: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    """The keys that something has asked for."""

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        row = ALL[key]
        return self.values.get(key, row.value if isinstance(row, Only) else row.default)

    def __contains__(self, key: str) -> bool:
        self.read.add(key)
        return key in self.values

    def set(self, path: str, value: Any) -> None:
        section, _, name = path.partition(".")
        self.tree.setdefault(section, {})[name] = value

    def one(self, *keys: str, default: Any) -> Any:
        """The value of the keys that are given, which mean the same; `default` where none is. As in Oumi, verl's
        overrides go before what stands in `training`."""
        self.read |= {*keys}
        given = {key: self.values[key] for key in keys if self.values.get(key) is not None}
        if any(key.startswith(IN_VERL) for key in given):
            given = {k: v for k, v in given.items() if k.startswith(IN_VERL) or not k.startswith("training.")}
        if len({str(value) for value in given.values()}) > 1:
            told = ", ".join(f"{key} is {value}" for key, value in given.items())
            self.problems.append(f"{told}: they mean the same; leave out all but one, or make them equal")
        return next(iter(given.values()), default)


@dataclass(frozen=True)
class OumiRun:
    """What a configuration of Oumi's means."""

    trainer: str
    """grpo, sft or dpo."""
    tree: dict[str, dict[str, Any]]
    """Sections of a run file, without model and data, which are opened later."""
    notes: list[str]
    model_name: str
    tokenizer_name: str | None
    train: list[DatasetAsked]
    validation: list[DatasetAsked]
    chat_template: str | None
    rewards: list[str]
    epochs: float | None
    """Of GRPO, where there is no number of steps."""
    evaluates: str
    """At which steps: no (GRPO: behind the last one alone), steps or epoch."""
    finds_precision: bool
    """torch_dtype_str is auto: that of the weights."""
    exports: bool
    """hf_model/ is written at the end."""
    writes_bin: bool
    """With pytorch_model.bin in it."""
    merges: bool
    """Of adapters it has their base with them added, not them alone."""
    model_parallel: int
    """TP × PP × CP."""

    def config(self, model: Mapping[str, Any]) -> RunConfig:
        """The run of a model, such as {"init_from": folder} or {"preset": name}. Raises ConfigError in Oumi's words."""
        with in_keys():
            return RunConfig.from_tree(self.tree | {"model": self.tree.get("model", {}) | dict(model)})


def read_configuration(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tree of a YAML file of Oumi's with `--training.max_steps=2`, `training.max_steps=2` or, in two words,
    `--training.max_steps 2` in the place of what it says. Raises ConfigError."""
    tree: dict[str, Any] = {}
    if path is not None:
        if sentence := by_ending(path):
            raise ConfigError(sentence)
        try:
            tree = parse_yaml(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the configuration {path} cannot be read: {error}") from None
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(
                f"the configuration {path} is not valid YAML: {' '.join(str(error).split())}"
            ) from None
        if not isinstance(tree, dict):
            raise ConfigError(
                f"the configuration {path} holds a {type(tree).__name__}; it needs sections: model, data, training"
            )
        if sentence := by_content(path, tree, but="Oumi"):
            raise ConfigError(sentence)
        if {"optim", "train", "parallel"} & tree.keys():
            raise ConfigError(
                f"{path} is a run file of Megalith's own; run megalith train {path}, or sft, dpo or grpo"
            )
    for key, value in read_overrides(overrides):
        _place(tree, key, value)
    return resolved(tree, tree)


def read_overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The keys and values of overrides. Raises ConfigError."""
    left = list(words)
    while left:
        word = left.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--") and left and not left[0].startswith("--"):
            text, equals = left.pop(0), "="
        if not equals or "." not in key:
            raise ConfigError(f"{word!r} is no override; they are written --training.max_steps=2")
        try:
            yield key, parse_yaml(text)
        except yaml.YAMLError:
            raise ConfigError(f"{word} has no value that YAML can read; correct it") from None


def _place(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a.b[0].c of a tree, and makes what is not there."""
    parts: list[str | int] = [
        int(part) if part.isdigit() else part for part in re.split(r"\.|\[|\]\.?", key) if part
    ]
    here: Any = tree
    for part, after in zip(parts, [*parts[1:], None]):
        if isinstance(part, int):
            if not isinstance(here, list) or part > len(here):
                raise ConfigError(
                    f"{key} names entry {part} of a list that has not so many; add those before"
                )
            if part == len(here):
                here.append(None)
        elif not isinstance(here, dict):
            raise ConfigError(f"{key} names {part!r} of what is {here!r}; correct the override")
        inner = here[part] if isinstance(here, list) else here.get(part)
        if after is None:
            here[part] = value
        elif not isinstance(inner, dict | list):
            here[part] = [] if isinstance(after, int) else {}
        here = here[part]


def resolved(value: Any, whole: Mapping[str, Any]) -> Any:
    """With `${model.model_max_length}` replaced by what it names."""
    if isinstance(value, dict):
        return {key: resolved(inner, whole) for key, inner in value.items()}
    if isinstance(value, list):
        return [resolved(inner, whole) for inner in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def named(match: re.Match[str]) -> Any:
        here: Any = whole
        for part in match[1].split("."):
            here = here.get(part) if isinstance(here, dict) else None
        if here is None or isinstance(here, dict | list):
            raise ConfigError(
                f"{value} names {match[1]}, which is no value of this configuration; write it out"
            )
        return here

    single = re.fullmatch(r"\$\{([^}]+)\}", value)
    return named(single) if single else re.sub(r"\$\{([^}]+)\}", lambda match: str(named(match)), value)


def translate_oumi(tree: Mapping[str, Any], world_size: int | None = None) -> OumiRun:
    """The run that a configuration means on `world_size` processes; where that is not known, on as many as the model's
    layout takes. Raises ConfigError with all that is wrong, a sentence each."""
    asked = Asked({}, world_size)
    read_sections(asked, tree)
    datasets = {split: _datasets(asked, split) for split in ("train", "validation")}
    name = asked["training.trainer_type"].upper() if "training.trainer_type" in asked else ""
    trainer = TRAINERS.get(name)
    if trainer is None:
        asked.problems.append(_other_trainer(name))
    if not asked.values.get("model.model_name"):
        asked.problems.append("model.model_name is missing: the folder of the weights, or their hub name")
    _check_alone(asked, trainer)
    found: dict[str, Any] = {}
    if trainer is not None:
        _set_alone(asked, trainer)
        found = oumi_meanings.decide(asked, trainer, datasets["train"])
        if trainer != "grpo" and not datasets["train"]:
            asked.problems.append("data.train.datasets is empty; name one, with its dataset_path")
    if asked.problems:
        raise ConfigError(*dict.fromkeys(asked.problems))
    if asked["model.torch_dtype_str"] == "auto":
        asked.notes.append("model.torch_dtype_str is auto: the precision is that of the weights")
    model_name, tokenizer_name, template = (
        asked[f"model.{key}"] for key in ("model_name", "tokenizer_name", "chat_template")
    )
    idle = _idle(asked, name)
    return OumiRun(
        trainer,
        asked.tree,
        [*asked.notes, *([idle] if idle else [])],
        model_name,
        tokenizer_name,
        datasets["train"],
        datasets["validation"],
        template,
        **found,
    )


def _other_trainer(name: str) -> str:
    there = (
        "there are MEGATRON_GRPO (GRPO), TRL_SFT (fine-tuning on conversations) and TRL_DPO (on preferences)"
    )
    if name in ("VERL_GRPO", "TRL_GRPO"):
        return f"training.trainer_type is {name}; `megalith oumi migrate` makes it MEGATRON_GRPO: {there}"
    return f"training.trainer_type is {name or 'missing (HF)'}, which is not here; {there}"


def read_sections(asked: Asked, tree: Mapping[str, Any]) -> None:
    """The keys of a configuration and their values, in the types that the table asks for."""
    known = sorted({key.partition(".")[0] for key in KEYS})
    for section, values in tree.items():
        if section not in known:
            hint = did_you_mean(str(section), known) or f"; sections: {', '.join(known)}"
            asked.problems.append(f"there is no section {section!r} in Oumi's configurations{hint}")
        elif isinstance(values, Mapping):
            _flatten(asked, section, values)
        elif values is not None:
            asked.problems.append(f"section {section!r} holds {values!r}; it needs keys with values")


def _datasets(asked: Asked, split: str) -> list[DatasetAsked]:
    """The entries of data.SPLIT.datasets."""
    by_number: dict[str, dict[str, Any]] = {}
    for key, value in asked.values.items():
        number, inside, name = key.removeprefix(f"data.{split}.datasets[").partition("].")
        if inside and number.isdigit():
            by_number.setdefault(number, {})[name.removeprefix("dataset_")] = value
    return [
        DatasetAsked(own.get("name"), own.get("path"), own.get("subset"), own.get("split") or "train",
                     own.get("kwargs") or {}, own.get("sample_count"))
        for own in by_number.values()
    ]  # fmt: skip


def _flatten(asked: Asked, prefix: str, values: Mapping[str, Any], at: str = "") -> None:
    """`at`: the name of `prefix` in the table, where it is another."""
    at = at or prefix
    for name, value in values.items():
        key, named = f"{prefix}.{name}", f"{at}.{name}"
        row = row_of(named)
        if named in LISTS:
            for number, entry in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(entry, Mapping):
                    _flatten(asked, f"{key}[{number}]", entry, f"{named}[]")
                else:
                    asked.problems.append(
                        f"{key}[{number}] is {entry!r}; a dataset has keys, as dataset_name"
                    )
        elif isinstance(value, Mapping) and (
            any(other.startswith(f"{named}.") for other in ALL)
            or (row is None and value and named.startswith(IN_VERL[:-1]))
        ):
            _flatten(asked, key, value, named)
        elif value is None and any(other.startswith(f"{named}.") for other in ALL):
            continue  # an empty section
        elif any(other.startswith(f"{named}.") for other in ALL):
            asked.problems.append(f"{key} is {value!r:.60}; keys with values are needed")
        elif row is None:
            hint = _nearest(named)
            asked.problems.append(f"there is no key {key} in Oumi's configurations{hint}")
        elif not isinstance(row[1], Read):
            asked.values[key] = value
        elif (
            value is not None and (typed := _typed(asked, key, row[1], value)) is not None
        ):  # null: the default
            asked.values[key] = typed


def _nearest(key: str) -> str:
    section, _, name = key.rpartition(".")
    beside = [other.rpartition(".")[2] for other in ALL if other.rpartition(".")[0] == section]
    elsewhere = [other for other in ALL if other.rpartition(".")[2] == name]
    if longer := [other for other in beside if other.endswith(f"_{name}")]:
        return f"; did you mean {longer[0]!r}?"
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    if hint := did_you_mean(name, beside, 1):
        return hint
    last = {other.rpartition(".")[2]: other for other in reversed(ALL)}
    near = get_close_matches(name, last, 1, 0.7)
    return f"; did you mean {last[near[0]]}?" if near else "; docs/from_oumi.md says which there are"


def _typed(asked: Asked, key: str, row: Read, value: Any) -> Any:
    """The value in the type that the row asks for; None, and a problem, where it is of another."""
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
            return "no"  # as YAML reads it
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
        "dict": "keys with values",
    }.get(row.kind, f"a {row.kind}")
    asked.problems.append(f"{key} is {value!r:.60}; {kind} is needed")
    return None


def _check_alone(asked: Asked, trainer: str | None) -> None:
    """Refuses what the table refuses, of what the trainer reads."""
    for key, value in asked.values.items():
        if key.startswith("data.test."):
            continue
        named = re.sub(r"\[\d+\]", "[]", key)
        _, row = row_of(named)
        if (
            isinstance(row, Only)
            and str(value).lower() != str(row.value).lower()
            and value not in (None, [], {})
        ):
            asked.problems.append(f"{key} is {value!r:.60}, which is refused: {row.why}")


def _set_alone(asked: Asked, trainer: str) -> None:
    """What a key says without another, omitted ones with Oumi's default."""
    for key, row in ALL.items():
        if not isinstance(row, Assigns) or (
            key not in asked and (key.startswith(IN_VERL) or row.default is None)
        ):
            continue
        if trainer != "grpo" and row.path.startswith("rl."):
            continue
        value = asked[key]
        if row.values is not None:
            spelled = value.lower() if isinstance(value, str) else value
            if not isinstance(value, list | dict) and spelled in row.values:
                value = row.values[spelled]
            elif isinstance(row.default, str | bool):
                asked.problems.append(f"{key} is {value!r:.60}; there are {', '.join(map(str, row.values))}")
                continue
        if value is not None:
            asked.set(row.path, value)


def _idle(asked: Asked, trainer: str) -> str:
    """The one note on the keys that have no effect, by reason."""
    by_reason: dict[str, list[str]] = {}
    for key in asked.values:
        _, row = row_of(re.sub(r"\[\d+\]", "[]", key))
        why = row.why if isinstance(row, Idle) and asked.values[key] is not None else None
        if isinstance(row, Read) and key not in asked.read and ".datasets[" not in key:
            why = f"nothing reads them with {trainer} and the other keys"
        if why:
            by_reason.setdefault(why, []).append(key.removeprefix(IN_VERL))
    told = [f"{', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]
    return f"these keys have no effect here: {'; '.join(told)}" if told else ""


@contextmanager
def in_keys():
    """In it an error names Oumi's keys where it would name the settings that they set."""
    try:
        yield
    except MegalithError as error:
        error.args = (said_in_keys(str(error)),)
        raise


NAME = re.compile(
    r"(?<![\w./-])[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*(?![\w/.])|(?<![\w./-])[a-z]+(?:_[a-z0-9]+)+(?![\w/.])"
)


def said_in_keys(text: str) -> str:
    """`text` with keys of Oumi's in the place of the settings that they set."""
    kwargs = oumi_objective.KWARGS["grpo"].items()
    names = (
        {path: f"training.trainer_kwargs.{name}" for name, path in kwargs if path}
        | ENGINE_KEYS
        | oumi_objective.KEY_OF
        | {row.path: key for key, row in reversed(KEYS.items()) if isinstance(row, Assigns)}
    )
    names |= {path.partition(".")[2]: key for path, key in names.items() if "_" in path.partition(".")[2]}
    return NAME.sub(lambda found: names.get(found[0], found[0]), text)
