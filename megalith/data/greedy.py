"""The order in which a blend draws from its datasets: Megatron's greedy rule, vectorized over blocks of samples.

Sample n comes from the dataset that is furthest behind its share: the argmax over i of `w[i] * max(n, 1) - count[i]`,
the lowest i on a tie. Each choice needs the counts after all previous choices, so a plain loop takes at least 0.4
microseconds per sample. But starting from any reasonable guess of the counts, the rule soon makes the same choices as
from the exact counts. The samples are therefore cut into blocks. Each block starts a little before its first sample,
from guessed counts, and all blocks advance together, one numpy operation for all.

Then each block's initial counts are compared with the previous block's final counts. Blocks with a wrong guess run
again from the right counts until all agree. By induction from the first block, agreement proves that the order is
exact.

If the weights change during the run (mixture.py), each segment between two points of the schedule is ordered
separately, counting samples from 0. Where weights change linearly, `w[i] * n` is replaced by the samples that are due
from dataset i before sample n of the segment.
"""

from __future__ import annotations

import numpy as np

from megalith.data.mixture import BlendWeights

BLOCK = 4096  # samples
WARM_UP = 8  # steps per dataset that a block starts early, so that its guess converges


def scheduled_order(weights: BlendWeights, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `greedy_order` for weights that change during the run."""
    if weights.is_constant:
        return greedy_order(weights.first[0], num_samples)
    datasets, parts = weights.first.shape[1], []
    for segment, length in weights.segments(num_samples):
        drawn = np.flatnonzero(segment.first[0] + segment.last[0])  # datasets of weight 0 take no part
        rule = segment.first[0, drawn] if segment.is_constant else segment.select(drawn)
        parts.append(drawn.astype(_choice_dtype(datasets))[greedy_order(rule, length)[0]])
    choices = np.concatenate(parts)
    blocks = [
        np.bincount(choices[start : start + BLOCK], minlength=datasets)
        for start in range(0, num_samples, BLOCK)
    ]
    return choices, np.cumsum([np.zeros(datasets, np.int64), *blocks], axis=0)[:-1]


def greedy_order(weights: np.ndarray | BlendWeights, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each sample, and the number of samples from each dataset before each block.

    Args:
        weights: float64 [datasets], sum 1; or weights that change linearly.
        num_samples: length of the blend.

    Returns:
        choices, uint8 or uint16 [num_samples], and counts, int64 [ceil(num_samples / BLOCK), datasets].
    """
    datasets = len(weights) if isinstance(weights, np.ndarray) else weights.first.shape[1]
    starts = np.arange(0, num_samples, BLOCK)  # [blocks]
    steps = min(BLOCK, num_samples)
    choices = np.empty((len(starts), steps), dtype=_choice_dtype(datasets))
    early = np.maximum(starts - WARM_UP * datasets, 0)
    first = _fair_counts(weights, early)
    for lead in np.unique(starts - early):
        lanes = np.flatnonzero(starts - early == lead)
        first[lanes], _ = _advance(weights, early[lanes], first[lanes], int(lead))
    last = np.empty_like(first)
    lanes = np.arange(len(starts))
    while len(lanes):
        last[lanes], choices[lanes] = _advance(weights, starts[lanes], first[lanes], steps)
        lanes = 1 + np.flatnonzero((first[1:] != last[:-1]).any(axis=1))
        first[lanes] = last[lanes - 1]
    return choices.reshape(-1)[:num_samples], first.astype(np.int64)


def _choice_dtype(datasets: int) -> type[np.unsignedinteger]:
    return np.uint8 if datasets <= 256 else np.uint16


def _fair_counts(weights: np.ndarray | BlendWeights, n: np.ndarray) -> np.ndarray:
    """Round the datasets' shares of n samples to integers that sum to n, by largest remainders, for each n."""
    shares = weights * n[:, None] if isinstance(weights, np.ndarray) else weights.due(n.astype(np.float64))
    counts = np.floor(shares)
    rank = np.argsort(np.argsort(counts - shares, axis=1), axis=1)
    return counts + (rank < (n - counts.sum(axis=1))[:, None])


def _advance(
    weights: np.ndarray | BlendWeights, n: np.ndarray, counts: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw `steps` samples in every lane.

    Returns the counts after them, [lanes, datasets], and the chosen datasets [lanes, steps].

    Lane b starts before sample n[b] with counts[b]. Counts are float64, exact below 2^53.
    """
    counts, n = counts.copy(), n.astype(np.float64)[:, None]
    flat, base = counts.reshape(-1), np.arange(len(counts)) * counts.shape[1]
    behind = np.empty_like(counts)
    choices = np.empty((len(counts), steps), dtype=_choice_dtype(counts.shape[1]))
    for step in range(steps):
        if isinstance(weights, np.ndarray):
            np.multiply(weights, np.maximum(n, 1.0), out=behind)
        else:
            behind[:] = weights.due(np.maximum(n[:, 0], 1.0))
        np.subtract(behind, counts, out=behind)
        choices[:, step] = choice = behind.argmax(axis=1)
        flat[base + choice] += 1
        n += 1
    return counts, choices
