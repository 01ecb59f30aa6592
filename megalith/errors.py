"""The errors a user can meet. Each message is a sentence: the values, the rule, the way out.

The command line prints the message without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path


class MegalithError(Exception):
    """Anything that went wrong for a reason that the user can read and act on."""

    exit_code = 1


class ConfigError(MegalithError):
    """The configuration is not possible: an unknown key, a wrong type, sizes that do not fit."""

    exit_code = 2


class DataError(MegalithError):
    """A data file or tokenizer is missing, damaged, or does not fit the model."""

    exit_code = 3


class CheckpointError(MegalithError):
    """A checkpoint is missing, damaged, or does not fit the model."""

    exit_code = 4


class TrainingError(MegalithError):
    """Training cannot go on: the loss is lost, or memory has run out."""

    exit_code = 5


class HangError(MegalithError):
    """A rank stands still and the others wait for it."""

    exit_code = 6


REFUSALS = (ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code)
"""Exit codes of a run that another start would refuse again."""


NAMES_IN_ERROR = 10


def shorten(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = len(names) - NAMES_IN_ERROR
    return ", ".join(names[:NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(name: str, known: Iterable[str], count: int = 3) -> str:
    """`; did you mean 'lr_decay_style'?`, or an empty string when nothing known is near `name`."""
    near = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def nearest_of(name: str, known: Collection[str]) -> str:
    """`; did you mean 'gpt2'? (known: gpt2, …)`, or `; known: gpt2, …` when nothing known is near `name`."""
    names, near = ", ".join(known), did_you_mean(name, known)
    return f"{near} (known: {names})" if near else f"; known: {names}"


def install_line(extra: str) -> str:
    """The command that installs one of our extras, for a checkout as for an installed package."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'megalith[{extra}]'"
    where = "." if checkout == Path.cwd() else checkout
    return f"pip install --editable '{where}[{extra}]'"
