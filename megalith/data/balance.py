"""Assignment of the samples of a global batch to data-parallel ranks that minimizes the work of the slowest rank.

Attention within documents takes time quadratic in their lengths, so rows of equal length can differ in cost.
Balancing keeps the samples of a step and changes only their rank and micro-batch. Samples are sorted by cost and cut
into blocks, one for each micro-batch of the step, so that all ranks have similar work in a micro-batch. Within a
block, each sample goes to the rank with the least work so far (longest processing time first, Graham 1969).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

BatchCosts = Callable[[range], np.ndarray]
"""Costs of the samples at consecutive positions in the stream, in any unit."""


def assign(costs: np.ndarray, micro_batch_size: int, ranks: int) -> np.ndarray:
    """Assign the samples of a global batch: int64 sample indices [micro_batches, ranks, micro_batch_size].

    Args:
        costs: cost of each sample of the global batch, float [samples]; their number is a multiple of
            `micro_batch_size` × `ranks`.
        micro_batch_size: samples per micro-batch.
        ranks: number of data-parallel ranks.
    """
    blocks = np.argsort(-costs, kind="stable").reshape(-1, ranks * micro_batch_size)
    chosen = np.empty((len(blocks), ranks, micro_batch_size), dtype=np.int64)
    totals = np.zeros(ranks)
    for number, block in enumerate(blocks):
        filled = np.zeros(ranks, dtype=np.int64)
        for sample in block:
            rank = int(np.argmin(np.where(filled < micro_batch_size, totals, np.inf)))
            chosen[number, rank, filled[rank]] = sample
            filled[rank] += 1
            totals[rank] += costs[sample]
    return np.sort(chosen, axis=2)


def in_order(samples: int, micro_batch_size: int, ranks: int) -> np.ndarray:
    """Return the unbalanced assignment, in stream order, in the format of `assign`."""
    return np.arange(samples).reshape(-1, ranks, micro_batch_size)


def slowest(costs: np.ndarray, assignment: np.ndarray) -> float:
    """Return the work of the slowest rank in a step divided by the mean over ranks."""
    totals = costs[assignment].sum(axis=(0, 2))
    return float(totals.max() / totals.mean())


def balanced_positions(
    batches: Iterator[range], costs: BatchCosts, micro_batch_size: int, rank: int, ranks: int
) -> Iterator[Sequence[int]]:
    """Yield the stream positions of each micro-batch of a rank.

    Args:
        batches: stream positions of each global batch.
        costs: function that returns the costs of samples by stream position.
        micro_batch_size: samples per micro-batch.
        rank: the data-parallel rank.
        ranks: number of data-parallel ranks.
    """
    for batch in batches:
        for samples in assign(costs(batch), micro_batch_size, ranks)[:, rank]:
            yield [batch[sample] for sample in samples.tolist()]
