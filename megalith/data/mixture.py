"""Blend weights over a run: constant, in phases, or changing linearly, with caps on the epochs of a source.

A schedule is a list of points `{samples: N, weights: [...]}` or `{tokens: N, weights: [...]}`. A point's weights start
to apply at its position; with `interpolation: linear`, the weights change linearly between points and reach the point's
weights at its position. Before the first point, the weights of the data path apply. Points in tokens are rounded up to
samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megalith.errors import ConfigError

STEP, LINEAR = "step", "linear"
MARGIN = 1.001  # the greedy order exceeds a share of a segment by at most one sample
WAY_OUT = "raise data.max_epochs_per_source (or max_epochs of a source), train fewer steps, or add data"
MAX_ROUNDS = 1000  # of the iteration that finds capped weights


class BlendPoint(NamedTuple):
    """A point of a schedule."""

    start: int
    """Consumed samples from which the weights hold."""
    weights: tuple[float, ...]
    interpolation: str = STEP


class MixtureSettings(NamedTuple):
    """Settings of a training blend, without its paths."""

    points: tuple[BlendPoint, ...] = ()
    temperature: float | None = None
    max_epochs: float | None = None
    """Upper bound of the epochs of each source without its own `max_epochs`."""


class BlendWeights:
    """Normalized weights of the sources as a piecewise linear function of consumed samples.

    Args:
        starts: int64 [segments], the first sample of each segment, from 0.
        first: [segments, sources], positive sums; weights at the start of each segment.
        last: [segments, sources], weights at its end. The last segment has no end: its weights are constant.
        is_normalized: the weights already have the sum 1.
    """

    def __init__(
        self, starts: Sequence[int], first: np.ndarray, last: np.ndarray, is_normalized: bool = False
    ) -> None:
        self.starts = np.asarray(starts, dtype=np.float64)
        self.first, self.last = (first, last) if is_normalized else map(_normalize_rows, (first, last))
        lengths = np.diff(self.starts)
        self._slopes = np.zeros_like(self.first)
        self._slopes[:-1] = (self.last[:-1] - self.first[:-1]) / np.maximum(lengths, 1.0)[:, None]
        totals = (self.first[:-1] + self.last[:-1]) / 2 * lengths[:, None]
        self._before = np.concatenate([np.zeros((1, self.first.shape[1])), np.cumsum(totals, axis=0)])

    @classmethod
    def constant(cls, weights: Sequence[float]) -> BlendWeights:
        rows = np.asarray(weights, dtype=np.float64)[None]
        return cls([0], rows, rows)

    @property
    def is_constant(self) -> bool:
        return len(self.starts) == 1

    def due(self, n: np.ndarray) -> np.ndarray:
        """Return the number of samples due from each source before each sample number in `n`, which is the integral
        of the weights.

        Args:
            n: sample numbers, float64 [numbers].

        Returns:
            Samples due, float64 [numbers, sources].
        """
        segment = np.searchsorted(self.starts, n, "right") - 1
        elapsed = (n - self.starts[segment])[:, None]
        return self._before[segment] + elapsed * (self.first[segment] + elapsed * self._slopes[segment] / 2)

    def at(self, sample: int) -> np.ndarray:
        """Return the weights at a sample, float64 [sources]."""
        segment = int(np.searchsorted(self.starts, sample, "right")) - 1
        return self.first[segment] + (sample - self.starts[segment]) * self._slopes[segment]

    def totals(self, num_samples: int) -> np.ndarray:
        """Return the samples due from each source in a run of `num_samples`, float64 [sources]."""
        return self.due(np.array([float(num_samples)]))[0]

    def segments(self, num_samples: int) -> Iterator[tuple[BlendWeights, int]]:
        """Yield each segment of a run: its weights, shifted to start at sample 0, and its number of samples."""
        for k, first_sample in enumerate(self.starts.astype(np.int64).tolist()):
            end = num_samples if k + 1 == len(self.starts) else min(int(self.starts[k + 1]), num_samples)
            if end <= first_sample:
                return
            first, last = self.first[k], self.last[k]
            if np.array_equal(first, last):
                yield BlendWeights([0], first[None], first[None], is_normalized=True), end - first_sample
            else:
                length = int(self.starts[k + 1]) - first_sample
                rows = np.stack([first, last])
                weights = BlendWeights([0, length], rows, np.stack([last, last]), is_normalized=True)
                yield weights, end - first_sample

    def select(self, sources: np.ndarray) -> BlendWeights:
        """Return the weights of only these sources. All others must have the weight 0."""
        return BlendWeights(self.starts, self.first[:, sources], self.last[:, sources], is_normalized=True)

    def scaled(self, factors: np.ndarray) -> BlendWeights:
        """Return these weights times a factor per source, normalized again."""
        return BlendWeights(self.starts, self.first * factors, self.last * factors)

    def equals(self, other: BlendWeights) -> bool:
        return all(
            np.array_equal(a, b)
            for a, b in ((self.starts, other.starts), (self.first, other.first), (self.last, other.last))
        )


class Mixture:
    """Blend weights for a run of any length, with the number of samples available from each source.

    Args:
        weights: weights without caps.
        capacities: float [sources], the samples in the permitted epochs of each source; None means no caps.
        names: names of the sources for errors.
        epoch: samples in an epoch of each source, if the weights are in proportion to them. Without caps, sources are
            built for a whole epoch while the run takes no more samples than all of them have.
    """

    def __init__(
        self,
        weights: BlendWeights,
        capacities: np.ndarray | None = None,
        names: Sequence[str] = (),
        epoch: Sequence[int] | None = None,
    ) -> None:
        self.uncapped = weights
        self.capacities = np.full(weights.first.shape[1], np.inf) if capacities is None else capacities
        self._names, self._epoch = names, epoch

    def weights(self, num_samples: int) -> BlendWeights:
        """Return the weights for a run of `num_samples`.

        The weight of each source that would exceed its capacity is multiplied by one factor below 1 for the whole run,
        so that a schedule keeps its shape. The other sources take over in proportion to their weights.

        Raises:
            ConfigError: the sources together cannot provide the samples.
        """
        limits = self.capacities
        if len(limits) > 1:
            limits = np.maximum(limits - MARGIN * len(self.uncapped.starts), 0.0)
        totals = self.uncapped.totals(num_samples)
        if (totals <= limits).all():
            return self.uncapped
        if limits.sum() < num_samples:
            raise ConfigError(
                f"the run takes {num_samples:,} samples, but the maximum numbers of epochs of its sources permit "
                f"{int(limits.sum()):,}; {WAY_OUT}"
            )
        weights, factors = self.uncapped, np.ones_like(totals)
        for _ in range(MAX_ROUNDS):
            ratio = np.divide(limits, totals, out=np.full_like(totals, np.inf), where=totals > 0)
            factors = np.minimum(1.0, factors * ratio)
            if not _all_rows_positive(self.uncapped, factors):
                break
            weights = self.uncapped.scaled(factors)
            totals = weights.totals(num_samples)
            if (totals <= limits + 1e-4).all():
                return weights
        i = int(np.argmax(totals - limits))
        raise ConfigError(
            f"{self._names[i]} would provide {math.ceil(totals[i]):,} of the run's {num_samples:,} samples, but its "
            f"maximum number of epochs allows {int(self.capacities[i]):,}, and no other source has a weight in that "
            f"part of the schedule; change the weights, or {WAY_OUT}"
        )

    def sizes(self, num_samples: int) -> list[int]:
        """Return the number of samples to build for each source: its share plus 0.5 %, within its capacity."""
        if self._epoch is not None and num_samples <= sum(self._epoch) and np.isinf(self.capacities).all():
            return list(self._epoch)
        weights = self.weights(num_samples)
        if weights.is_constant:
            shares = [samples_for_weight(weight, num_samples) for weight in weights.first[0].tolist()]
        else:
            more = len(weights.starts)  # each segment rounds by itself
            totals = weights.totals(num_samples).tolist()
            shares = [math.ceil((math.ceil(total) + more) * 1.005) for total in totals]
        return [min(share, int(c)) if c < math.inf else share for share, c in zip(shares, self.capacities)]


def normalize(weights: Sequence[float]) -> np.ndarray:
    """Return the weights as float64, scaled to a sum of 1."""
    array = np.asarray(weights, dtype=np.float64)
    return array / np.sum(array)


def samples_for_weight(weight: float, num_samples: int) -> int:
    """Return the number of samples to build for a dataset of normalized `weight`: ceil(ceil(N * w) * 1.005)."""
    return math.ceil(math.ceil(num_samples * weight) * 1.005)


def tempered(sizes: Sequence[float], temperature: float) -> list[float]:
    """Return `size ** (1 / temperature)` for each size. 1 keeps proportions; a high temperature makes weights equal."""
    largest = max(sizes)
    return [(size / largest) ** (1 / temperature) for size in sizes]


def scheduled(weights: Sequence[float], points: Sequence[BlendPoint]) -> BlendWeights:
    """Return the blend weights over a run: `weights` until the first schedule point, then the weights that the points
    set.

    Raises:
        ConfigError: a point does not have one weight per source.
    """
    for point in points:
        if len(point.weights) != len(weights):
            raise ConfigError(
                f"data.blend_schedule has {len(point.weights)} weights at sample {point.start:,}, but the training "
                f"data has {len(weights)} sources; list one weight per source, in the order of the sources"
            )
    if not points or points[0].start > 0:
        points = [BlendPoint(0, tuple(weights)), *points]
    first = [point.weights for point in points]
    following = [*points[1:], points[-1]]
    last = [
        after.weights if after.interpolation == LINEAR else point.weights
        for point, after in zip(points, following)
    ]
    last[-1] = first[-1]
    return BlendWeights([point.start for point in points], np.array(first), np.array(last))


def parse_schedule(points: Sequence[object] | None, seq_length: int) -> tuple[BlendPoint, ...]:
    """Return the points of `data.blend_schedule`.

    Args:
        points: mappings with `samples` or `tokens`, `weights`, and optionally `interpolation`.
        seq_length: tokens per sample.

    Raises:
        ConfigError: a point is malformed, or the points do not ascend.
    """
    parsed = [_parse_point(point, seq_length) for point in points or ()]
    for before, after in itertools.pairwise(parsed):
        if after.start <= before.start:
            raise ConfigError(
                f"data.blend_schedule has a point at sample {after.start:,} after one at {before.start:,}; list the "
                "points in ascending order"
            )
    if parsed and parsed[0].start == 0 and parsed[0].interpolation == LINEAR:
        raise ConfigError(
            "data.blend_schedule begins with interpolation linear at sample 0, but there is no point before it; "
            "leave interpolation out of the first point"
        )
    return tuple(parsed)


def _parse_point(point: object, seq_length: int) -> BlendPoint:
    keys = set(point) if isinstance(point, Mapping) else set()
    units = keys & {"samples", "tokens"}
    if len(units) != 1 or not units | {"weights"} <= keys <= units | {"weights", "interpolation"}:
        raise ConfigError(
            f"data.blend_schedule entry {point!r} does not have the form {{samples: N, weights: [...]}} or "
            "{tokens: N, weights: [...]}; interpolation (step or linear) may be added"
        )
    (unit,) = units
    try:
        count = float(point[unit])
    except (TypeError, ValueError):
        count = math.nan
    try:
        weights = tuple(float(weight) for weight in point["weights"])
    except (TypeError, ValueError):
        weights = ()
    if not (0 <= count < math.inf and count == int(count)):
        raise ConfigError(
            f"data.blend_schedule has {unit}: {point[unit]!r}, but must be a whole number of at least 0"
        )
    if not weights or not all(0 <= weight < math.inf for weight in weights) or not sum(weights) > 0:
        raise ConfigError(
            f"data.blend_schedule has the weights {point['weights']!r}; they must be a list of numbers of at "
            "least 0, not all 0"
        )
    interpolation = point.get("interpolation", STEP)
    if interpolation not in (STEP, LINEAR):
        raise ConfigError(f"data.blend_schedule has interpolation {interpolation!r}; choose step or linear")
    start = int(count) if unit == "samples" else -(-int(count) // seq_length)
    return BlendPoint(start, weights, interpolation)


def _normalize_rows(rows: np.ndarray) -> np.ndarray:
    return np.stack([normalize(row) for row in rows])


def _all_rows_positive(weights: BlendWeights, factors: np.ndarray) -> bool:
    return all(((rows * factors).sum(axis=1) > 0).all() for rows in (weights.first, weights.last))
