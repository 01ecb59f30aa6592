"""Which sentences a sample of an encoder is made of: Megatron's rule, out of documents that are split into sentences.

Epoch after epoch, in the documents' order, sentences are joined until they have the target length, or to the document's
end. The target is the most that a sample holds, or, once in 1 / short_seq_prob times, a random length. Documents with a
sentence of more than 512 tokens are left out, and those with fewer sentences than a sample needs. At last all samples
are shuffled. The random numbers are those of C++: a 32-bit Mersenne Twister for the lengths, which numpy has too, and a
64-bit one (Nishimura 2000) for the shuffle, which stands here. Megatron walks over the sentences; here a binary search
in the sums of their lengths finds the end of a sample, of the usual target all at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megalith.errors import DataError
from megalith.progress import Progress

LONG_SENTENCE = 512  # tokens
DRAWN = 2**16  # numbers that are drawn at once


def sentence_index(
    documents: np.ndarray,  # int64 [documents + 1]: the first sentence of each, and the end
    lengths: np.ndarray,  # int32 [sentences of the whole dataset]: tokens
    num_samples: int,
    max_length: int,  # tokens of a sample, its special ones left out
    short_seq_prob: float,
    seed: int,
    min_sentences: int,
    what: str,  # the dataset, for the error
    progress: Progress | None = None,  # counts the samples
) -> tuple[np.ndarray, list[int]]:
    """int64 [samples, 3], each with its first sentence, its end and its target length; and how many there are at the
    end of each epoch. The last epoch is whole. DataError where the documents give no sample.
    """
    targets = _targets(max_length, round(1 / short_seq_prob) if short_seq_prob else 0, seed)
    spans = _usable(documents, lengths, min_sentences)
    if not spans:
        raise DataError(
            f"{what} has no document of at least {min_sentences} sentences of up to {LONG_SENTENCE} tokens, which a "
            "sample is made of; preprocess the text with --split-sentences, or give "
            "this split more of its documents"
        )
    sums = np.concatenate([[0], np.cumsum(lengths[documents[0] : documents[-1]], dtype=np.int64)])
    full = np.searchsorted(sums, sums[:-1] + max_length)  # where a sample of the usual target would end
    found: list[tuple[int, int, int]] = []
    epochs: list[int] = []
    while len(found) < num_samples:
        for start, end in spans:
            target, before = next(targets), len(found)
            while start < end:
                usual = target == max_length
                stop = int(full[start] if usual else np.searchsorted(sums, sums[start] + target))
                stop = max(stop, start + min_sentences)
                stop = stop if stop <= end - 2 else end  # no sentence is left alone
                found.append((start, stop, target))
                start, target = stop, next(targets)  # one is drawn behind the last sample too
            if progress is not None:
                progress.add(len(found) - before)
        epochs.append(len(found))
    index = np.array(found, dtype=np.int64)
    index[:, :2] += documents[0]
    return index[_shuffled(len(index), seed + 1)], epochs


def _usable(documents: np.ndarray, lengths: np.ndarray, min_sentences: int) -> list[tuple[int, int]]:
    """The documents that samples are made of: the first sentence of each and its end, counted from the first of all."""
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
        numbers = rng.randint(0, 2**32, DRAWN, dtype=np.uint32).astype(np.int64)
        yield from np.where(numbers % short_ratio == 0, 2 + numbers % (max_length - 1), max_length).tolist()


def _shuffled(count: int, seed: int) -> np.ndarray:
    """The order after std::mt19937_64 has shuffled `count` samples from the last one down: int64 [count]."""
    order = list(range(count))
    places = np.arange(count - 1, 0, -1)
    drawn = mersenne_twister_64(seed, len(places)) % (places + 1).astype(np.uint64)
    for i, j in zip(places.tolist(), drawn.tolist()):
        order[i], order[j] = order[j], order[i]
    return np.array(order, dtype=np.int64)


WORDS, MIDDLE = 312, 156
UPPER, LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
MATRIX = np.uint64(0xB5026F5AA96619E9)


def mersenne_twister_64(seed: int, count: int) -> np.ndarray:
    """The first numbers of std::mt19937_64 after this seed: uint64 [count]."""
    words = [seed % 2**64]
    for i in range(1, WORDS):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
    state, blocks = np.array(words, dtype=np.uint64), []
    for _ in range(-(-count // WORDS)):
        _twist(state)
        blocks.append(_tempered(state))
    return np.concatenate([np.empty(0, dtype=np.uint64), *blocks])[:count]


def _twist(state: np.ndarray) -> None:
    """The next block of 312 words, in place. Each needs the one behind it and the one half a block further."""
    for part in (slice(0, MIDDLE), slice(MIDDLE, WORDS - 1), slice(WORDS - 1, WORDS)):
        at = np.arange(part.start, part.stop)
        mixed = (state[at] & UPPER) | (state[(at + 1) % WORDS] & LOWER)
        odd = np.where(mixed & np.uint64(1), MATRIX, np.uint64(0))
        state[at] = state[(at + MIDDLE) % WORDS] ^ (mixed >> np.uint64(1)) ^ odd


def _tempered(x: np.ndarray) -> np.ndarray:
    x = x ^ ((x >> np.uint64(29)) & np.uint64(0x5555555555555555))
    x = x ^ ((x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000))
    x = x ^ ((x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000))
    return x ^ (x >> np.uint64(43))
