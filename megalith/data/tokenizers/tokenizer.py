"""The interface of tokenizers.

A tokenizer is a pure function of its files' content and, for some kinds, a vocabulary size. It keeps the content in
memory, so that it can be saved into a checkpoint, rebuilt in another process, and compared by fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from megalith.errors import ConfigError, DataError
from megalith.io import atomic_file
from megalith.small_files import read_bounded, read_small_file

SPEC_FILE = "megalith_tokenizer.json"


@dataclass(frozen=True)
class TokenizerPaths:
    """Tokenizer paths of a configuration, and a vocabulary size for kinds without a size of their own."""

    tokenizer_model: str | None
    vocab_file: str | None
    merge_file: str | None
    vocab_size: int | None


class Tokenizer(ABC):
    """Conversion of text to token ids and back.

    `vocab_size`: every id is in [0, vocab_size). `eod`: the id that ends a document; None if the vocabulary has none.
    `files`: content by file name, sufficient for a rebuild.
    """

    required_files: ClassVar[tuple[str, ...]] = ()
    optional_files: ClassVar[tuple[str, ...]] = ()
    """Names that `files` may have; nothing else is read from a saved tokenizer's folder."""

    encodes_without_lock: ClassVar[bool] = False
    """True if `encode_batch` lets other Python threads run."""

    path: str = ""
    """Path or name that it was built from, for messages; "" if unknown."""

    vocab_size: int
    eod: int | None

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None) -> None:
        """Store the files and the requested `vocab_size`, which kinds with a fixed size ignore."""
        self.files = dict(files)
        self.requested_vocab_size = vocab_size

    @classmethod
    @abstractmethod
    def from_paths(cls, paths: TokenizerPaths) -> Self:
        """Read the files of this kind. Raise ConfigError if a required path is missing."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` without special tokens. An empty text has none."""

    @property
    def prefix(self) -> list[int]:
        """Special tokens that the tokenizer itself adds before a text, such as <s>."""
        return []

    @property
    def suffix(self) -> list[int]:
        """Special tokens that the tokenizer itself adds after a text, such as T5's </s>."""
        return []

    def special_tokens(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of `prefix` and `suffix` that `ids` does not begin and end with already. transformers adds
        both to a text.
        """
        prefix, suffix, ids = self.prefix, self.suffix, list(ids)
        return (
            [] if ids[: len(prefix)] == prefix else prefix,
            [] if ids[len(ids) - len(suffix) :] == suffix else suffix,
        )

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of `text` with special tokens. An empty text has none."""
        ids = list(self.encode(text))
        before, after = self.special_tokens(ids)
        return before + ids + after if ids else []

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return `encode` of each text, as lists or integer arrays."""
        return [self.encode(text) for text in texts]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], list[bool]] | str]:
        """Return the ids of each text, and a mark for each id that is True if the id is in one of the text's spans.

        Args:
            texts: the texts.
            spans: spans of characters of each text, sorted and disjoint.

        Returns:
            For each text (ids, marks), or a string with the reason if a token crosses the bounds of a span.
        """
        return [self._encode_between(text, text_spans) for text, text_spans in zip(texts, spans)]

    def _encode_between(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]] | str:
        ids, marks, position = [], [], 0
        for start, end in [*spans, (len(text), len(text))]:
            for stretch, mark in ((text[position:start], False), (text[start:end], True)):
                stretch_ids = self._without_prefix(stretch) if stretch else []
                ids += stretch_ids
                marks += [mark] * len(stretch_ids)
            position = end
        if list(self._without_prefix(text)) != ids:
            return "it has a token that is only partly in the loss"
        return ids, marks

    def _without_prefix(self, text: str) -> list[int]:
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""

    def decode_without_special(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without the special tokens among them."""
        return self.decode([i for i in ids if i not in self.special_ids])

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry or special token by its spelling, or None if there is none."""
        try:
            return self.pieces().index(token)
        except (ConfigError, ValueError):
            return None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, such as end of text and end of turn, as far as this kind can determine them."""
        return frozenset() if self.eod is None else frozenset({self.eod})

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generated text: `eod`, and further ids listed in the tokenizer's files."""
        return () if self.eod is None else (self.eod,)

    @property
    def forced_bos_token_id(self) -> int | None:
        """First id of an encoder-decoder's completions according to the tokenizer's files, or None."""
        return None

    def pieces(self) -> list[str]:
        """Return the spelling of each vocabulary entry, by id. Raise ConfigError for kinds whose entries have no
        spelling.
        """
        raise ConfigError(
            f"{self.tokenizer_type} does not provide its entries as text, which masking needs to "
            "find word starts; use BertWordPieceLowerCase, BertWordPieceCase or "
            "HuggingFaceTokenizer"
        )

    def content(self) -> bytes:
        """Return the bytes that determine how texts are tokenized. The fingerprint is a hash of them."""
        return b"".join(self.files[name] for name in sorted(self.files))

    @property
    def model_vocab_size(self) -> int:
        """Vocabulary size for a model that sets none."""
        return self.vocab_size

    @property
    def tokenizer_type(self) -> str:
        return type(self).__name__

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of kind, size and content. Equal fingerprints mean that every text gets the same ids."""
        head = f"{self.tokenizer_type} {self.vocab_size}\n".encode()
        return hashlib.sha256(head + self.content()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files and its spec into `folder`, from which `load_tokenizer(folder)` loads it."""
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
        """Pickle the content. Another process rebuilds the tokenizer from it."""
        return type(self), (self.files, self.requested_vocab_size)


def read_file(path: str | Path, description: str, folder: Path | None = None) -> bytes:
    """Return the content of a tokenizer file. Errors quote `description`.

    Without `folder`, the file may be a link to anywhere, because the user chose its path. With `folder`, a link must
    stay within that folder.
    """
    try:
        return read_bounded(Path(path)) if folder is None else read_small_file(Path(path), folder)
    except OSError as error:
        raise DataError(
            f"cannot read the {description} {str(path)!r}: {error.strerror}; check the path"
        ) from error


def side_table(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in an auxiliary tokenizer file. Empty if the file is missing or contains another type."""
    table = read_json(files[name], name) if name in files else {}
    return table if isinstance(table, dict) else {}


def read_json(content: bytes, description: str) -> object:
    """Parse JSON. Errors quote `description`."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the {description} is not JSON ({error}), so the file is damaged or of another kind; fetch it again, or "
            "pass another file"
        ) from error
