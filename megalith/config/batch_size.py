"""The global batch size as a pure function of the samples consumed: constant, or ramped up.

`rampup_batch_size: [start, increment, ramp_samples]` grows the batch from `start` to `global_batch_size` by
`increment`, in stages that share `ramp_samples` evenly, as Megatron does (Smith et al., "Don't decay the
learning rate, increase the batch size"). `step_batch_size_schedule: [[0, size], [samples, size], …]` changes it at
counts of consumed samples. Since the size depends on nothing but the samples consumed, a
resumed run finds it with no state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megalith.config.train import TrainConfig
from megalith.errors import ConfigError

MOST_SIZES = 10_000


@dataclass(frozen=True)
class BatchSizeSchedule:
    """How many samples each optimizer step takes, and in how many micro-batches.

    global_batch_size = micro_batch_size × data_parallel_size × accumulation, at every size of the ramp.
    Raises ConfigError, naming all three, for a size that does not divide, or for a ramp that cannot be.
    """

    global_batch_size: int
    micro_batch_size: int = 1
    data_parallel_size: int = 1
    rampup_batch_size: tuple[int, int, int] | None = None  # start, increment, ramp_samples
    steps: tuple[tuple[int, int], ...] | None = None  # (consumed samples, size from there on)

    @classmethod
    def from_config(cls, train: TrainConfig, data_parallel_size: int) -> BatchSizeSchedule:
        """The schedule of a run on `data_parallel_size` model replicas."""
        if train.global_batch_size is None:
            raise ConfigError(
                "train.global_batch_size is not set; training needs it: micro_batch_size "
                f"({train.micro_batch_size}) × data parallel ({data_parallel_size}) × accumulation"
            )
        rampup = train.rampup_batch_size
        return cls(
            train.global_batch_size,
            train.micro_batch_size,
            data_parallel_size,
            tuple(rampup) if rampup is not None else None,
            steps=train.step_batch_size_schedule and tuple(map(tuple, train.step_batch_size_schedule)),
        )

    def __post_init__(self) -> None:
        self._check_divides("train.global_batch_size", self.global_batch_size)
        if self.steps is not None:
            self._check_steps()
        if self.rampup_batch_size is None:
            return
        start, increment, ramp_samples = self.rampup_batch_size
        written = f"train.rampup_batch_size {list(self.rampup_batch_size)}"
        if start < 1 or increment < 1 or ramp_samples < 0:
            raise ConfigError(
                f"{written} must be [start, increment, samples] with start and increment above 0 "
                "and samples at least 0"
            )
        growth = self.global_batch_size - start
        if growth < 0:
            raise ConfigError(
                f"{written} starts above train.global_batch_size ({self.global_batch_size}); "
                "start at or below it"
            )
        if growth % increment:
            raise ConfigError(
                f"{written} does not reach train.global_batch_size ({self.global_batch_size}): "
                f"{self.global_batch_size} − {start} = {growth} is not divisible by the increment {increment}"
            )
        if growth // increment > MOST_SIZES:
            raise ConfigError(
                f"{written} grows in {growth // increment:,} increments, but at most {MOST_SIZES:,} are followed; "
                "choose a larger increment"
            )
        self._check_divides("the start of train.rampup_batch_size", start)
        if growth:
            self._check_divides("the increment of train.rampup_batch_size", increment)

    def _check_steps(self) -> None:
        written = f"train.step_batch_size_schedule {list(map(list, self.steps))}"
        starts, sizes = zip(*self.steps)
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)) or min(sizes) < 1:
            raise ConfigError(
                f"{written} must be [samples, size] pairs, the first with 0 samples and each with more than the one "
                "before, of sizes above 0"
            )
        if sizes[-1] != self.global_batch_size:
            raise ConfigError(
                f"{written} ends with {sizes[-1]}, but train.global_batch_size is {self.global_batch_size}; make them "
                "the same"
            )
        if self.rampup_batch_size is not None:
            raise ConfigError(f"{written} and train.rampup_batch_size exclude each other; leave one out")
        for size in sizes:
            self._check_divides("a size of train.step_batch_size_schedule", size)

    def _check_divides(self, what: str, size: int) -> None:
        slice_size = self.micro_batch_size * self.data_parallel_size
        if size % slice_size == 0:
            return
        below = size // slice_size * slice_size
        near = f"{below} or {below + slice_size}" if below else f"{slice_size}"
        raise ConfigError(
            f"{what} ({size}) is not micro_batch_size ({self.micro_batch_size}) × data parallel "
            f"({self.data_parallel_size}) × accumulation: {size} / {slice_size} = {size / slice_size:.4g} "
            f"is not whole; use {near}, or change micro_batch_size"
        )

    def size(self, consumed_samples: int) -> int:
        """Samples of the step that begins after `consumed_samples`."""
        if self.steps is not None:
            return [size for start, size in self.steps if start <= consumed_samples][-1]
        if not self._increments or consumed_samples > self.rampup_batch_size[2]:
            return self.global_batch_size
        start, increment, _ = self.rampup_batch_size
        return start + increment * self._stage(consumed_samples)

    @property
    def all_micro_batches(self) -> list[int]:
        """The numbers of micro-batches that a step of this run can have."""
        sizes = [size for size, _ in self._stages()] + [self.global_batch_size]
        return [size // (self.micro_batch_size * self.data_parallel_size) for size in sizes]

    def micro_batches(self, consumed_samples: int) -> int:
        """Accumulation of the step that begins after `consumed_samples`: micro-batches on each replica."""
        return self.size(consumed_samples) // (self.micro_batch_size * self.data_parallel_size)

    def iterations(self, train: TrainConfig) -> int:
        """Steps of the whole run."""
        return train.train_iters or self.iterations_for_samples(train.train_samples)

    def samples_for_iterations(self, iterations: int) -> int:
        """Samples that the first `iterations` steps consume."""
        consumed = 0
        for size, steps in self._stages():
            taken = min(iterations, steps)
            consumed += taken * size
            iterations -= taken
        return consumed + iterations * self.global_batch_size

    def iterations_for_samples(self, samples: int) -> int:
        """Whole steps that `samples` suffice for; a last incomplete batch is left out, as in Megatron."""
        iterations = 0
        for size, steps in self._stages():
            taken = min(samples // size, steps)
            iterations += taken
            samples -= taken * size
            if taken < steps:
                return iterations
        return iterations + samples // self.global_batch_size

    @property
    def _increments(self) -> int:
        """How often the batch grows; 0 when its size is constant."""
        if self.rampup_batch_size is None or self.rampup_batch_size[2] == 0:
            return 0
        start, increment, _ = self.rampup_batch_size
        return (self.global_batch_size - start) // increment

    def _stage(self, consumed_samples: int) -> int:
        """Increments made so far in the ramp. In floats, as in Megatron: both grow at the same sample."""
        return int(consumed_samples / (self.rampup_batch_size[2] / self._increments))

    def _stages(self) -> Iterator[tuple[int, int]]:
        """(batch size, number of steps) of each stage of ramp or schedule; after the last, the size is constant."""
        consumed = 0
        for (_, size), (end, _) in pairwise(self.steps or ()):
            steps = max(0, -(-(end - consumed) // size))
            consumed += steps * size
            yield size, steps
        for stage in range(self._increments):
            start, increment, ramp_samples = self.rampup_batch_size
            size = start + stage * increment
            end = -(-(stage + 1) * ramp_samples // self._increments)  # rounded up
            if self._stage(end) == stage:  # the float quotient came out just below the whole number
                end += 1
            steps = max(0, -(-(end - consumed) // size))
            consumed += steps * size
            yield size, steps
