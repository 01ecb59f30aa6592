"""Translation of Megatron-LM's flags to a run file, with all problems in one error."""

from __future__ import annotations

import difflib
import functools
import math
import re
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalith.config import RunConfig
from megalith.dialects.megatron.derive.checkpoint_flags import is_empty
from megalith.dialects.megatron.flag_kinds import Derives, NoEffect, ParsedFlags, Refused, Sets
from megalith.dialects.megatron.flag_table import FLAGS, NOT
from megalith.dialects.megatron.other_flags import MODELOPT, OLDER
from megalith.errors import ConfigError, MegalithError

REQUIRED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings",
            "--micro-batch-size", "--lr")  # fmt: skip
IN_CHECKPOINT = REQUIRED[:5]  # read from the checkpoint with --use-checkpoint-args
ALTERNATIVES = {"--num-layers": "--encoder-num-layers", "--seq-length": "--encoder-seq-length"}
OTHER_NAMES = {  # settings whose flag has another name and no `Sets` row
    "train.output_dir": "--save",
    "model.init_from": "--finetune --load",
    "checkpoint.keep_every": "--save-retain-interval",
    "train.precision": "the precision",
    "data.reset_attention_mask": "--reset-attention-mask",
    "log.wandb": "--wandb-project",
    "log.tensorboard": "--tensorboard-dir",
    "log.wandb_name": "--wandb-exp-name",
}
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"  # editors and web pages replace -- by these
CONTRADICTIONS = (
    ("--train-iters", "--train-samples"),
    ("--lr-warmup-fraction", "--lr-warmup-iters"),
    ("--lr-warmup-fraction", "--lr-warmup-samples"),
    ("--train-samples", "--lr-decay-iters"),
    ("--train-samples", "--lr-warmup-iters"),
    ("--train-iters", "--lr-decay-samples"),
    ("--train-iters", "--lr-warmup-samples"),
    ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    ("--use-megatron-fsdp", "--use-torch-fsdp2"),
)


@dataclass(frozen=True)
class Translation:
    """A translated command line: sections of a run file, and notes for the user."""

    tree: dict[str, dict[str, Any]]
    notes: list[str]

    def config(self) -> RunConfig:
        """Build the run's configuration. Raises ConfigError, whose message names flags."""
        with in_flags():
            return RunConfig.from_tree(self.tree)

    def to_yaml(self) -> str:
        """Return the run file's text: settings that were given explicitly, and those that differ from Megalith's
        defaults.
        """
        return yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)


@contextmanager
def in_flags() -> Iterator[None]:
    """Return a context manager in which errors name flags instead of settings."""
    try:
        yield
    except MegalithError as error:
        error.args = (name_flags(str(error)),)
        raise


NAME = re.compile(r"(?<![\w./-])[a-z][a-z0-9]*(?:\.[a-z][a-z0-9_]*|(?:_[a-z0-9]+)+)(?![\w/])")


def name_flags(text: str) -> str:
    """Return `text` with setting names replaced by flags: `section.name`, and `name` alone if it has several words."""
    names = _flag_of_settings()
    if "model.init_from" in text:
        text = text.replace(
            "that run set checkpoint.load", "that run leave --finetune out and set checkpoint.load"
        )
    translated = NAME.sub(lambda match: names.get(match[0], match[0]), text)
    return re.sub(r"(--[\w-]+) or \1\b", r"\1", translated)


@functools.cache
def _flag_of_settings() -> dict[str, str]:
    """Return the flag of each setting, by `section.name` and by `name`."""
    fields = {section: field.annotation.model_fields for section, field in RunConfig.model_fields.items()}
    names = {
        f"{section}.{name}": flag
        for section, fields_of_section in fields.items()
        for name in fields_of_section
        if (flag := f"--{name.replace('_', '-')}") in FLAGS
    }
    for flag, row in reversed(FLAGS.items()):
        if isinstance(row, Sets):  # a switch that disables a setting is not a synonym of it
            names[row.path] = f"{row.path} ({flag})" if row.values == NOT else flag
    names |= OTHER_NAMES
    return names | {path.partition(".")[2]: flag for path, flag in names.items() if "_" in path}


def translate(
    words: Sequence[str],
    world_size: int | None = None,
    *,
    ignore_unknown: bool = False,
    trust: bool = False,
    program: str = "pretrain-gpt",
) -> Translation:
    """Translate a command line of Megatron-LM.

    Args:
        words: the flags and their values.
        world_size: number of processes, if known.
        ignore_unknown: ignore unknown flags, and refused ones that do not affect training.
        trust: allow loading pickles in the checkpoint.
        program: Megalith's name of Megatron's program.

    Raises:
        ConfigError: with one line per problem.
    """
    flags = read_words(words, ignore_unknown)
    flags.world_size, flags.program = world_size, program
    if trust:
        flags.set("checkpoint.trust", True)
    _check(flags)
    for flag, value in flags.values.items():
        match row := flags.table[flag]:
            case Sets():
                _set(flags, flag, row, value)
            case Refused() if value != (False if row.takes == "switch" else row.default):
                _refuse(flags, flag, row.means, row.harmless and ignore_unknown)
    for derive in dict.fromkeys(row.derive for row in FLAGS.values() if isinstance(row, Derives)):
        derive(flags)
    flags.set("log.console", "lines")
    if flags.problems:
        raise ConfigError(*flags.problems, *_out_of_range(flags))
    note = _no_effect_note(flags)
    with in_flags():
        tree = _with_defaults(flags)
        notes = _without_unread(tree)
    return Translation(tree, [*flags.notes, *map(name_flags, notes), *([note] if note else [])])


def _out_of_range(flags: ParsedFlags) -> list[str]:
    """Return problems with values of settings, to add to other problems of the command line."""
    try:
        with in_flags():
            RunConfig.from_tree(flags.tree)
    except ConfigError as error:
        return [line for line in str(error).split("\n") if line.partition(" is ")[0] in flags.values]
    return []


def _without_unread(tree: dict[str, dict[str, Any]]) -> list[str]:
    """Remove from `tree` the settings that this run never uses, and return a note for each.

    Does nothing if a checkpoint or weights are loaded, because the loaded model may use them.
    """
    config, notes = RunConfig.from_tree(tree), []
    loads = config.checkpoint.load is not None or config.model.init_from is not None
    for section, values in tree.items() if not loads else ():
        for name, needs in getattr(config, section).unread(config).items():
            if name in values and not needs.strict:
                value, outer = values.pop(name), "" if "." in needs.path else f"{section}."
                setting = f"{section}.{name}" if isinstance(value, bool) else f"{section}.{name} {value}"
                notes.append(f"{setting} has no effect: it requires {outer}{needs}".removesuffix(" true"))
    return notes


def read_words(words: Sequence[str], ignore_unknown: bool = False) -> ParsedFlags:
    """Parse the flags of a command line. Errors are collected in the result's `problems`."""
    flags, index = ParsedFlags(FLAGS | OLDER | MODELOPT), 0
    while index < len(words):
        word = words[index]
        index += 1
        name, equals, text = word.partition("=")
        if word[0:1] and word[0] in DASHES:
            flags.problems.append(
                f"{word!r} begins with a character that looks like - but is not; write --{word.lstrip(DASHES + '-')}"
            )
            while index < len(words) and not _is_flag(words[index]):
                index += 1
            continue
        if not _is_flag(word):
            flags.problems.append(f"{word!r} is not a flag; flags begin with --")
            continue
        values = [text] if equals else []
        while (
            not equals
            and index < len(words)
            and not _is_flag(words[index])
            and words[index][:1] not in [*DASHES]
        ):
            values.append(words[index])
            index += 1
        flag = _resolve(flags, name, ignore_unknown)
        if flag is not None:
            try:
                flags.values[flag] = _value(flags.table[flag].takes, [value.strip("'\"") for value in values])
            except ValueError as error:
                flags.problems.append(f"{flag} is {' '.join(values) or 'given no value'}: {error}")
                flags.misread.add(flag)
    return flags


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _resolve(flags: ParsedFlags, name: str, ignore_unknown: bool) -> str | None:
    """Return the flag for `name`, which may be an unambiguous prefix, or None."""
    if name in flags.table:
        return name
    longer = [flag for flag in FLAGS if flag.startswith(name)]
    if len(longer) == 1:
        flags.notes.append(f"{name} is read as {longer[0]}")
        return longer[0]
    if longer:
        flags.problems.append(f"{name} could be {', '.join(longer[:5])}; write it out")
        flags.misread.update(longer)
        return None
    near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.85)
    if ignore_unknown and not near:
        flags.notes.append(f"warning: {name} is not a known flag of Megatron-LM; it is ignored")
        return None
    near = near or difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.7)
    flags.misread.update(near)
    flags.problems.append(
        f"there is no flag {name}{f'; did you mean {near[0]}?' if near else ''}; `megalith megatron flags` lists them"
        " all"
    )
    return None


def _value(takes: str, values: list[str]) -> Any:
    """Convert the arguments after a flag. Raises ValueError with a message that says what the flag needs."""
    many = next((suffix for suffix in ("{3}", "*", "+") if takes.endswith(suffix)), "")
    one = takes.removesuffix(many)
    if one == "switch":
        if values:
            raise ValueError("it takes no value")
        return True
    counts = {"{3}": ("three values", {3}), "": ("one value", {1})}
    text, allowed = counts.get(many, ("a value", {*range(many == "+", len(values) + 1)}))
    if len(values) not in allowed:
        raise ValueError(f"it needs {text}")
    read = [_one_value(one, value) for value in values]
    return read if many else read[0]


def _one_value(one: str, text: str) -> Any:
    if one in ("int", "float"):
        try:
            number = int(text) if one == "int" else float(text)
        except ValueError:
            raise ValueError(f"it must be a {'whole ' if one == 'int' else ''}number") from None
        if not math.isfinite(number):
            raise ValueError("it must be a finite number")
        return number
    if one != "text" and text not in one.split("|"):
        raise ValueError(f"it must be one of {one.replace('|', ', ')}")
    return text


def _check(flags: ParsedFlags) -> None:
    stored = (
        flags["--use-checkpoint-args"] and flags["--load"] is not None and not is_empty(Path(flags["--load"]))
    )
    named = {*flags.values, *flags.misread}
    missing = [flag for flag in REQUIRED if not {flag, ALTERNATIVES.get(flag)} & named]
    if missing := [flag for flag in missing if not (stored and flag in IN_CHECKPOINT)]:
        flags.problems.append(
            f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing, and Megatron has no default; add "
            f"{'these flags' if missing[1:] else 'the flag'}"
        )
    if not {"--train-iters", "--train-samples"} & {*flags.values, *flags.misread}:
        flags.problems.append(
            "neither --train-iters nor --train-samples is given, one of which sets the run's length; add one of them"
        )
    for pair in CONTRADICTIONS:
        if all(flag in flags and flags[flag] for flag in pair):
            flags.problems.append(f"{pair[0]} and {pair[1]} contradict each other; remove one of the two")


def _set(flags: ParsedFlags, flag: str, row: Sets, value: Any) -> None:
    ours = row.values.get(value) if row.values is not None else value
    there = [*row.values] if row.values is not None else _choices(row.path)
    if (row.values is not None and value not in row.values) or (
        row.values is None and there and value not in there
    ):
        _refuse(flags, f"{flag} {value}", f"choose among {', '.join(map(str, there))}", False)
        return
    flags.set(row.path, ours)


def _refuse(flags: ParsedFlags, what: str, why: str, passed_over: bool) -> None:
    if passed_over:
        flags.notes.append(f"warning: {what} is ignored: {why}")
    else:
        flags.problems.append(f"{what} is refused: {why}")


def _choices(path: str) -> list[Any]:
    """Return the choices of a setting, if it has any."""
    section, _, name = path.partition(".")
    field = RunConfig.model_fields[section].annotation.model_fields.get(name)
    choices, stack = [], [field.annotation] if field is not None else []
    while stack:
        annotation = stack.pop()
        if typing.get_origin(annotation) is typing.Literal:
            choices += typing.get_args(annotation)
        elif typing.get_origin(annotation) is not list:
            stack += [part for part in typing.get_args(annotation) if part is not type(None)]
    return choices


def _with_defaults(flags: ParsedFlags) -> dict[str, dict[str, Any]]:
    """Return the tree with Megatron's defaults where Megalith's default differs and the run uses the setting."""
    omitted: dict[str, Any] = {}
    for flag, row in FLAGS.items():
        if isinstance(row, Sets) and flag not in flags and row.path not in omitted:
            values = row.values or {}
            is_switch = row.takes == "switch"
            omitted[row.path] = (
                not values.get(True, True) if is_switch else values.get(row.default, row.default)
            )
    tree = {section: dict(flags.tree.get(section, {})) for section in RunConfig.model_fields}
    config = RunConfig.from_tree(tree)
    for path, default in omitted.items():
        section, _, name = path.partition(".")
        field = RunConfig.model_fields[section].annotation.model_fields.get(name)
        is_ours = field is None or default is None or default == field.default
        if name not in tree[section] and not is_ours and name not in getattr(config, section).unread(config):
            tree[section][name] = default
    if "dataloader_type" not in tree["data"]:
        tree["data"]["dataloader_type"] = "single"
    return {section: values for section, values in tree.items() if values}


def _no_effect_note(flags: ParsedFlags) -> str:
    """Return a note on the flags without effect, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for flag in flags.values:
        if isinstance(row := flags.table[flag], NoEffect):
            by_reason.setdefault(row.means, []).append(flag)
    groups = [f"{' '.join(idle)} ({reason})" for reason, idle in by_reason.items()]
    return f"these flags have no effect in Megalith: {'; '.join(groups)}" if groups else ""


def listing() -> dict[str, dict[str, str]]:
    """Return all flags with their kind and meaning."""
    return {flag: {"kind": row.kind, "means": row.means} for flag, row in sorted((FLAGS | MODELOPT).items())}
