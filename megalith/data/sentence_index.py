"""The sentences of each BERT or T5 sample, by Megatron's rule for documents that are split into sentences.

In each epoch, in document order, sentences are joined until they reach the target length or the document's end. The
target is the maximum length or, with probability short_seq_prob, a random length. Documents with a sentence of more
than 512 tokens, or with too few sentences, are skipped. Finally all samples are shuffled. The random numbers are the
same as in C++: a 32-bit Mersenne Twister for the lengths, which numpy has, and a 64-bit one (Nishimura 2000) for the
shuffle, implemented here. Megatron walks over the sentences; here a binary search in their cumulative lengths finds
the end of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megalith.errors import DataError
from megalith.progress import Progress

LONG_SENTENCE = 512  # tokens
DRAWN = 2**16  # random numbers drawn at once


def sentence_index(
    documents: np.ndarray,
    lengths: np.ndarray,
    num_samples: int,
    max_length: int,
    short_seq_prob: float,
    seed: int,
    min_sentences: int,
    name: str,
    progress: Progress | None = None,
) -> tuple[np.ndarray, list[int]]:
    """Return the sentences of each sample.

    Args:
        documents: int64 [documents + 1], the first sentence of each document, and the end.
        lengths: int32 [sentences of the dataset], tokens per sentence.
        num_samples: minimum number of samples.
        max_length: tokens of a sample without special tokens.
        short_seq_prob: probability of a random target length.
        seed: seed of lengths and shuffle.
        min_sentences: sentences that a sample needs.
        name: name of the dataset for the error.
        progress: counts the samples.

    Returns:
        The first sentence, end and target length of each sample, int64 [samples, 3], and the number of samples up to
        the end of each epoch. The last epoch is complete.

    Raises:
        DataError: if the documents have no sample.
    """
    targets = _targets(max_length, round(1 / short_seq_prob) if short_seq_prob else 0, seed)
    spans = _usable(documents, lengths, min_sentences)
    if not spans:
        raise DataError(
            f"{name} has no document with the {min_sentences} sentences of up to {LONG_SENTENCE} tokens that a "
            "sample needs; preprocess the text with --split-sentences, or give this split more documents"
        )
    sums = np.concatenate([[0], np.cumsum(lengths[documents[0] : documents[-1]], dtype=np.int64)])
    full_ends = np.searchsorted(sums, sums[:-1] + max_length)  # end of a sample of the maximum length
    samples: list[tuple[int, int, int]] = []
    epochs: list[int] = []
    while len(samples) < num_samples:
        for start, end in spans:
            target, previous = next(targets), len(samples)
            while start < end:
                is_full = target == max_length
                stop = int(full_ends[start] if is_full else np.searchsorted(sums, sums[start] + target))
                stop = max(stop, start + min_sentences)
                stop = stop if stop <= end - 2 else end  # do not leave a single sentence
                samples.append((start, stop, target))
                start, target = stop, next(targets)  # one is drawn after the last sample too
            if progress is not None:
                progress.add(len(samples) - previous)
        epochs.append(len(samples))
    index = np.array(samples, dtype=np.int64)
    index[:, :2] += documents[0]
    return index[_shuffled(len(index), seed + 1)], epochs


def _usable(documents: np.ndarray, lengths: np.ndarray, min_sentences: int) -> list[tuple[int, int]]:
    """Return the usable documents as (first sentence, end), counted from the first sentence of the first document."""
    first, ends = documents[:-1], documents[1:]
    counts = ends - first
    too_long = np.concatenate([[0], np.cumsum(lengths[documents[0] : documents[-1]] > LONG_SENTENCE)])
    has_long = too_long[ends - documents[0]] > too_long[first - documents[0]]
    usable = (counts >= min_sentences) & ((counts == 1) | ~has_long)
    return list(zip((first - documents[0])[usable].tolist(), (ends - documents[0])[usable].tolist()))


def _targets(max_length: int, short_ratio: int, seed: int) -> Iterator[int]:
    rng = np.random.RandomState(seed)
    while True:
        if not short_ratio:
            yield max_length
            continue
        drawn = rng.randint(0, 2**32, DRAWN, dtype=np.uint32).astype(np.int64)
        yield from np.where(drawn % short_ratio == 0, 2 + drawn % (max_length - 1), max_length).tolist()


def _shuffled(count: int, seed: int) -> np.ndarray:
    """Return the order after std::mt19937_64 has shuffled `count` samples from the last one down, int64 [count]."""
    order = list(range(count))
    indices = np.arange(count - 1, 0, -1)
    drawn = mersenne_twister_64(seed, len(indices)) % (indices + 1).astype(np.uint64)
    for i, j in zip(indices.tolist(), drawn.tolist()):
        order[i], order[j] = order[j], order[i]
    return np.array(order, dtype=np.int64)


WORDS, MIDDLE = 312, 156
UPPER, LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
MATRIX = np.uint64(0xB5026F5AA96619E9)


def mersenne_twister_64(seed: int, count: int) -> np.ndarray:
    """Return the first `count` numbers of std::mt19937_64 with this seed, uint64 [count]."""
    words = [seed % 2**64]
    for i in range(1, WORDS):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
    state, blocks = np.array(words, dtype=np.uint64), []
    for _ in range(-(-count // WORDS)):
        _twist(state)
        blocks.append(_temper(state))
    return np.concatenate([np.empty(0, dtype=np.uint64), *blocks])[:count]


def _twist(state: np.ndarray) -> None:
    """Compute the next block of 312 words in place. Each word depends on the next word and on the word half a block
    later.
    """
    for part in (slice(0, MIDDLE), slice(MIDDLE, WORDS - 1), slice(WORDS - 1, WORDS)):
        at = np.arange(part.start, part.stop)
        mixed = (state[at] & UPPER) | (state[(at + 1) % WORDS] & LOWER)
        odd = np.where(mixed & np.uint64(1), MATRIX, np.uint64(0))
        state[at] = state[(at + MIDDLE) % WORDS] ^ (mixed >> np.uint64(1)) ^ odd


def _temper(x: np.ndarray) -> np.ndarray:
    x = x ^ ((x >> np.uint64(29)) & np.uint64(0x5555555555555555))
    x = x ^ ((x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000))
    x = x ^ ((x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000))
    return x ^ (x >> np.uint64(43))
