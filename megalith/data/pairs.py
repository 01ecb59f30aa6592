"""Samples of an encoder-decoder: a sequence for the encoder, and a sequence that the decoder is trained to generate.

From documents split into sentences, they are made by span corruption (Raffel et al. 2020), token for token like
Megatron's. Words are chosen as for BERT (masked_lm.py); each span of them is replaced by a sentinel, and the decoder
writes each sentinel followed by the words that it replaces:

    encoder   a a <extra_id_0> a <extra_id_1> a      decoder   [BOS] <extra_id_0> b b <extra_id_1> b → … b [EOS]

A dataset makes records of `pair_dtype`, padded to the run's lengths; `make_t5_batch` collates them. The decoder's
input is its labels shifted by one position, after a start token.
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
WORD_START = "▁"  # in SentencePiece's pieces
NO_TOKEN = -1  # id of a token that the vocabulary lacks
DECODER_START = 0  # first token of T5 decoders (<pad>)


@dataclass
class T5Batch(Batch):
    """A micro-batch of an encoder-decoder. `input_ids`, `labels` and `loss_mask` are the decoder's, [batch, seq]."""

    of_encoder_tokens: ClassVar[Sequence[str]] = ("encoder_input_ids",)

    encoder_input_ids: Tensor  # int64 [batch, encoder seq]
    # bool [batch, encoder seq], False for padding; None: no padding, or given by `encoder_document_ends`
    encoder_padding_mask: Tensor | None
    # int32 [batch, 2], the ends of the real tokens and of the padding; None: no padding
    encoder_document_ends: Tensor | None
    # int64 [encoder seq], index of each token in the full sequence; None: 0, 1, …
    encoder_token_index: Tensor | None = field(default=None, kw_only=True)


def pair_dtype(encoder_length: int, length: int) -> np.dtype:
    """Return the dtype of a record with both sequences and their masks, with Megatron-LM's field names."""
    return np.dtype(
        [
            ("text_enc", np.int64, (encoder_length,)),
            ("enc_mask", bool, (encoder_length,)),  # False for padding
            ("text_dec", np.int64, (length,)),
            ("labels", np.int64, (length,)),
            ("loss_mask", np.float32, (length,)),  # 0 for padding
        ]
    )


def make_t5_batch(samples: np.ndarray, sample_numbers: np.ndarray) -> T5Batch:
    """Collate samples [batch] of a `pair_dtype` at stream positions `sample_numbers`, int64 [batch]."""
    text = {name: torch.from_numpy(np.ascontiguousarray(samples[name])) for name in samples.dtype.names}
    batch, seq = text["text_dec"].shape
    real = text["enc_mask"].sum(1, dtype=torch.int32)
    return T5Batch(
        input_ids=text["text_dec"],
        labels=text["labels"],
        loss_mask=text["loss_mask"],
        position_ids=torch.arange(seq).expand(batch, seq).contiguous(),
        document_ends=None,
        sample_numbers=torch.from_numpy(sample_numbers),
        encoder_input_ids=text["text_enc"],
        encoder_padding_mask=None,
        encoder_document_ends=torch.stack([real, torch.full_like(real, text["text_enc"].shape[1])], 1),
    )


@dataclass(frozen=True)
class SpanTokens:
    """The tokens of a vocabulary that span corruption needs."""

    words: WordPieces
    begin: int
    """First token of the decoder's input."""
    end: int
    """Last token of the decoder's labels."""
    sentinels: Sequence[int]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, extra: int) -> SpanTokens:
        """Read a tokenizer's vocabulary: T5's with <pad>, </s> and <extra_id_0>, …, or word pieces.

        Word pieces are extended by Megatron's [BOS], [EOS] and `extra` sentinels.

        Raises:
            ConfigError: if special tokens are missing.
        """
        pieces = tokenizer.pieces()
        ids = {piece: i for i, piece in enumerate(pieces)}
        if FIRST_SENTINEL not in ids:
            size = tokenizer.model_vocab_size
            words = WordPieces.from_tokenizer(tokenizer, size + extra)
            return cls(words, size - 2, size - 1, range(size, size + extra))
        if missing := [token for token in T5_SPECIAL if token not in ids]:
            raise ConfigError(
                f"data.tokenizer_type {tokenizer.tokenizer_type} has {FIRST_SENTINEL}, but no {', '.join(missing)}; "
                "use T5's own tokenizer, or BERT's vocab.txt with BertWordPieceLowerCase or BertWordPieceCase"
            )
        begins_word = np.array([piece.startswith(WORD_START) or piece in T5_SPECIAL for piece in pieces])
        pad, end = (ids[token] for token in T5_SPECIAL)
        sentinels = (ids.get(f"<extra_id_{number}>") for number in range(len(pieces)))
        words = WordPieces(NO_TOKEN, NO_TOKEN, pad, pad, len(pieces), begins_word)
        return cls(words, pad, end, [*takewhile(lambda number: number is not None, sentinels)])


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
        """Index the samples. `lengths` are the encoder's and the decoder's."""
        self._lengths, self._tokens, self._masking = lengths, tokens, masking
        self._dtype = pair_dtype(*lengths)
        room = lengths[0] - 2  # as in Megatron, which reserves [BOS] and [EOS]
        sizes = (room, num_samples, seed, tokens.words.vocab_size)
        super().__init__(indexed, first_document, last_document, *sizes, masking.short_seq_prob, 1, progress)

    def make(self, sentences: list[list[int]], target: int, rng: np.random.RandomState) -> np.ndarray:
        tokens, special = [*chain(*sentences)][:target], self._tokens
        _, spans = mask_words(tokens, target, special.words, self._masking, rng, lambda token, *_: token)
        encoder_tokens, decoder_tokens, first = [], [], 0
        if len(spans) > len(special.sentinels):
            raise DataError(
                f"a sample has {len(spans)} masked spans, but there are only {len(special.sentinels)} sentinels; raise "
                "data.vocab_extra_ids, or lower data.mask_prob"
            )
        for sentinel, span in zip(special.sentinels, sorted(spans)):
            encoder_tokens += [*tokens[first : span[0]], sentinel]
            decoder_tokens += [sentinel, *(tokens[position] for position in span)]
            first = span[-1] + 1
        return self._record(encoder_tokens + tokens[first:], decoder_tokens)

    def _record(self, encoder_tokens: list[int], decoder_tokens: list[int]) -> np.ndarray:
        special, (encoder_length, length) = self._tokens, self._lengths
        count = len(decoder_tokens) + 1
        if count > length:
            raise DataError(
                f"the decoder's sequence has {count} tokens, but data.decoder_seq_length is {length}; raise "
                "data.decoder_seq_length, or lower data.mask_prob"
            )
        sample = np.zeros((), self._dtype)
        text = np.full(encoder_length, special.words.pad, dtype=np.int64)
        text[: len(encoder_tokens)] = encoder_tokens
        sample["enc_mask"] = text != special.words.pad
        sample["text_enc"] = np.where(sample["enc_mask"], text, 0)
        sample["text_dec"][:count] = [special.begin, *decoder_tokens]
        sample["labels"][:count], sample["loss_mask"][:count] = [*decoder_tokens, special.end], 1
        return sample
