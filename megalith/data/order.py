"""Which sample stands at position j of a run's stream. It depends on j, the number of samples and the seed only:
never on the batch size, the number of devices or where the run was resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megalith.errors import ConfigError, DataError

SampleOrder = Callable[[int], int]  # position in the stream → index in the dataset


class SingleOrder:
    """One pass in the dataset's own order. Past the end is a DataError, or the beginning again with `wrap`."""

    def __init__(self, num_samples: int, *, wrap: bool = False) -> None:
        self.num_samples = num_samples
        self.wrap = wrap

    def __call__(self, position: int) -> int:
        if position >= self.num_samples and not self.wrap:
            raise DataError(
                f"the run has consumed {position} samples and the dataset has {self.num_samples}; dataloader_type "
                "single reads each once: lower train_iters or use cyclic"
            )
        return position % self.num_samples


class CyclicOrder:
    """For ever over the dataset, each epoch in a permutation of its own, made of (seed, epoch).

    Holds one epoch's permutation, 4 bytes a sample.
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


def stream_position(consumed: int, left_out: Sequence[Sequence[int]]) -> int:
    """Where in the stream the sample stands before which `consumed` were taken: behind the ranges left out before it.

    `left_out`: [first, end) of each range of positions, sorted and apart.
    """
    position = consumed
    for first, end in left_out:
        if position >= first:
            position += end - first
    return position


def leave_out(left_out: Sequence[Sequence[int]], begin: int, end: int) -> list[list[int]]:
    """`left_out` with the samples taken between `begin` and `end` consumed ones left out as well."""
    span = [stream_position(begin, left_out), stream_position(end - 1, left_out) + 1]
    apart = [list(one) for one in left_out if one[1] <= span[0] or span[1] <= one[0]]
    return sorted([*apart, span])


def sample_order(
    dataloader_type: str, num_samples: int, seed: int, left_out: Sequence[Sequence[int]] = ()
) -> SampleOrder:
    """The order of `single` or `cyclic` over a dataset of `num_samples`, without the positions in `left_out`.

    What is left out is missing at the end of a single pass, which then takes its first samples again.
    """
    order = _whole_order(dataloader_type, num_samples, seed, wrap=bool(left_out))
    return (lambda consumed: order(stream_position(consumed, left_out))) if left_out else order


def _whole_order(dataloader_type: str, num_samples: int, seed: int, wrap: bool) -> SampleOrder:
    if num_samples == 0:
        raise DataError("the dataset has no samples; ask for at least one, or add data")
    if dataloader_type == "single":
        return SingleOrder(num_samples, wrap=wrap)
    if dataloader_type == "cyclic":
        return CyclicOrder(num_samples, seed)
    raise ConfigError(f"dataloader_type {dataloader_type!r} is not known; choose single or cyclic")
