"""Samples of an encoder-decoder: a sequence that the encoder reads, and one that the decoder learns to write.

Of documents split into sentences they are made by span corruption (Raffel et al. 2020), token for token Megatron's:
words are chosen as BERT's are masked (masked_lm.py), each run of them gives way to a sentinel, and the decoder writes
each sentinel and the words that it stands for:

    encoder   a a <extra_id_0> a <extra_id_1> a      decoder   [BOS] <extra_id_0> b b <extra_id_1> b → … b [EOS]

A sample is a record of `pair_dtype`, filled up to the lengths of the run: a dataset makes records, and `make_t5_batch`
tensors of them. The decoder reads its labels one place later, behind a token that begins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megalith.data.batch import Batch
from megalith.data.indexed import IndexedDataset
from megalith.data.masked_lm import Masking, SentenceSamples, WordPieces, mask_words
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.progress import Progress

SPANS = {"masking_max_ngram": 10, "masking_use_geometric_distribution": True}  # of Megatron's pretrain_t5.py
FIRST_SENTINEL, T5_SPECIAL = "<extra_id_0>", ("<pad>", "</s>")
WORD, NOWHERE = (
    "▁",
    -1,
)  # how SentencePiece spells the beginning of a word; the id of a token that there is not
BEGIN = 0  # what the mock decoder's sequences begin with, and what fills up


@dataclass
class T5Batch(Batch):
    """One micro-batch of an encoder-decoder: `input_ids`, `labels` and `loss_mask` are the decoder's, [batch, seq]."""

    of_encoder_tokens: ClassVar[Sequence[str]] = ("encoder_input_ids",)

    encoder_input_ids: Tensor  # int64 [batch, encoder seq]
    encoder_padding_mask: (
        Tensor | None
    )  # bool [batch, encoder seq], False for what fills up; None: nothing does, or `encoder_document_ends` says it
    encoder_document_ends: (
        Tensor | None
    )  # int32 [batch, 2]: where what is real ends, and what fills up behind it; None: nothing does
    encoder_token_index: Tensor | None = field(
        default=None, kw_only=True
    )  # int64 [encoder seq]: each token's in the whole sequence; None: 0, 1, …


def pair_dtype(encoder_length: int, length: int) -> np.dtype:
    """A record with both sequences and what of them is real; names are Megatron-LM's."""
    return np.dtype(
        [
            ("text_enc", np.int64, (encoder_length,)),
            ("enc_mask", bool, (encoder_length,)),  # False for what fills up
            ("text_dec", np.int64, (length,)),
            ("labels", np.int64, (length,)),
            ("loss_mask", np.float32, (length,)),  # 0 for what fills up
        ]
    )


def make_t5_batch(samples: np.ndarray, numbers: np.ndarray) -> T5Batch:
    """A batch of samples [batch] of a `pair_dtype`, and their places in the stream, int64 [batch]."""
    text = {name: torch.from_numpy(np.ascontiguousarray(samples[name])) for name in samples.dtype.names}
    batch, seq = text["text_dec"].shape
    real = text["enc_mask"].sum(1, dtype=torch.int32)
    return T5Batch(
        input_ids=text["text_dec"],
        labels=text["labels"],
        loss_mask=text["loss_mask"],
        position_ids=torch.arange(seq).expand(batch, seq).contiguous(),
        document_ends=None,
        sample_numbers=torch.from_numpy(numbers),
        encoder_input_ids=text["text_enc"],
        encoder_padding_mask=None,
        encoder_document_ends=torch.stack([real, torch.full_like(real, text["text_enc"].shape[1])], 1),
    )


@dataclass(frozen=True)
class SpanTokens:
    """What span corruption needs to know of a vocabulary."""

    words: WordPieces
    begin: int
    """What the decoder reads first."""
    end: int
    """What it writes last."""
    sentinels: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, extra: int) -> SpanTokens:
        """Of word pieces, behind whose vocabulary Megatron's [BOS], [EOS] and `extra` sentinels stand; or of a
        vocabulary that has T5's own, <pad>, </s> and <extra_id_0>, …. ConfigError where it has neither."""
        pieces = tokenizer.pieces()
        ids = {piece: i for i, piece in enumerate(pieces)}
        if FIRST_SENTINEL not in ids:
            own = tokenizer.model_vocab_size
            words = WordPieces.of(tokenizer, own + extra)
            return cls(words, own - 2, own - 1, range(own, own + extra))
        if lost := [token for token in T5_SPECIAL if token not in ids]:
            raise ConfigError(
                f"data.tokenizer_type {tokenizer.tokenizer_type} has {FIRST_SENTINEL}, but no {', '.join(lost)}; take "
                "T5's own tokenizer, or BERT's vocab.txt by BertWordPieceLowerCase or BertWordPieceCase"
            )
        begins = np.array([piece.startswith(WORD) or piece in T5_SPECIAL for piece in pieces])
        pad, end = (ids[token] for token in T5_SPECIAL)
        found = (ids.get(f"<extra_id_{number}>") for number in range(len(pieces)))
        words = WordPieces(NOWHERE, NOWHERE, pad, pad, len(pieces), begins)
        return cls(words, pad, end, [*takewhile(lambda number: number is not None, found)])


class SpanDataset(SentenceSamples):
    """Samples of `pair_dtype`, as Megatron's T5MaskedWordPieceDataset makes them."""

    def __init__(
        self,
        indexed: IndexedDataset,
        first_document: int,
        last_document: int,
        lengths: tuple[int, int],
        num_samples: int,
        seed: int,
        tokens: SpanTokens,
        masking: Masking,
        progress: Progress | None = None,
    ) -> None:
        """`lengths`: the encoder's and the decoder's."""
        self._lengths, self._tokens, self._masking = lengths, tokens, masking
        self._dtype = pair_dtype(*lengths)
        sizes = (lengths[0] - 2, num_samples, seed, tokens.words.vocab_size)  # as for [BOS] and [EOS]
        super().__init__(indexed, first_document, last_document, *sizes, masking.short_seq_prob, 1, progress)

    def make(self, sentences: list[list[int]], target: int, rng: np.random.RandomState) -> np.ndarray:
        tokens, special = [*chain(*sentences)][:target], self._tokens
        _, runs = mask_words(tokens, target, special.words, self._masking, rng, lambda token, *_: token)
        read, written, first = [], [], 0
        if len(runs) > len(special.sentinels):
            raise DataError(
                f"a sample has {len(runs)} runs of masked words and {len(special.sentinels)} sentinels to put in their "
                "place; raise data.vocab_extra_ids, or lower data.mask_prob"
            )
        for sentinel, run in zip(special.sentinels, sorted(runs)):
            read += [*tokens[first : run[0]], sentinel]
            written += [sentinel, *(tokens[place] for place in run)]
            first = run[-1] + 1
        return self._record(read + tokens[first:], written)

    def _record(self, read: list[int], written: list[int]) -> np.ndarray:
        special, (room, length) = self._tokens, self._lengths
        count = len(written) + 1
        if count > length:
            raise DataError(
                f"the decoder has {count} tokens to write, but data.decoder_seq_length is {length}; raise it, or lower "
                "data.mask_prob"
            )
        sample = np.zeros((), self._dtype)
        text = np.full(room, special.words.pad, dtype=np.int64)
        text[: len(read)] = read
        sample["enc_mask"] = text != special.words.pad
        sample["text_enc"] = np.where(sample["enc_mask"], text, 0)
        sample["text_dec"][:count] = [special.begin, *written]
        sample["labels"][:count], sample["loss_mask"][:count] = [*written, special.end], 1
        return sample


class MockPairs:
    """Samples that depend on (seed, i) and on the sizes alone: the encoder reads tokens that count upwards from a
    random one, in steps of 1, 2 or 3, and the decoder goes on counting. Each fills half of its length to all of it."""

    def __init__(
        self, vocab_size: int, encoder_length: int, length: int, num_samples: int, seed: int
    ) -> None:
        self.vocab_size, self.num_samples, self.seed = vocab_size, num_samples, seed
        self.lengths, self._dtype = (encoder_length, length), pair_dtype(encoder_length, length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a mock dataset that has {len(self)}")
        rng = np.random.default_rng([self.seed, i])
        read, written = (int(rng.integers((size + 1) // 2, size + 1)) for size in self.lengths)
        words = self.vocab_size - 1  # all but what begins
        count = (rng.integers(words) + rng.integers(1, 4) * np.arange(read + written)) % words + 1
        sample = np.zeros((), self._dtype)
        sample["text_enc"][:read], sample["enc_mask"][:read] = count[:read], True
        sample["labels"][:written], sample["loss_mask"][:written] = count[read:], 1.0
        sample["text_dec"][0], sample["text_dec"][1:written] = BEGIN, count[read:-1]
        return sample

    def epochs(self) -> dict[str, int]:
        return {}

    def describe(self, i: int) -> str:
        return f"sample {i} of the mock dataset"

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        return not permuted or num_samples == len(self)
