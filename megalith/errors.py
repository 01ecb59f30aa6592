"""The errors a user can meet, and text that is safe to print.

Each message is a sentence: the values, the rule, the way out. The command line prints it without a traceback and exits
with `exit_code`. What an error quotes may come from a file that a stranger made, so its text is `printable` from the
beginning, wherever it is shown later.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Self

# Control characters (C0, DEL, C1), ends of lines, marks that turn the direction of writing, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LINES = "\n\t"  # what a text of several lines keeps


def printable(text: object, keep: str = "") -> str:
    """`text` with what would act on a terminal, or could not be encoded, as escapes: a name with ESC as `\\x1b`.

    A name, a key or a path keeps nothing, so that it cannot forge a line; a text keeps `LINES`.
    """

    def escape(match: re.Match[str]) -> str:
        one = match[0]
        if one in keep:
            return one
        return f"\\x{ord(one):02x}" if ord(one) < 0x100 else f"\\u{ord(one):04x}"

    return _UNPRINTABLE.sub(escape, str(text))


class MegalithError(Exception):
    """Anything that went wrong for a reason that the user can read and act on: a sentence, or one a line."""

    exit_code = 1

    def __init__(self, *sentences: str):
        super().__init__("\n".join(map(printable, sentences)))

    def within(self, place: object) -> Self:
        """The same error with the file or folder that it is of before each sentence."""
        return type(self)(*(f"{place}: {sentence}" for sentence in str(self).split("\n")))


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


class SeamError(MegalithError):
    """A module was to be given something that parallel/seams.py does not declare."""


class HangError(MegalithError):
    """A rank hangs and the others wait for it."""

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
