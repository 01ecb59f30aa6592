"""Errors for users, and text that is safe to print.

Each message states the values, the rule that they break, and what to do. The command line prints it without a traceback
and exits with `exit_code`. A message may quote an untrusted file, so its text is made `printable` when the error is
created.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Self

# Control characters (C0, DEL, C1), line separators, text direction marks, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LINES = "\n\t"  # characters to keep in multi-line text


def printable(text: object, keep: str = "") -> str:
    """Escape characters that would act on a terminal or cannot be encoded: ESC becomes `\\x1b`.

    Args:
        text: text to print.
        keep: characters to leave unescaped. Keep none in names, keys and paths, so that they cannot forge a line; keep
            `LINES` in multi-line text.
    """

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        if character in keep:
            return character
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return _UNPRINTABLE.sub(escape, str(text))


class MegalithError(Exception):
    """Base class of errors that the user can act on. The message is one sentence, or one per line."""

    exit_code = 1

    def __init__(self, *sentences: str):
        super().__init__("\n".join(map(printable, sentences)))

    def within(self, path: object) -> Self:
        """Return the same error with a file or folder before each sentence."""
        return type(self)(*(f"{path}: {sentence}" for sentence in str(self).split("\n")))


class ConfigError(MegalithError):
    """The configuration is invalid, for example an unknown key, a wrong type or sizes that do not fit."""

    exit_code = 2


class DataError(MegalithError):
    """A data file or tokenizer is missing, damaged, or does not fit the model."""

    exit_code = 3


class CheckpointError(MegalithError):
    """A checkpoint is missing, damaged, or does not fit the model."""

    exit_code = 4


class TrainingError(MegalithError):
    """Training cannot continue, for example because the loss is not finite or memory has run out."""

    exit_code = 5


class SeamError(MegalithError):
    """An attempt to replace something that parallel/seams.py does not declare as a seam."""


class HangError(MegalithError):
    """A rank hangs, and the others wait for it."""

    exit_code = 6


REFUSALS = (ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code)
"""Exit codes of errors that would recur after a restart."""


NAMES_IN_ERROR = 10


def shorten(names: Sequence[str]) -> str:
    """Return the first names of a list as text, and how many others there are."""
    more = len(names) - NAMES_IN_ERROR
    return ", ".join(names[:NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")


def short_repr(value: object, limit: int = 60) -> str:
    """Return a value's repr, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def did_you_mean(name: str, choices: Iterable[str], count: int = 3) -> str:
    """Return `; did you mean 'lr_decay_style'?`, or an empty string if no known name is similar."""
    near = difflib.get_close_matches(name, list(choices), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def nearest_of(name: str, choices: Collection[str]) -> str:
    """Return `; did you mean 'gpt2'? (known: gpt2, …)`, or `; known: gpt2, …` if no known name is similar."""
    names, near = ", ".join(choices), did_you_mean(name, choices)
    return f"{near} (known: {names})" if near else f"; known: {names}"


def install_line(extra: str) -> str:
    """Return the command that installs an extra, for a checkout or an installed package."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'megalith[{extra}]'"
    path = "." if checkout == Path.cwd() else checkout
    return f"pip install --editable '{path}[{extra}]'"
