"""What every tokenizer offers.

A tokenizer is a pure function of its files' content and, for some kinds, a vocabulary size. It keeps that
content in memory, so that it can be saved into a checkpoint after its source has moved, rebuilt in another
process, and compared by fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from megalith.errors import ConfigError, DataError
from megalith.io import atomic_file
from megalith.small_files import read_bounded, read_small_file

SPEC_FILE = "megalith_tokenizer.json"


@dataclass(frozen=True)
class Named:
    """What a configuration names for a tokenizer: paths, and a size for the kinds that have none of their own."""

    tokenizer_model: str | None
    vocab_file: str | None
    merge_file: str | None
    vocab_size: int | None


class Tokenizer(ABC):
    """Text to token ids and back.

    `vocab_size`: every id is in [0, vocab_size). `eod`: the id that ends a document, None when the
    vocabulary has no such token. `files`: file name → content, all that a rebuild needs.
    """

    required_files: ClassVar[tuple[str, ...]] = ()
    optional_files: ClassVar[tuple[str, ...]] = ()
    """The names that `files` may have: nothing else is read from a saved tokenizer's folder."""

    encodes_without_lock: ClassVar[bool] = False
    """Whether `encode_batch` lets other threads run Python meanwhile."""

    vocab_size: int
    eod: int | None

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None) -> None:
        """`vocab_size` as the caller asked for it; the kinds that need none ignore it."""
        self.files = dict(files)
        self.requested_vocab_size = vocab_size

    @classmethod
    @abstractmethod
    def from_paths(cls, named: Named) -> Self:
        """Read the files that this kind is made of. ConfigError: a needed one is not named."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with no special tokens added. An empty text has none."""

    @property
    def prefix(self) -> list[int]:
        """The special tokens that the tokenizer's own model begins each text with, such as <s>."""
        return []

    @property
    def suffix(self) -> list[int]:
        """The special tokens that the tokenizer's own model ends each text with, such as T5's </s>."""
        return []

    def special_tokens(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return what of `prefix` and `suffix` a text of these ids lacks: transformers tokenizes a text with them."""
        prefix, suffix, ids = self.prefix, self.suffix, list(ids)
        return (
            [] if ids[: len(prefix)] == prefix else prefix,
            [] if ids[len(ids) - len(suffix) :] == suffix else suffix,
        )

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of `text` with its special tokens. An empty text has none."""
        ids = list(self.encode(text))
        before, after = self.special_tokens(ids)
        return before + ids + after if ids else []

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """`encode` of each text; ids may come as lists or as arrays of integers."""
        return [self.encode(text) for text in texts]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], list[bool]] | str]:
        """Of each text its ids, and which of them lie in one of its spans of characters, sorted and apart.

        In the place of one whose tokens cross the bounds of its spans stands the reason, as text.
        """
        return [self._encode_between(text, of_text) for text, of_text in zip(texts, spans)]

    def _encode_between(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]] | str:
        ids, marks, at = [], [], 0
        for start, end in [*spans, (len(text), len(text))]:
            for stretch, mark in ((text[at:start], False), (text[start:end], True)):
                found = self._without_prefix(stretch) if stretch else []
                ids += found
                marks += [mark] * len(found)
            at = end
        if list(self._without_prefix(text)) != ids:
            return "a token of it lies both in and outside of what is learned"
        return ids, marks

    def _without_prefix(self, text: str) -> list[int]:
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, such as those that end a text or a turn, as far as this kind knows them."""
        return frozenset() if self.eod is None else frozenset({self.eod})

    def pieces(self) -> list[str]:
        """Each entry of the vocabulary as it is spelled there, by its id. ConfigError for kinds that spell none."""
        raise ConfigError(
            f"{self.tokenizer_type} does not spell its entries, and masking asks which of them begin words; take "
            "BertWordPieceLowerCase, BertWordPieceCase or HuggingFaceTokenizer"
        )

    def content(self) -> bytes:
        """What decides which ids a text gets: the fingerprint is taken of this."""
        return b"".join(self.files[name] for name in sorted(self.files))

    @property
    def model_vocab_size(self) -> int:
        """The entries that a model gets which says nothing of its vocabulary."""
        return self.vocab_size

    @property
    def tokenizer_type(self) -> str:
        return type(self).__name__

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of kind, size and content: equal when every text gets the same ids."""
        head = f"{self.tokenizer_type} {self.vocab_size}\n".encode()
        return hashlib.sha256(head + self.content()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files and its spec into `folder`; `load_tokenizer(folder)` reads them."""
        for name, content in self.files.items():
            with atomic_file(Path(folder) / name) as file:
                file.write(content)
        spec = {
            "tokenizer_type": self.tokenizer_type,
            "requested_vocab_size": self.requested_vocab_size,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            "fingerprint": self.fingerprint,
        }
        with atomic_file(Path(folder) / SPEC_FILE) as file:
            file.write(json.dumps(spec, indent=2).encode() + b"\n")

    def __reduce__(self) -> tuple:
        """Another process rebuilds the tokenizer from its content."""
        return type(self), (self.files, self.requested_vocab_size)


def read_file(path: str | Path, what: str, folder: Path | None = None) -> bytes:
    """The content of a tokenizer file; `what` names it in the error.

    It may be a link to anywhere where the user gave its path; in a `folder` that the user gave, only within it.
    """
    try:
        return read_bounded(Path(path)) if folder is None else read_small_file(Path(path), folder)
    except OSError as error:
        raise DataError(f"cannot read the {what} {str(path)!r}: {error.strerror}; check the path") from error


def read_json(content: bytes, what: str) -> object:
    """`content` as JSON; `what` names it in the error."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"the {what} is not JSON ({error}); it is damaged or another kind of file") from error
