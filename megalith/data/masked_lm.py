"""BERT's samples: two segments of sentences with some words masked, token for token those of Megatron.

    [CLS] a a a [SEP] b b [SEP] [PAD] …      tokentypes 0 0 0 0 0 1 1 1 0 …

A sample's sentences are cut at a random place into two segments, which are swapped half of the time: the order that the
binary head is asked for. What is too long is cut off at either end of the longer segment. Then 15 % of the tokens are
chosen, whole words and up to three of them in a row, and become [MASK] (80 %), a random token (10 %) or stay (10 %).
All of sample i is drawn from the seed + i.

Made-up samples of the same form, for a first run or a speed test without data files.
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

GEOMETRIC = 0.2  # that a run of words ends behind each (Joshi et al. 2020)
SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")


@dataclass
class BertBatch(Batch):
    """Samples of one or two segments. What fills them up is a document of its own (`document_ends`)."""

    tokentype_ids: Tensor  # int64 [batch, seq]: each token's segment
    sentence_order: Tensor  # int64 [batch]: 1 where the segments were swapped, else 0
    order_weights: Tensor | None = (
        None  # float32 [batch], of each sample's loss of the order: the loss gives them
    )

    of_tokens = (*Batch.of_tokens, "tokentype_ids")


@dataclass(frozen=True)
class WordPieces:
    """What masking needs to know of a vocabulary."""

    cls: int
    sep: int
    mask: int
    pad: int
    vocab_size: int
    """Random tokens are drawn from so many."""
    begins: np.ndarray
    """bool [vocab_size]: whether a piece begins a word."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> WordPieces:
        """Of a tokenizer; entries beyond its own begin words. ConfigError where it has no such special tokens."""
        pieces = tokenizer.pieces()
        ids = {piece: i for i, piece in enumerate(pieces)}
        if lost := [token for token in SPECIAL if token not in ids]:
            raise ConfigError(
                f"data.tokenizer_type {tokenizer.tokenizer_type} has no {', '.join(lost)}, which samples of masked "
                "words are made with; take BERT's vocab.txt by BertWordPieceLowerCase or BertWordPieceCase"
            )
        begins = np.ones(vocab_size, dtype=bool)
        begins[: len(pieces)] = [not piece.startswith("##") for piece in pieces]
        return cls(*(ids[token] for token in SPECIAL), vocab_size, begins)


class Masking(NamedTuple):
    """How samples are made, by Megatron's names."""

    mask_prob: float = 0.15
    short_seq_prob: float = 0.1
    masking_max_ngram: int = 3
    masking_do_full_word: bool = True
    masking_use_geometric_distribution: bool = False
    classification_head: bool = True


def sample_dtype(seq_length: int) -> np.dtype:
    """A sample: `labels` are -1 where no token was chosen, `padding_mask` is 1 for what is no filling."""
    row = (np.int64, (seq_length,))
    names = ("text", "types", "labels", "padding_mask", "loss_mask")
    return np.dtype([*((name, *row) for name in names), ("is_random", np.int64), ("truncated", np.int64)])


class SentenceSamples(ABC):
    """Samples of documents `[first_document, last_document)` of an indexed dataset of sentences, at least
    `num_samples` of them; sample i is made of `room` tokens at most, with what is drawn from the seed + i."""

    def __init__(
        self,
        indexed: IndexedDataset,
        first_document: int,
        last_document: int,
        room: int,
        num_samples: int,
        seed: int,
        vocab_size: int,
        short_seq_prob: float,
        least_sentences: int,
        progress: Progress | None = None,
    ) -> None:
        self.indexed, self.seed, self._vocab_size = indexed, seed, vocab_size
        self._index, self._epochs = sentence_index(
            indexed.document_indices[first_document : last_document + 1],
            indexed.sequence_lengths,
            num_samples,
            room,
            short_seq_prob,
            seed,
            least_sentences,
            f"{indexed.prefix}, documents [{first_document}, {last_document}),",
            progress,
        )

    @abstractmethod
    def make(self, sentences: list[list[int]], target: int, rng: np.random.RandomState) -> np.ndarray:
        """A sample of these sentences, of `target` tokens at most: an array without dimensions."""

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.indexed.prefix}, which has {len(self)}")
        first, end, target = self._index[i].tolist()
        sentences = [self.indexed.get(sentence).tolist() for sentence in range(first, end)]
        tokens = [*chain(*sentences)]
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            at = next(at for at, token in enumerate(tokens) if not 0 <= token < self._vocab_size)
            raise DataError(
                f"{self.describe(i)} has token id {tokens[at]} at position {at}, but the vocabulary has "
                f"{self._vocab_size}; preprocess the data with this run's tokenizer, or raise vocab_size"
            )
        return self.make(sentences, target, np.random.RandomState((self.seed + i) % 2**32))

    def describe(self, i: int) -> str:
        return f"sample {i} of {self.indexed.prefix}"

    def epochs(self) -> dict[str, int]:
        """How often the samples go over the documents, by the data's prefix."""
        return {self.indexed.prefix: len(self._epochs)}

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        # All samples are shuffled together: another number of epochs is another order.
        before_last = [0, *self._epochs][-2]
        return before_last < num_samples <= len(self)


class MaskedLMDataset(SentenceSamples):
    """BERT's samples. Sample i is of `sample_dtype`."""

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
        self.seq_length, self._words, self._masking = seq_length, words, masking
        least = 2 if masking.classification_head else 1
        sizes = (seq_length - SPECIAL_COUNT, num_samples, seed, words.vocab_size)
        super().__init__(
            indexed, first_document, last_document, *sizes, masking.short_seq_prob, least, progress
        )

    def make(self, sentences: list[list[int]], target: int, rng: np.random.RandomState) -> np.ndarray:
        return make_sample(sentences, target, self.seq_length, self._words, self._masking, rng)


class MockMaskedDataset:
    """Samples that depend on (seed, i) and on the sizes alone: sentences count upwards from a random token, so that a
    model can learn them, and fill half of a sample to all of it."""

    def __init__(
        self, vocab_size: int, seq_length: int, num_samples: int, seed: int, masking: Masking
    ) -> None:
        if vocab_size <= len(SPECIAL):
            raise ConfigError(
                f"model.vocab_size {vocab_size} has nothing but {', '.join(SPECIAL)} in made-up samples; raise it"
            )
        begins = np.ones(vocab_size, dtype=bool)
        self._words = WordPieces(*range(len(SPECIAL)), vocab_size, begins)
        self.seq_length, self.num_samples, self.seed, self._masking = seq_length, num_samples, seed, masking

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a mock dataset that has {len(self)}")
        rng = np.random.RandomState([self.seed, i])
        room, words = self.seq_length - SPECIAL_COUNT, self._words.vocab_size - len(SPECIAL)
        length = rng.randint(max(2, room // 2), room + 1)
        cut = rng.randint(1, length)
        sentences = [
            (len(SPECIAL) + (rng.randint(words) + rng.randint(1, 4) * np.arange(count)) % words).tolist()
            for count in (cut, length - cut)
        ]
        return make_sample(sentences, room, self.seq_length, self._words, self._masking, rng)

    def epochs(self) -> dict[str, int]:
        return {}

    def describe(self, i: int) -> str:
        return f"sample {i} of the mock dataset"

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        return not permuted or num_samples == len(self)


def make_sample(
    sentences: Sequence[list[int]],
    target: int,
    seq_length: int,
    words: WordPieces,
    masking: Masking,
    rng: np.random.RandomState,
) -> np.ndarray:
    """A sample of these sentences, cut to `target` tokens: an array without dimensions, of `sample_dtype`."""
    pivot, swapped = len(sentences), False
    if masking.classification_head:
        pivot = rng.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        swapped = rng.random_sample() < 0.5
    segments = [[*chain(*part)] for part in (sentences[:pivot], sentences[pivot:])]
    if swapped:
        segments.reverse()
    truncated = _cut_off(segments, target, rng)
    tokens, types = [words.cls, *segments[0], words.sep], [0] * (len(segments[0]) + 2)
    if segments[1]:
        tokens += [*segments[1], words.sep]
        types += [1] * (len(segments[1]) + 1)
    masked, runs = mask_words(tokens, target, words, masking, rng)
    chosen = sorted(chain(*runs))
    sample, count = np.zeros((), dtype=sample_dtype(seq_length)), len(tokens)
    text = np.full(seq_length, words.pad, dtype=np.int64)
    text[:count] = masked
    sample["padding_mask"] = text != words.pad
    sample["text"] = np.where(text == words.pad, 0, text)
    sample["types"][:count] = types
    sample["labels"] = -1
    sample["labels"][chosen] = [tokens[place] for place in chosen]
    sample["loss_mask"][chosen] = 1
    sample["is_random"], sample["truncated"] = swapped, truncated
    return sample


def _cut_off(segments: list[list[int]], target: int, rng: np.random.RandomState) -> bool:
    """Takes tokens from either end of the longer segment, in place, until both have `target`; whether any were."""
    lengths = [len(segment) for segment in segments]
    too_many = max(0, sum(lengths) - target)
    starts = [0, 0]
    for from_start in rng.random_sample(too_many) < 0.5:
        longer = 0 if lengths[0] > lengths[1] else 1
        lengths[longer] -= 1
        starts[longer] += from_start
    segments[:] = [
        segment[start : start + length] for segment, start, length in zip(segments, starts, lengths)
    ]
    return too_many > 0


def replacement(token: int, words: WordPieces, rng: np.random.RandomState) -> int:
    """[MASK], in a fifth of all cases the token itself or a random one."""
    if rng.random_sample() < 0.8:
        return words.mask
    return token if rng.random_sample() < 0.5 else rng.randint(0, words.vocab_size)


def mask_words(
    tokens: list[int],
    target: int,
    words: WordPieces,
    masking: Masking,
    rng: np.random.RandomState,
    replaced_by: Callable[[int, WordPieces, np.random.RandomState], int] = replacement,
) -> tuple[list[int], list[list[int]]]:
    """The tokens with some of them masked, and the places of those that were chosen, run by run.

    Words are tried in random order, each with up to max_ngram - 1 that follow it: a run that would be too many is made
    shorter, one with a word that is chosen already is left out.
    """
    places, bounds = _words(tokens, words, masking.masking_do_full_word)
    most = min(masking.mask_prob * target, max(1, round(len(tokens) * masking.mask_prob)))
    cumulative = _cumulative_shares(masking.masking_max_ngram)
    order = np.arange(len(bounds) - 1)
    rng.shuffle(order)
    masked, chosen, runs = list(tokens), set(), []
    for first in order.tolist():
        if len(chosen) >= most:
            break
        if masking.masking_use_geometric_distribution:
            count = min(rng.geometric(GEOMETRIC), masking.masking_max_ngram)
        else:
            count = bisect_right(cumulative, rng.random_sample()) + 1
        run = _that_fits(bounds[first : first + count + 1], most - len(chosen))
        if not chosen.isdisjoint(places[run]):
            continue
        runs.append(places[run])
        for place in places[run]:
            chosen.add(place)
            masked[place] = replaced_by(tokens[place], words, rng)
    return masked, [run for run in runs if run]


def _words(tokens: list[int], words: WordPieces, whole_words: bool) -> tuple[list[int], list[int]]:
    """The places of all tokens but [CLS] and [SEP]; and where in them each word begins, or each piece, and the end."""
    ids = np.array(tokens)
    places = np.flatnonzero((ids != words.cls) & (ids != words.sep))
    begins = words.begins[ids[places]] if whole_words else np.ones(len(places), dtype=bool)
    begins[:1] = True
    return places.tolist(), [*np.flatnonzero(begins).tolist(), len(places)]


@cache
def _cumulative_shares(longest: int) -> list[float]:
    """Of runs of 1, 2, … words: 1 / n in proportion. Divided as often as Megatron and numpy do, for the last bit."""
    shares = 1.0 / np.arange(1, longest + 1)
    shares = shares / shares.sum(keepdims=True)
    cumulative = (shares / shares.sum(keepdims=True)).cumsum()
    return (cumulative / cumulative[-1]).tolist()


def _that_fits(bounds: list[int], room: float) -> slice:
    """Of the words between these bounds the longest run from the first on with no more than `room` tokens."""
    return slice(bounds[0], next(end for end in reversed(bounds) if end - bounds[0] <= room))


def make_bert_batch(samples: np.ndarray, numbers: np.ndarray) -> BertBatch:
    """A batch of samples [batch] of `sample_dtype`, and their places in the stream, int64 [batch]."""
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
        sample_numbers=torch.from_numpy(numbers),
        tokentype_ids=torch.from_numpy(np.ascontiguousarray(samples["types"])),
        sentence_order=torch.from_numpy(np.ascontiguousarray(samples["is_random"])),
    )
