"""Byte-pair encoding with the tiktoken library, from a `.tiktoken` file or Megatron's JSON list.

A `.tiktoken` file has one line `base64(token bytes) rank` per token. It names neither the pattern that splits text
into words nor the special tokens; these are determined by the number of ranks. Megatron's list has one object
`{"rank", "token_bytes" (base64), "token_str"}` per token, and token ids are the rank plus 1,000, after a block of
special tokens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megalith.data.tokenizers.tokenizer import Tokenizer, TokenizerPaths, read_file, read_json
from megalith.errors import ConfigError, DataError, install_line

RANKS = "ranks.tiktoken"

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K_PATTERN = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
LLAMA3_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
MEGATRON_PATTERN = (  # its "v2", the default there
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
    r"""|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


@dataclass(frozen=True)
class Vocabulary:
    """Pattern and special tokens of a `.tiktoken` file. `special_tokens[eod_token]` is the end of document."""

    pattern: str
    vocab_size: int
    special_tokens: dict[str, int]
    eod_token: str = "<|endoftext|>"


def llama3_vocabulary(ranks: int) -> Vocabulary:
    """Return Llama 3's vocabulary: the file's `ranks` tokens, then 256 special tokens, most of them reserved."""
    special = {"<|begin_of_text|>": ranks, "<|end_of_text|>": ranks + 1}
    return Vocabulary(LLAMA3_PATTERN, ranks + 256, special, eod_token="<|end_of_text|>")


KNOWN_VOCABULARIES: dict[int, Vocabulary] = {  # by the number of ranks in the file
    50256: Vocabulary(GPT2_PATTERN, 50257, {"<|endoftext|>": 50256}),  # gpt2, r50k_base
    50280: Vocabulary(GPT2_PATTERN, 50281, {"<|endoftext|>": 50256}),  # p50k_base
    100256: Vocabulary(  # cl100k_base
        CL100K_PATTERN,
        100277,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    199998: Vocabulary(  # o200k_base
        O200K_PATTERN, 200019, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}
    ),
    128000: llama3_vocabulary(128000),
}

MEGATRON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_NUM_SPECIAL_TOKENS = 1000
MEGATRON_MAX_VOCAB_SIZE = 2**17


class TikTokenizer(Tokenizer):
    """tiktoken's byte-pair encoding, offline. Special tokens in the text are encoded as plain text.

    `vocab_size` (Megatron's JSON list only) is the total number of entries including special tokens. Its maximum is the
    length of the list plus 1,000; its default is the maximum, but at most 131,072, as in Megatron.
    """

    required_files = (RANKS,)

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None = None) -> None:
        super().__init__(files, vocab_size)
        content = self.files[RANKS]
        if content.lstrip()[:1] == b"[":
            ranks, vocabulary = _megatron_vocabulary(_read_json_ranks(content), vocab_size)
        else:
            ranks = _read_rank_lines(content)
            vocabulary = self._vocabulary_of(len(ranks))
        try:
            import tiktoken
        except ImportError as error:
            raise ConfigError(
                "TikTokenizer needs the tiktoken package, which is not installed; "
                f"run: {install_line('tokenizers')}"
            ) from error
        self._encoding = tiktoken.Encoding(
            name="megalith",
            pat_str=vocabulary.pattern,
            mergeable_ranks=ranks,
            special_tokens=vocabulary.special_tokens,
        )
        self.vocab_size = vocabulary.vocab_size
        self.eod = vocabulary.special_tokens[vocabulary.eod_token]

    @property
    def encoding(self) -> Any:
        """The tiktoken.Encoding."""
        return self._encoding

    def _vocabulary_of(self, ranks: int) -> Vocabulary:
        """Return the vocabulary for a file with this number of ranks."""
        unknown = Vocabulary(CL100K_PATTERN, ranks + 1, {"<|endoftext|>": ranks})
        return KNOWN_VOCABULARIES.get(ranks, unknown)

    @classmethod
    def from_paths(cls, paths: TokenizerPaths) -> Self:
        path = paths.tokenizer_model or paths.vocab_file
        if path is None:
            raise ConfigError(
                f"{cls.__name__} needs tokenizer_model: the path of a .tiktoken rank file or of Megatron's "
                "JSON vocabulary"
            )
        return cls({RANKS: read_file(path, "tiktoken vocabulary")}, paths.vocab_size)

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(list(ids), errors="replace")


class Llama3Tokenizer(TikTokenizer):
    """Llama 3's `tokenizer.model`, with `<|begin_of_text|>` before every text, as in Megatron."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a TikTokenizer with Llama 3's file, because an id means the same text in both."""
        return TikTokenizer(self.files).fingerprint

    def _vocabulary_of(self, ranks: int) -> Vocabulary:
        return llama3_vocabulary(ranks)

    def encode(self, text: str) -> list[int]:
        return [*self.prefix, *super().encode(text)]

    def _without_prefix(self, text: str) -> list[int]:
        return super().encode(text)

    @property
    def prefix(self) -> list[int]:
        return [self.eod - 1]

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [self.encode(text) for text in texts]


def _read_rank_lines(content: bytes) -> dict[bytes, int]:
    """Return token bytes → rank from lines of `base64 rank`. Every single byte must have a rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"line {number} of the tiktoken vocabulary is not `base64 rank` ({error}), so the file is damaged or "
                "of another kind; fetch it again, or pass another file"
            ) from error
    return _check_ranks(ranks, ranks.values())


def _read_json_ranks(content: bytes) -> dict[bytes, int]:
    """Return token bytes → rank from Megatron's list."""
    ranks: dict[bytes, int] = {}
    entries = read_json(content, "tiktoken vocabulary")
    for number, entry in enumerate(entries):
        try:
            if type(entry["rank"]) is not int:
                raise TypeError(f"rank is {entry['rank']!r}")
            ranks[base64.b64decode(entry["token_bytes"], validate=True)] = entry["rank"]
        except (TypeError, KeyError, ValueError, OverflowError, binascii.Error) as error:
            raise DataError(
                f"entry {number} of the tiktoken vocabulary is not an object with rank and token_bytes in base64 "
                f"({error!r}), so the file is damaged or of another kind; fetch it again, or pass another file"
            ) from error
    return _check_ranks(ranks, [entry["rank"] for entry in entries])


def _check_ranks(ranks: dict[bytes, int], all_ranks: Iterable[int]) -> dict[bytes, int]:
    if len(set(all_ranks)) != len(ranks):
        raise DataError(
            "the tiktoken vocabulary lists a token or a rank twice, so the file is damaged; fetch it again"
        )
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise DataError(
            f"the tiktoken vocabulary has {len(ranks)} tokens but none for byte {missing[0]:#04x} ({len(missing)} of "
            "256 bytes missing), so the file is truncated or of another kind; fetch it again, or pass another file"
        )
    return ranks


def _megatron_vocabulary(
    ranks: dict[bytes, int], vocab_size: int | None
) -> tuple[dict[bytes, int], Vocabulary]:
    """Return ids and special tokens in Megatron's order: special tokens first, then the best ranks."""
    num_special, max_size = MEGATRON_NUM_SPECIAL_TOKENS, len(ranks) + MEGATRON_NUM_SPECIAL_TOKENS
    vocab_size = min(max_size, MEGATRON_MAX_VOCAB_SIZE) if vocab_size is None else vocab_size
    if not num_special + 256 <= vocab_size <= max_size:
        raise ConfigError(
            f"TikTokenizer has vocab_size {vocab_size}, but this vocabulary has {len(ranks)} tokens after "
            f"{num_special} special ones, so choose from {num_special + 256} to {max_size}"
        )
    names = list(MEGATRON_SPECIAL_TOKENS)
    names += [f"<SPECIAL_{i}>" for i in range(len(names), num_special)]
    ids = {token: rank + num_special for token, rank in ranks.items() if rank < vocab_size - num_special}
    return ids, Vocabulary(
        MEGATRON_PATTERN, vocab_size, {name: i for i, name in enumerate(names)}, eod_token="</s>"
    )
