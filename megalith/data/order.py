"""Orders of a run's sample stream.

The sample at position j depends only on j, the number of samples and the seed, not on the batch size, the number of
devices or a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megalith.errors import ConfigError, DataError

SampleOrder = Callable[[int], int]  # position in the stream → index in the dataset


class SingleOrder:
    """A single epoch in dataset order. Positions after the end raise DataError, or start over with `wrap`."""

    def __init__(self, num_samples: int, *, wrap: bool = False) -> None:
        self.num_samples = num_samples
        self.wrap = wrap

    def __call__(self, position: int) -> int:
        if position >= self.num_samples and not self.wrap:
            raise DataError(
                f"the run has consumed {position} samples, but the dataset has {self.num_samples}, which "
                "dataloader_type single reads only once; lower train.train_iters, or set data.dataloader_type to "
                "cyclic"
            )
        return position % self.num_samples


class CyclicOrder:
    """Epoch after epoch, each in a permutation derived from (seed, epoch).

    It holds one epoch's permutation, 4 bytes per sample.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.uint32)

    def __call__(self, position: int) -> int:
        epoch, at = divmod(position, self.num_samples)
        if epoch != self._epoch:
            dtype = np.uint32 if self.num_samples <= 2**32 else np.int64
            self._permutation = np.arange(self.num_samples, dtype=dtype)
            np.random.default_rng([self.seed, epoch]).shuffle(self._permutation)
            self._epoch = epoch
        return int(self._permutation[at])


def stream_position(consumed: int, skipped: Sequence[Sequence[int]]) -> int:
    """Return the stream position of the next sample after `consumed` samples. Skipped positions count as positions, not
    as consumed samples.

    `skipped` has the ranges [first, end) of skipped positions, sorted and disjoint.
    """
    position = consumed
    for first, end in skipped:
        if position >= first:
            position += end - first
    return position


def skip_range(skipped: Sequence[Sequence[int]], first_consumed: int, end_consumed: int) -> list[list[int]]:
    """Return `skipped` with the range of samples from consumed count `first_consumed` to `end_consumed` added."""
    span = [stream_position(first_consumed, skipped), stream_position(end_consumed - 1, skipped) + 1]
    others = [list(range_) for range_ in skipped if range_[1] <= span[0] or span[1] <= range_[0]]
    return sorted([*others, span])


def sample_order(
    dataloader_type: str, num_samples: int, seed: int, skipped: Sequence[Sequence[int]] = ()
) -> SampleOrder:
    """Return the order for dataloader_type `single` or `cyclic` over `num_samples` samples, without the `skipped`
    positions.

    With `single`, as many samples as were skipped are read again from the beginning, at the end of the pass.
    """
    order = _base_order(dataloader_type, num_samples, seed, wrap=bool(skipped))
    return (lambda consumed: order(stream_position(consumed, skipped))) if skipped else order


def _base_order(dataloader_type: str, num_samples: int, seed: int, wrap: bool) -> SampleOrder:
    if num_samples == 0:
        raise DataError("the dataset has no samples; request at least one, or add data")
    if dataloader_type == "single":
        return SingleOrder(num_samples, wrap=wrap)
    if dataloader_type == "cyclic":
        return CyclicOrder(num_samples, seed)
    raise ConfigError(f"dataloader_type {dataloader_type!r} is unknown; choose single or cyclic")
