"""BERT's samples: two segments of sentences with masked words, identical to Megatron's token for token.

    [CLS] a a a [SEP] b b [SEP] [PAD] …      tokentypes 0 0 0 0 0 1 1 1 0 …

A sample's sentences are divided at a random point into two segments, which are swapped half of the time; the binary
head predicts whether they were swapped. Excess tokens are removed from either end of the longer segment. Then 15 % of
the tokens are chosen, in spans of one to three whole words, and replaced by [MASK] (80 %), a random token (10 %) or
kept (10 %). All random numbers of sample i come from seed + i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.config.data import SPECIAL_COUNT
from megalith.data.batch import Batch
from megalith.data.indexed import IndexedDataset
from megalith.data.sentence_index import sentence_index
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.progress import Progress
from megalith.tables import counted

GEOMETRIC = 0.2  # probability that a span ends after each word (Joshi et al. 2020)
SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")


@dataclass
class BertBatch(Batch):
    """Samples of one or two segments. Padding counts as a separate document (`document_ends`)."""

    tokentype_ids: Tensor  # int64 [batch, seq], segment of each token
    sentence_order: Tensor  # int64 [batch], 1 if the segments were swapped, else 0
    # float32 [batch], weights of the sentence-order loss, set by the loss
    order_weights: Tensor | None = None

    of_tokens = (*Batch.of_tokens, "tokentype_ids")


@dataclass(frozen=True)
class WordPieces:
    """The properties of a vocabulary that masking needs."""

    cls: int
    sep: int
    mask: int
    pad: int
    vocab_size: int
    """Upper bound of random tokens."""
    begins_word: np.ndarray
    """bool [vocab_size], True for pieces that begin a word."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int) -> WordPieces:
        """Read a tokenizer's vocabulary. Ids beyond it, up to `vocab_size`, count as words. Raise ConfigError if
        special tokens are missing."""
        pieces = tokenizer.pieces()
        ids = {piece: i for i, piece in enumerate(pieces)}
        if missing := [token for token in SPECIAL if token not in ids]:
            raise ConfigError(
                f"data.tokenizer_type {tokenizer.tokenizer_type} has no {', '.join(missing)}, which masked-word "
                "samples need; use BERT's vocab.txt with BertWordPieceLowerCase or BertWordPieceCase"
            )
        begins_word = np.ones(vocab_size, dtype=bool)
        begins_word[: len(pieces)] = [not piece.startswith("##") for piece in pieces]
        return cls(*(ids[token] for token in SPECIAL), vocab_size, begins_word)


class Masking(NamedTuple):
    """Settings of sample construction, with Megatron's names."""

    mask_prob: float = 0.15
    short_seq_prob: float = 0.1
    masking_max_ngram: int = 3
    masking_do_full_word: bool = True
    masking_use_geometric_distribution: bool = False
    classification_head: bool = True


def sample_dtype(seq_length: int) -> np.dtype:
    """Return the dtype of a sample. `labels` is -1 where no token was chosen; `padding_mask` is 1 for real tokens."""
    row = (np.int64, (seq_length,))
    names = ("text", "types", "labels", "padding_mask", "loss_mask")
    return np.dtype([*((name, *row) for name in names), ("is_random", np.int64), ("truncated", np.int64)])


class SentenceSamples(ABC):
    """Samples from documents `[first_document, last_document)` of an indexed dataset of sentences.

    There are at least `num_samples`. Sample i has at most `max_tokens` tokens and uses random numbers from seed + i.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        first_document: int,
        last_document: int,
        max_tokens: int,
        num_samples: int,
        seed: int,
        vocab_size: int,
        short_seq_prob: float,
        min_sentences: int,
        progress: Progress | None = None,
    ) -> None:
        self.indexed, self.seed, self._vocab_size = indexed, seed, vocab_size
        self._document_range = first_document, last_document
        self._index, self._epochs = sentence_index(
            indexed.document_indices[first_document : last_document + 1],
            indexed.sequence_lengths,
            num_samples,
            max_tokens,
            short_seq_prob,
            seed,
            min_sentences,
            f"{indexed.prefix}, documents [{first_document}, {last_document}),",
            progress,
        )

    @abstractmethod
    def make(self, sentences: list[list[int]], target: int, rng: np.random.RandomState) -> np.ndarray:
        """Return a sample of these sentences with at most `target` tokens, as a 0-d array."""

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(
                f"sample {i} is out of range of {self.indexed.prefix}, which has {counted(len(self), 'sample')}"
            )
        first, end, target = self._index[i].tolist()
        sentences = [self.indexed.get(sentence).tolist() for sentence in range(first, end)]
        tokens = [*chain(*sentences)]
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            at = next(at for at, token in enumerate(tokens) if not 0 <= token < self._vocab_size)
            raise DataError(
                f"{self.describe(i)} has token id {tokens[at]} at position {at}, but the vocabulary has "
                f"{self._vocab_size} entries; preprocess the data with this run's tokenizer, or raise vocab_size"
            )
        return self.make(sentences, target, np.random.RandomState((self.seed + i) % 2**32))

    def describe(self, i: int) -> str:
        return f"sample {i} of {self.indexed.prefix}"

    def epochs(self) -> dict[str, int]:
        return {self.indexed.prefix: len(self._epochs)}

    @property
    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, int64."""
        return self.indexed.document_lengths(*self._document_range)

    @property
    def samples_per_epoch(self) -> float:
        """Mean number of samples per epoch."""
        return len(self) / len(self._epochs)

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        # All samples are shuffled together, so another number of epochs changes the order.
        before_last = [0, *self._epochs][-2]
        return before_last < num_samples <= len(self)


class MaskedLMDataset(SentenceSamples):
    """BERT's samples. Sample i has the dtype `sample_dtype`."""

    def __init__(
        self,
        indexed: IndexedDataset,
        first_document: int,
        last_document: int,
        seq_length: int,
        num_samples: int,
        seed: int,
        words: WordPieces,
        masking: Masking,
        progress: Progress | None = None,
    ) -> None:
        self.seq_length, self._word_bounds, self._masking = seq_length, words, masking
        min_sentences = 2 if masking.classification_head else 1
        sizes = (seq_length - SPECIAL_COUNT, num_samples, seed, words.vocab_size)
        super().__init__(
            indexed, first_document, last_document, *sizes, masking.short_seq_prob, min_sentences, progress
        )

    def make(self, sentences: list[list[int]], target: int, rng: np.random.RandomState) -> np.ndarray:
        return make_sample(sentences, target, self.seq_length, self._word_bounds, self._masking, rng)


def make_sample(
    sentences: Sequence[list[int]],
    target: int,
    seq_length: int,
    words: WordPieces,
    masking: Masking,
    rng: np.random.RandomState,
) -> np.ndarray:
    """Return a sample of these sentences, truncated to `target` tokens, as a 0-d array of `sample_dtype`."""
    pivot, swapped = len(sentences), False
    if masking.classification_head:
        pivot = rng.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        swapped = rng.random_sample() < 0.5
    segments = [[*chain(*part)] for part in (sentences[:pivot], sentences[pivot:])]
    if swapped:
        segments.reverse()
    truncated = _truncate(segments, target, rng)
    tokens, types = [words.cls, *segments[0], words.sep], [0] * (len(segments[0]) + 2)
    if segments[1]:
        tokens += [*segments[1], words.sep]
        types += [1] * (len(segments[1]) + 1)
    masked, spans = mask_words(tokens, target, words, masking, rng)
    chosen = sorted(chain(*spans))
    sample, count = np.zeros((), dtype=sample_dtype(seq_length)), len(tokens)
    text = np.full(seq_length, words.pad, dtype=np.int64)
    text[:count] = masked
    sample["padding_mask"] = text != words.pad
    sample["text"] = np.where(text == words.pad, 0, text)
    sample["types"][:count] = types
    sample["labels"] = -1
    sample["labels"][chosen] = [tokens[position] for position in chosen]
    sample["loss_mask"][chosen] = 1
    sample["is_random"], sample["truncated"] = swapped, truncated
    return sample


def _truncate(segments: list[list[int]], target: int, rng: np.random.RandomState) -> bool:
    """Remove tokens from either end of the longer segment, in place, until both have `target` tokens together.

    Returns True if any were removed.
    """
    lengths = [len(segment) for segment in segments]
    excess = max(0, sum(lengths) - target)
    starts = [0, 0]
    for from_start in rng.random_sample(excess) < 0.5:
        longer = 0 if lengths[0] > lengths[1] else 1
        lengths[longer] -= 1
        starts[longer] += from_start
    segments[:] = [
        segment[start : start + length] for segment, start, length in zip(segments, starts, lengths)
    ]
    return excess > 0


def replacement(token: int, words: WordPieces, rng: np.random.RandomState) -> int:
    """Return [MASK] (80 %), a random token (10 %) or the token itself (10 %)."""
    if rng.random_sample() < 0.8:
        return words.mask
    return token if rng.random_sample() < 0.5 else rng.randint(0, words.vocab_size)


def mask_words(
    tokens: list[int],
    target: int,
    words: WordPieces,
    masking: Masking,
    rng: np.random.RandomState,
    replace: Callable[[int, WordPieces, np.random.RandomState], int] = replacement,
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens with some of them masked, and the positions of the chosen ones, span by span.

    Words are tried in random order, each as the start of a span of up to max_ngram words. A span with too many tokens
    is shortened; a span that overlaps a chosen one is skipped.
    """
    positions, bounds = _word_bounds(tokens, words, masking.masking_do_full_word)
    max_tokens = min(masking.mask_prob * target, max(1, round(len(tokens) * masking.mask_prob)))
    cumulative = _cumulative_span_probabilities(masking.masking_max_ngram)
    order = np.arange(len(bounds) - 1)
    rng.shuffle(order)
    masked, chosen, spans = list(tokens), set(), []
    for first in order.tolist():
        if len(chosen) >= max_tokens:
            break
        if masking.masking_use_geometric_distribution:
            count = min(rng.geometric(GEOMETRIC), masking.masking_max_ngram)
        else:
            count = bisect_right(cumulative, rng.random_sample()) + 1
        span = _longest_fit(bounds[first : first + count + 1], max_tokens - len(chosen))
        if not chosen.isdisjoint(positions[span]):
            continue
        spans.append(positions[span])
        for position in positions[span]:
            chosen.add(position)
            masked[position] = replace(tokens[position], words, rng)
    return masked, [span for span in spans if span]


def _word_bounds(tokens: list[int], words: WordPieces, whole_words: bool) -> tuple[list[int], list[int]]:
    """Return the positions of all tokens except [CLS] and [SEP], and the word boundaries among them.

    The bounds are the indices into these positions at which words (or pieces) start, followed by the number of
    positions.
    """
    ids = np.array(tokens)
    positions = np.flatnonzero((ids != words.cls) & (ids != words.sep))
    starts = words.begins_word[ids[positions]] if whole_words else np.ones(len(positions), dtype=bool)
    starts[:1] = True
    return positions.tolist(), [*np.flatnonzero(starts).tolist(), len(positions)]


@cache
def _cumulative_span_probabilities(max_words: int) -> list[float]:
    """Return the cumulative probabilities of spans of 1, 2, … words, proportional to 1 / n.

    They are normalized three times, as Megatron and numpy do between them, so that the results are bitwise equal.
    """
    probabilities = 1.0 / np.arange(1, max_words + 1)
    probabilities = probabilities / probabilities.sum(keepdims=True)
    cumulative = (probabilities / probabilities.sum(keepdims=True)).cumsum()
    return (cumulative / cumulative[-1]).tolist()


def _longest_fit(bounds: list[int], room: float) -> slice:
    """Return the positions of the longest run of whole words that starts at the first bound and has at most `room`
    tokens.
    """
    return slice(bounds[0], next(end for end in reversed(bounds) if end - bounds[0] <= room))


def make_bert_batch(samples: np.ndarray, sample_numbers: np.ndarray) -> BertBatch:
    """Collate samples [batch] of `sample_dtype` at stream positions `sample_numbers`, int64 [batch]."""
    text = torch.from_numpy(np.ascontiguousarray(samples["text"]))
    batch, seq = text.shape
    real = samples["padding_mask"] * np.arange(1, seq + 1)
    ends = np.stack([real.max(1), np.full(batch, seq)], axis=1)
    return BertBatch(
        input_ids=text,
        labels=torch.from_numpy(samples["labels"].clip(min=0)),
        loss_mask=torch.from_numpy(samples["loss_mask"].astype(np.float32)),
        position_ids=torch.arange(seq).expand(batch, seq).contiguous(),
        document_ends=torch.from_numpy(ends.astype(np.int32)),
        sample_numbers=torch.from_numpy(sample_numbers),
        tokentype_ids=torch.from_numpy(np.ascontiguousarray(samples["types"])),
        sentence_order=torch.from_numpy(np.ascontiguousarray(samples["is_random"])),
    )
