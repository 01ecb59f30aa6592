"""Assignment of the samples of a global batch to data-parallel ranks, so that the slowest rank has the least work.

Attention within documents takes time quadratic in their lengths, so full rows differ in their work. The samples of a
step stay the same; the rank and the micro-batch of each change. Samples are sorted by cost and divided into the blocks
of the step's micro-batches, so that the ranks of each have similar work; within a block, each sample goes to the rank
that has the least work so far (longest processing time first, Graham 1969).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

BatchCosts = Callable[[range], np.ndarray]
"""Costs of the samples at consecutive positions in the stream, in any unit."""


def assign(costs: np.ndarray, micro_batch_size: int, ranks: int) -> np.ndarray:
    """Return the samples of each micro-batch of each rank, int64 [micro_batches, ranks, micro_batch_size].

    Args:
        costs: cost of each sample of the global batch, float [samples]; samples are a multiple of `micro_batch_size` ×
            `ranks`.
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
    """Return the assignment without balancing, as `assign` does."""
    return np.arange(samples).reshape(-1, ranks, micro_batch_size)


def slowest(costs: np.ndarray, assignment: np.ndarray) -> float:
    """Return the work of the slowest rank in a step relative to the mean of the ranks."""
    totals = costs[assignment].sum(axis=(0, 2))
    return float(totals.max() / totals.mean())


def balanced_positions(
    batches: Iterator[range], costs: BatchCosts, micro_batch_size: int, rank: int, ranks: int
) -> Iterator[Sequence[int]]:
    """Yield the stream positions of each micro-batch of a rank.

    Args:
        batches: stream positions of each global batch.
        costs: costs of samples by position.
        micro_batch_size: samples per micro-batch.
        rank: the data-parallel rank.
        ranks: number of data-parallel ranks.
    """
    for batch in batches:
        for samples in assign(costs(batch), micro_batch_size, ranks)[:, rank]:
            yield [batch[sample] for sample in samples.tolist()]
