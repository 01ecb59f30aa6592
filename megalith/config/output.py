"""Checkpoints, logs, device and run health."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.config.base import RequiresSetting, Section


class CheckpointConfig(Section):
    """Saving and loading. Checkpoints are in `output_dir/checkpoints/step_NNNNNNNN`."""

    save_interval: PositiveInt | None = None
    """Steps between checkpoints."""

    memory_interval: PositiveInt | None = None
    """Steps between snapshots in host memory. With --max-restarts, ranks continue from them after another rank fails,
    without restarting all processes. Snapshots take four times the memory of a rank's state. Default: none."""

    save_at_end: bool = True
    """Save a checkpoint when the run finishes. For runs that stop early, see save_when_stopped."""

    save: str | None = None
    """URL (s3://, gs://) under whose `checkpoints` folder steps are saved. Default: output_dir. A local folder here
    sets output_dir."""

    load: str | None = None
    """Run to resume from: a run folder (local or URL), or one of its steps. May be the folder that the run saves to,
    even if it is empty at first. From a Hugging Face or Megatron-LM folder only the weights are loaded, as with
    model.init_from."""

    trust: bool = False
    """Read Megatron-LM checkpoints whose pickles contain classes, and ignore these classes."""

    save_optim: bool = True
    """Save the optimizer state, which an exact resume needs."""

    load_optim: bool = True
    """Load the optimizer state."""

    save_when_stopped: Literal["always", "at_exits", "never"] = "always"
    """Condition for saving when a run stops early: always, only for train.exit_interval and similar settings but not
    for signals, or never."""

    keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep. Default: all."""

    keep_every: Annotated[PositiveInt | None, RequiresSetting("keep_last")] = None
    """Also keep every checkpoint whose step is divisible by this."""

    megatron_tracker: bool = False
    """Write Megatron-LM's `latest_checkpointed_iteration.txt` next to `checkpoints`, for scripts that need it."""

    max_failed_saves: PositiveInt = 3
    """Consecutive failed saves after which the run ends with exit code 4."""

    async_save: bool = False
    """Write checkpoints in the background; training waits only for a copy to host memory."""

    export_hf: Annotated[bool, RequiresSetting("save_at_end", True, strict=True)] = False
    """Export the model to `hf_model/` in Hugging Face's format at the end of the run."""


class LogConfig(Section):
    """Console output, metrics, trackers and profiling."""

    log_interval: PositiveInt = 10
    """Steps between log lines."""

    console: Literal["auto", "lines"] = "auto"
    """Console output: `lines` prints Megatron-LM's log lines and its parameter count (in billions), on a terminal too,
    instead of a live line."""

    log_throughput: bool = True
    """Add TFLOP/s per device to log lines."""

    log_params_norm: bool = False
    """Log the norm of all weights at each log interval."""

    log_num_zeros_in_grad: bool = False
    """Log the number of zero gradient elements at each log interval."""

    log_max_attention_logit: bool = False
    """Record the largest attention logit of each step in metrics.jsonl; optim.qk_clip records it too. It repeats one
    matmul of attention."""

    log_gradient_noise_interval: NonNegativeInt = 0
    """Steps between estimates of the gradient noise scale in metrics.jsonl. These steps repeat the passes of their
    first micro-batch and must have at least two micro-batches. 0: never."""

    log_norms_interval: NonNegativeInt = 0
    """Steps between records of each layer's gradient norm, before clipping, and update norm, in metrics.jsonl. These
    steps copy the weights: 4 bytes per parameter of a rank's shard. 0: never."""

    log_fp8_interval: Annotated[NonNegativeInt, RequiresSetting("train.fp8_format")] = 0
    """Steps between FP8 statistics (amax, overflow and underflow per linear). 0: never."""

    timing_log_level: Literal[0, 1, 2] = 0
    """Timers logged at each log interval. 0: none. 1: forward-backward and optimizer. 2: also the reading of
    batches."""

    timing_log_option: Annotated[
        Literal["minmax", "max", "all"], RequiresSetting("timing_log_level", greater_than=0)
    ] = "minmax"
    """Values logged per timer: minimum and maximum over ranks (minmax), the maximum, or those of all ranks."""

    layout_report: bool = True
    """Profile one of the first steps of a multi-process run and print each rank's memory and time."""

    tensorboard: bool = False
    """Write TensorBoard events."""

    tensorboard_dir: Annotated[str | None, RequiresSetting("tensorboard", True)] = None
    """Folder for TensorBoard events. Default: `output_dir/tensorboard`."""

    wandb: bool = False
    """Log to Weights & Biases."""

    tracker_names: Literal["megalith", "megatron"] = "megalith"
    """Metric names in TensorBoard and W&B: names such as `train/loss`, or `megatron` for Megatron-LM's tags, such as
    `lm loss` and `lm loss vs samples`."""

    wandb_project: Annotated[str, RequiresSetting("wandb", True)] = "megalith"
    """Weights & Biases project."""

    wandb_name: Annotated[str | None, RequiresSetting("wandb", True)] = None
    """Weights & Biases run name. Default: the name of the output folder."""

    wandb_entity: Annotated[str | None, RequiresSetting("wandb", True)] = None
    """Weights & Biases account or team. Default: the user's default."""

    wandb_dir: Annotated[str | None, RequiresSetting("wandb", True)] = None
    """Folder for local files of Weights & Biases. Default: output_dir."""

    profile: bool = False
    """Trace a window of steps with torch's profiler into `output_dir/profile`."""

    profile_step_start: Annotated[PositiveInt, RequiresSetting("profile", True)] = 10
    """First step of the profiler's window."""

    profile_step_end: Annotated[PositiveInt, RequiresSetting("profile", True)] = 12
    """First step after the profiler's window."""


class RuntimeConfig(Section):
    """Device, compilation and monitoring of a run's health."""

    device: str = "auto"
    """Device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""

    compile: Literal["auto"] | bool = "auto"
    """Apply torch.compile to each transformer layer. `auto`: on GPUs."""

    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Fraction of its activations that a compiled layer saves; below 1 it recomputes the cheapest ones, on GPUs.
    `auto`: 1, and a run that is not expected to fit recomputes as little as needed: first activation functions and
    norms (parallel.recompute_modules), then norms and MLPs, then whole layers."""

    distributed_timeout_minutes: PositiveFloat = 10
    """Minutes that ranks may wait for each other in a step. After that, the run ends and the error names the rank that
    hangs. With inference servers, rl.weight_sync_timeout and rl.generation_timeout are added."""

    max_bad_steps: PositiveInt = 20
    """Consecutive skipped steps with NaN or Inf in loss or gradients after which the run ends."""

    rerun_bad_steps: bool = False
    """Repeat a step with NaN, Inf or a loss spike before its update. The host then waits for the device in every
    step."""

    loss_spike_threshold: Annotated[float, Field(gt=1)] | None = None
    """A loss above this multiple of the recent mean counts as a spike; the run then goes back and skips the data.
    Default: never."""

    loss_spike_window: Annotated[PositiveInt, RequiresSetting("loss_spike_threshold")] = 100
    """Number of steps in the mean that spikes are compared with."""

    check_weight_hash_across_dp_replicas_interval: PositiveInt | None = None
    """Steps between comparisons of replicated weights, which also run before each save. Default: never."""

    enable_straggler_detection: bool = False
    """Measure each rank's compute time and report slow ranks."""

    straggler_interval: Annotated[PositiveInt, RequiresSetting("enable_straggler_detection", True)] = 100
    """Steps between straggler measurements; a measured step runs under the profiler."""

    straggler_threshold: Annotated[
        float, Field(gt=1), RequiresSetting("enable_straggler_detection", True)
    ] = 1.25
    """A rank is slow if its compute time exceeds this multiple of the median of ranks with the same work."""

    replace_unhealthy_ranks: bool = False
    """Replace a rank after the step in which its GPU is slowed by heat or power or has memory errors, or in which it is
    a straggler for the second time in a row. No step is repeated. Requires checkpoint.memory_interval; counts as one
    of --max-restarts."""

    @property
    def activation_share(self) -> float:
        """Value of activation_memory_budget, with 1 for an unresolved `auto`."""
        return 1.0 if self.activation_memory_budget == "auto" else self.activation_memory_budget
