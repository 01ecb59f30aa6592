"""Length, batch size, precision and output of a run.

The global batch size is a function of the consumed samples, so a resumed run needs no state for it. It is constant or
grows: `rampup_batch_size: [start, increment, ramp_samples]` grows it from `start` to `global_batch_size` by
`increment`, in stages that divide `ramp_samples` evenly, as in Megatron (Smith et al., "Don't decay the learning rate,
increase the batch size"). `step_batch_size_schedule: [[0, size], [samples, size], …]` sets it by consumed samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from megalith.config.base import NOT_YET, Decides, RequiresSetting, Section
from megalith.errors import ConfigError

MAX_INCREMENTS = 10_000


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Samples and micro-batches of each optimizer step.

    global_batch_size = micro_batch_size × data_parallel_size × accumulation, at every size of a ramp. Raises
    ConfigError if a size is not divisible, or for an invalid ramp.
    """

    global_batch_size: int
    micro_batch_size: int = 1
    data_parallel_size: int = 1
    rampup_batch_size: tuple[int, int, int] | None = None  # start, increment, ramp_samples
    steps: tuple[tuple[int, int], ...] | None = None  # (consumed samples, size from then on)

    @classmethod
    def from_config(cls, train: TrainConfig, data_parallel_size: int) -> BatchSizeSchedule:
        """Return the schedule of a run with `data_parallel_size` replicas."""
        if train.global_batch_size is None:
            raise ConfigError(
                "train.global_batch_size is not set, but training needs it; set it to micro_batch_size "
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
                f"{written} must be [start, increment, samples] with start and increment above 0 and samples at "
                "least 0"
            )
        growth = self.global_batch_size - start
        if growth < 0:
            raise ConfigError(
                f"{written} starts above train.global_batch_size ({self.global_batch_size}); "
                "start at or below it"
            )
        if growth % increment:
            raise ConfigError(
                f"{written} does not reach train.global_batch_size ({self.global_batch_size}), because "
                f"{self.global_batch_size} − {start} = {growth} is not divisible by the increment {increment}; "
                f"choose an increment that divides {growth}"
            )
        if growth // increment > MAX_INCREMENTS:
            raise ConfigError(
                f"{written} grows in {growth // increment:,} increments, but at most {MAX_INCREMENTS:,} are supported; "
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
                f"{written} must be [samples, size] pairs, starting at 0 samples, with growing samples and sizes "
                "above 0"
            )
        if sizes[-1] != self.global_batch_size:
            raise ConfigError(
                f"{written} ends with size {sizes[-1]}, but train.global_batch_size is {self.global_batch_size}; "
                "make the two equal"
            )
        if self.rampup_batch_size is not None:
            raise ConfigError(f"{written} and train.rampup_batch_size are both set; leave one of them out")
        for size in sizes:
            self._check_divides("a size of train.step_batch_size_schedule", size)

    def _check_divides(self, what: str, size: int) -> None:
        slice_size = self.micro_batch_size * self.data_parallel_size
        if size % slice_size == 0:
            return
        below = size // slice_size * slice_size
        near = f"{below} or {below + slice_size}" if below else f"{slice_size}"
        raise ConfigError(
            f"{what} ({size}) is not a multiple of micro_batch_size ({self.micro_batch_size}) × "
            f"data parallel ({self.data_parallel_size}) = {slice_size}; use {near}, or change "
            "micro_batch_size"
        )

    def size(self, consumed_samples: int) -> int:
        """Return the samples of the step that begins after `consumed_samples`."""
        if self.steps is not None:
            return [size for start, size in self.steps if start <= consumed_samples][-1]
        if not self._increments or consumed_samples > self.rampup_batch_size[2]:
            return self.global_batch_size
        start, increment, _ = self.rampup_batch_size
        return start + increment * self._stage(consumed_samples)

    @property
    def all_micro_batches(self) -> list[int]:
        """Return the possible numbers of micro-batches per step."""
        sizes = [size for size, _ in self._stages()] + [self.global_batch_size]
        return [size // (self.micro_batch_size * self.data_parallel_size) for size in sizes]

    def micro_batches(self, consumed_samples: int) -> int:
        """Return the micro-batches per replica of the step that begins after `consumed_samples`."""
        return self.size(consumed_samples) // (self.micro_batch_size * self.data_parallel_size)

    def iterations(self, train: TrainConfig) -> int:
        """Return the number of steps of the run."""
        return train.train_iters or self.iterations_for_samples(train.train_samples)

    def samples_for_iterations(self, iterations: int) -> int:
        """Return the samples that the first `iterations` steps consume."""
        consumed = 0
        for size, steps in self._stages():
            taken = min(iterations, steps)
            consumed += taken * size
            iterations -= taken
        return consumed + iterations * self.global_batch_size

    def iterations_for_samples(self, samples: int) -> int:
        """Return the number of complete steps in `samples`; an incomplete last batch is dropped, as in Megatron."""
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
        """Return the number of increments of the batch size, or 0 if it is constant."""
        if self.rampup_batch_size is None or self.rampup_batch_size[2] == 0:
            return 0
        start, increment, _ = self.rampup_batch_size
        return (self.global_batch_size - start) // increment

    def _stage(self, consumed_samples: int) -> int:
        """Return the increments made so far, computed in floats, so that the batch grows at the same sample as
        Megatron's.
        """
        return int(consumed_samples / (self.rampup_batch_size[2] / self._increments))

    def _stages(self) -> Iterator[tuple[int, int]]:
        """Yield (batch size, number of steps) of each stage; after the last stage the size is constant."""
        consumed = 0
        for (_, size), (end, _) in pairwise(self.steps or ()):
            steps = max(0, -(-(end - consumed) // size))
            consumed += steps * size
            yield size, steps
        for stage in range(self._increments):
            start, increment, ramp_samples = self.rampup_batch_size
            size = start + stage * increment
            end = -(-(stage + 1) * ramp_samples // self._increments)  # rounded up
            if self._stage(end) == stage:  # the float quotient was rounded below the integer
                end += 1
            steps = max(0, -(-(end - consumed) // size))
            consumed += steps * size
            yield size, steps


class TrainConfig(Section):
    """Length, batch size, precision, evaluation and early exit."""

    train_iters: Annotated[PositiveInt | None, Decides.UPDATES] = None
    """Number of optimizer steps. This or train_samples is required."""

    train_samples: Annotated[PositiveInt | None, Decides.UPDATES] = None
    """Number of sequences to train on, instead of train_iters."""

    micro_batch_size: PositiveInt = 1
    """Sequences per forward pass on each data-parallel rank."""

    global_batch_size: Annotated[PositiveInt | None, Decides.UPDATES] = None
    """Sequences per optimizer step: micro × data parallel × accumulation. Required for training."""

    rampup_batch_size: Annotated[
        Annotated[list[int], Field(min_length=3, max_length=3)] | None,
        Decides.UPDATES,
    ] = None
    """Batch size ramp [start, increment, samples]: the global batch grows from start by increments over this many
    samples."""

    step_batch_size_schedule: Annotated[
        Annotated[list[tuple[NonNegativeInt, PositiveInt]], Field(min_length=1)] | None,
        Decides.UPDATES,
    ] = None
    """Batch size schedule [[0, size], [samples, size], …]: the global batch from each count of consumed samples on,
    instead of a ramp."""

    calculate_per_token_loss: Annotated[bool, Decides.UPDATES] = True
    """Weight every valid token of a step equally. Off: weight every micro-batch equally."""

    precision: Annotated[Literal["fp32", "bf16", "fp16"], Decides.UPDATES] = "fp32"
    """Compute dtype. Weights, gradients and optimizer state are always fp32."""

    fp8_format: Annotated[Literal["e4m3", "hybrid"] | None, Decides.UPDATES] = None
    """FP8 matmuls: E4M3 throughout, or E5M2 for gradients (hybrid). Emulated on CPUs, slowly."""

    fp8_recipe: Annotated[
        Literal["delayed", "tensorwise", "blockwise", "mxfp8"], Decides.UPDATES, RequiresSetting("fp8_format")
    ] = "delayed"
    """FP8 scaling: delayed (from earlier steps), tensorwise, or blockwise (blocks of 128; needs e4m3)."""

    fp8_margin: Annotated[NonNegativeInt, Decides.UPDATES, RequiresSetting("fp8_format")] = 0
    """FP8, delayed: divide scales by 2 to the power of this number."""

    fp8_interval: PositiveInt = 1
    """Accepted for Megatron-LM's scripts without effect: scales are updated every step."""

    fp8_amax_history_len: Annotated[PositiveInt, Decides.UPDATES, RequiresSetting("fp8_format")] = 1
    """FP8, delayed: number of steps in the amax history."""

    fp8_amax_compute_algo: Annotated[
        Literal["max", "most_recent"], Decides.UPDATES, RequiresSetting("fp8_format")
    ] = "most_recent"
    """FP8, delayed: use the most recent amax of the history, or its maximum."""

    fp8_wgrad: Annotated[bool, Decides.UPDATES, RequiresSetting("fp8_format")] = True
    """Compute wgrad in FP8. Off: in the compute dtype."""

    fp8_cache_weights: Annotated[bool | Literal["auto"], RequiresSetting("fp8_format")] = "auto"
    """FP8: cast weights once per step for all micro-batches, 2 bytes per parameter, replacing the weights that FSDP
    has gathered. Off: cast them when used. Under optim_grads_params this applies to fsdp_unsharded_layers only.
    `auto`: if it needs no extra memory, or if weights are cast more than once per step and memory is expected to
    suffice."""

    moe_cache_weights: Annotated[
        bool | Literal["auto"],
        RequiresSetting("model.num_experts"),
        RequiresSetting("precision", "bf16", "fp16"),
    ] = "auto"
    """Cast expert weights once per step, 2 bytes per parameter. Off: cast them when used. Does not apply to weights
    that FSDP gathers, which are already cast. `auto`: if memory is expected to suffice."""

    fp8_param_gather: Annotated[bool, NOT_YET, RequiresSetting("fp8_format")] = False
    """Gather weights in FP8. Not implemented: weights are always gathered in the compute dtype."""

    tp_only_amax_red: bool = False
    """Accepted for Megatron-LM's scripts without effect: an amax is always that of the full tensor."""

    first_last_layers_bf16: Annotated[bool, Decides.UPDATES, RequiresSetting("fp8_format")] = False
    """FP8: keep the first and last layers in the compute dtype."""

    num_layers_at_start_in_bf16: Annotated[NonNegativeInt, Decides.UPDATES, RequiresSetting("fp8_format")] = 1
    """Number of layers at the start that first_last_layers_bf16 keeps in the compute dtype."""

    num_layers_at_end_in_bf16: Annotated[NonNegativeInt, Decides.UPDATES, RequiresSetting("fp8_format")] = 1
    """Number of layers at the end that first_last_layers_bf16 keeps in the compute dtype."""

    seed: Annotated[int, Field(ge=0, lt=2**32), Decides.SAMPLES] = 1234
    """Seed of initial weights, dropout and data order."""

    deterministic: bool = False
    """Use deterministic kernels only: bitwise the same run on the same machine."""

    batch_invariant: bool = False
    """Compute each sequence with operators whose bits do not depend on the batch, and its gradient in a pass of its
    own, so that losses have the same bits for every micro_batch_size and for 1, 2, 4 or 8 data-parallel ranks
    (docs/exactness.md). Slower."""

    output_dir: str = "output"
    """Folder of the run for metrics, checkpoints and the resolved configuration."""

    @field_validator("output_dir")
    @classmethod
    def _is_expanded(cls, folder: str) -> str:
        if folder.startswith("~") or "${" in folder:
            raise PydanticCustomError("path", "~ and ${{…}} are not expanded; write the full path")
        return folder

    eval_interval: PositiveInt = 1000
    """Steps between evaluations."""

    eval_iters: NonNegativeInt = 100
    """Global batches per evaluation; 0: none. Default: at most a tenth of the run's steps."""

    skip_train: bool = False
    """Evaluate the weights of checkpoint.load or model.init_from without training or writing anything."""

    exit_interval: PositiveInt | None = None
    """Exit after a step divisible by this, with a checkpoint."""

    exit_duration_in_mins: PositiveFloat | None = None
    """Exit after this many minutes, with a checkpoint."""

    @property
    def sequences_per_pass(self) -> int:
        """Sequences of a forward and backward pass, per data-parallel rank."""
        return 1 if self.batch_invariant else self.micro_batch_size

    @property
    def peak_dtype(self) -> str:
        """Dtype of the layers' matmuls, whose peak defines MFU."""
        return self.precision if self.fp8_format is None else "fp8"

    @property
    def length(self) -> tuple[Literal["iters", "samples"], int]:
        """Unit and length of the run."""
        return (
            ("iters", self.train_iters) if self.train_iters is not None else ("samples", self.train_samples)
        )
