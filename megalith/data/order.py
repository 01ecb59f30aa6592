"""Which sample stands at position j of a run's stream. It depends on j, the number of samples and the seed only:
never on the batch size, the number of devices or where the run was resumed.
"""

from __future__ import annotations

from collections.abc import Callable

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


def sample_order(dataloader_type: str, num_samples: int, seed: int) -> SampleOrder:
    """The order of `single` or `cyclic` over a dataset of `num_samples`."""
    if num_samples == 0:
        raise DataError("the dataset has no samples; ask for at least one, or add data")
    if dataloader_type == "single":
        return SingleOrder(num_samples)
    if dataloader_type == "cyclic":
        return CyclicOrder(num_samples, seed)
    raise ConfigError(f"dataloader_type {dataloader_type!r} is not known; choose single or cyclic")
