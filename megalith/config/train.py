"""The run itself: how long, how large a batch, in which precision, and where its results go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.config import small
from megalith.config.base import KEPT, NOT_YET, Decides, Needs, Section, Shrinks


class TrainConfig(Section):
    """Length, batch, precision, evaluation and early exit."""

    train_iters: Annotated[PositiveInt | None, Decides.UPDATES] = None
    """Optimizer steps. This or train_samples is required."""

    train_samples: Annotated[PositiveInt | None, Decides.UPDATES] = None
    """Sequences to train on, in place of train_iters."""

    micro_batch_size: Annotated[
        PositiveInt,
        Shrinks(
            lambda _, train: 1 if train.rampup_batch_size or train.step_batch_size_schedule else 2
        ),  # 4 replicas share the smallest batch
    ] = 1
    """Sequences in one forward pass on one device."""

    global_batch_size: Annotated[PositiveInt | None, Decides.UPDATES, Shrinks(small.BATCH)] = None
    """Sequences in one optimizer step: micro × data parallel × accumulation. Required for training."""

    rampup_batch_size: Annotated[
        Annotated[list[int], Field(min_length=3, max_length=3)] | None,
        Decides.UPDATES,
        Shrinks(lambda value, _: value and [small.BATCH // 2, small.BATCH // 2, 2 * small.BATCH]),
    ] = None
    """[start, increment, samples]: the global batch grows from start by increments over this many samples."""

    step_batch_size_schedule: Annotated[
        Annotated[list[tuple[NonNegativeInt, PositiveInt]], Field(min_length=1)] | None,
        Decides.UPDATES,
        Shrinks(lambda value, _: value and [(0, small.BATCH // 2), (2 * small.BATCH, small.BATCH)]),
    ] = None
    """[[0, size], [samples, size], …]: the global batch from each count of consumed samples on; in place of a ramp."""

    calculate_per_token_loss: Annotated[bool, Decides.UPDATES, Needs("data.eod_mask_loss", True), KEPT] = True
    """Every valid token of a step counts the same; off, every micro-batch, however many of its tokens are valid."""

    precision: Annotated[Literal["fp32", "bf16", "fp16"], Decides.UPDATES] = "fp32"
    """Compute type. Weights, gradients and optimizer state are fp32 in each."""

    fp8_format: Annotated[Literal["e4m3", "hybrid"] | None, Decides.UPDATES] = None
    """FP8 matmuls: E4M3 throughout, or E5M2 for gradients (hybrid). On a CPU they are emulated, slowly."""

    fp8_recipe: Annotated[
        Literal["delayed", "tensorwise", "blockwise", "mxfp8"], Decides.UPDATES, Needs("fp8_format")
    ] = "delayed"
    """FP8: scales from the steps before, from each tensor, or from blocks of 128 (e4m3)."""

    fp8_margin: Annotated[NonNegativeInt, Decides.UPDATES, Needs("fp8_format")] = 0
    """FP8, delayed: scales are this many powers of two smaller."""

    fp8_interval: PositiveInt = 1
    """Taken for Megatron's scripts; scales follow every step, whatever it is."""

    fp8_amax_history_len: Annotated[PositiveInt, Decides.UPDATES, Needs("fp8_format")] = 1
    """FP8, delayed: steps that a scale looks back on."""

    fp8_amax_compute_algo: Annotated[Literal["max", "most_recent"], Decides.UPDATES, Needs("fp8_format")] = (
        "most_recent"
    )
    """FP8, delayed: how a scale is taken from the history."""

    fp8_wgrad: Annotated[bool, Decides.UPDATES, Needs("fp8_format")] = True
    """FP8: wgrad too; off, it is computed in the compute type."""

    fp8_param_gather: Annotated[bool, NOT_YET, Needs("fp8_format")] = False
    """Gathering weights in FP8: they are gathered in the compute type."""

    tp_only_amax_red: bool = False
    """Taken for Megatron's scripts; amaxes are those of the whole tensor, whatever it is."""

    first_last_layers_bf16: Annotated[bool, Decides.UPDATES, Needs("fp8_format")] = False
    """FP8: the first and last layers stay in the compute type."""

    num_layers_at_start_in_bf16: Annotated[NonNegativeInt, Decides.UPDATES, Needs("fp8_format")] = 1
    """How many of the first, with first_last_layers_bf16."""

    num_layers_at_end_in_bf16: Annotated[NonNegativeInt, Decides.UPDATES, Needs("fp8_format")] = 1
    """How many of the last."""

    seed: Annotated[int, Field(ge=0, lt=2**32), Decides.SAMPLES, KEPT] = 1234
    """Initial weights, dropout and the data's order follow from it alone."""

    deterministic: bool = False
    """Only deterministic kernels: the same run bit for bit on the same machine."""

    output_dir: str = "output"
    """Folder of the run: metrics, checkpoints, resolved configuration."""

    eval_interval: PositiveInt = 1000
    """Steps between evaluations."""

    eval_iters: Annotated[NonNegativeInt, Shrinks(1)] = 100
    """Global batches in an evaluation; 0: none. Not set, at most a tenth of the run's steps."""

    skip_train: bool = False
    """Evaluates the weights of checkpoint.load or model.init_from, and neither trains nor writes anything."""

    exit_interval: PositiveInt | None = None
    """Ends the process after a step divisible by this, with a checkpoint."""

    exit_duration_in_mins: PositiveFloat | None = None
    """Ends the process after so many minutes, with a checkpoint."""

    @property
    def peak_dtype(self) -> str:
        """Whose peak MFU is a share of: the layers' matmuls'."""
        return self.precision if self.fp8_format is None else "fp8"

    @property
    def length(self) -> tuple[Literal["iters", "samples"], int]:
        """What the run is counted in, and how long it is."""
        return (
            ("iters", self.train_iters) if self.train_iters is not None else ("samples", self.train_samples)
        )
