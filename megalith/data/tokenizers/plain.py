"""Tokenizers without files: one id per byte, or text that consists of ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from megalith.data.tokenizers.tokenizer import Tokenizer, TokenizerPaths
from megalith.errors import ConfigError, DataError


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, ids 0 to 255, and the end of document, 256."""

    def __init__(self, files: Mapping[str, bytes] | None = None, vocab_size: int | None = None) -> None:
        super().__init__(files or {}, vocab_size)
        self.vocab_size = 257
        self.eod = 256

    @classmethod
    def from_paths(cls, paths: TokenizerPaths) -> Self:
        return cls()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Tokenizes text that consists of ids separated by white space: `"17 4 203"`.

    `vocab_size` is the given size plus one, and the end of document is the last id, as in Megatron.
    """

    def __init__(self, files: Mapping[str, bytes] | None = None, vocab_size: int | None = None) -> None:
        super().__init__(files or {}, vocab_size)
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(
                f"NullTokenizer has vocab_size {vocab_size}; set it to a positive number above "
                "all ids of the text"
            )
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    @classmethod
    def from_paths(cls, paths: TokenizerPaths) -> Self:
        return cls(vocab_size=paths.vocab_size)

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(
                f"NullTokenizer reads whole numbers separated by white space: {error}; "
                "choose another tokenizer_type for running text"
            ) from None
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise DataError(
                    f"token id {i} is not in [0, {self.vocab_size}) (vocab_size {self.eod} and the end of "
                    "document); raise vocab_size or correct the text"
                )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids)
