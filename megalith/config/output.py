"""What a run leaves behind and where it runs: checkpoints, logs, device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.config.base import Needs, Section, Shrinks


class CheckpointConfig(Section):
    """Saving and loading. Checkpoints stand in `output_dir/checkpoints/step_NNNNNNNN`."""

    save_interval: PositiveInt | None = None
    """Steps between checkpoints."""

    save_at_end: bool = True
    """Saves a checkpoint when the run is through; for one that is stopped early save_when_stopped says."""

    save: str | None = None
    """URL to save steps at (s3://, gs://), below its `checkpoints`. Absent: output_dir, which a folder here sets."""

    load: str | None = None
    """A run's folder or URL, or one of its steps, to go on from. It may be where the run saves, empty at first. Of
    Hugging Face's or Megatron-LM's folder the weights are the initial ones, as with model.init_from."""

    trust: bool = False
    """Reads a Megatron-LM checkpoint whose pickles name classes, and leaves these out."""

    save_optim: bool = True
    """Saves the optimizer's state, without which a run cannot go on exactly."""

    load_optim: bool = True
    """Loads the optimizer's state."""

    save_when_stopped: Literal["always", "at_exits", "never"] = "always"
    """A run that is stopped early saves: always, not at a signal but at train.exit_interval and the like, or never."""

    keep_last: PositiveInt | None = None
    """Keeps only this many of the newest checkpoints. Absent: all."""

    keep_every: Annotated[PositiveInt | None, Needs("keep_last")] = None
    """Keeps also every checkpoint whose step is divisible by this."""

    megatron_tracker: bool = False
    """Writes Megatron-LM's `latest_checkpointed_iteration.txt` beside `checkpoints`, for scripts that look for it."""

    max_failed_saves: PositiveInt = 3
    """Failed saves in a row after which the run ends (exit code 4), rather than train on with nothing saved."""

    async_save: bool = False
    """Writes checkpoints in the background: training waits for a copy in host memory only."""

    export_hf: Annotated[bool, Needs("save_at_end", True, strict=True)] = False
    """Writes `hf_model/` at the end of the run."""


class LogConfig(Section):
    """What is written about a run while it goes."""

    log_interval: PositiveInt = 10
    """Steps between log lines."""

    console: Literal["auto", "lines"] = "auto"
    """`lines`: Megatron's log lines on a terminal too, as in a file, in the place of a live line; and at the start its
    parameters in billions."""

    log_throughput: bool = True
    """The log lines name TFLOP/s a device."""

    log_params_norm: bool = False
    """Each log interval has the norm of all weights."""

    log_num_zeros_in_grad: bool = False
    """Each log interval has the number of gradient elements that are 0."""

    log_fp8_interval: Annotated[NonNegativeInt, Needs("train.fp8_format")] = 0
    """Steps between those whose FP8 amaxes, overflow and underflow are counted, by linear; 0: none."""

    timing_log_level: Literal[0, 1, 2] = 0
    """Each log interval has the times, over the ranks, of 1: forward-backward and optimizer, 2: batches too."""

    timing_log_option: Annotated[Literal["minmax", "max", "all"], Needs("timing_log_level", above=0)] = (
        "minmax"
    )
    """The least and greatest time of a rank, the greatest, or all."""

    layout_report: bool = True
    """Several processes: profiles one of the first steps and prints each rank's memory and where its time went."""

    tensorboard: bool = False
    """Writes TensorBoard events."""

    tensorboard_dir: Annotated[str | None, Needs("tensorboard", True)] = None
    """Folder of the TensorBoard events. Absent: `output_dir/tensorboard`."""

    wandb: bool = False
    """Logs to Weights & Biases."""

    tracker_names: Literal["megalith", "megatron"] = "megalith"
    """Names of figures in TensorBoard and W&B: `train/loss` and the like, or `megatron`: Megatron-LM's tags, as
    `lm loss` and `lm loss vs samples`."""

    wandb_project: Annotated[str, Needs("wandb", True)] = "megalith"
    """Weights & Biases project."""

    wandb_name: Annotated[str | None, Needs("wandb", True)] = None
    """Weights & Biases run name. Absent: the output folder's name."""

    wandb_entity: Annotated[str | None, Needs("wandb", True)] = None
    """Weights & Biases account or team. Absent: the user's own default."""

    wandb_dir: Annotated[str | None, Needs("wandb", True)] = None
    """Folder of the local files of Weights & Biases. Absent: output_dir."""

    profile: bool = False
    """Traces a window of steps with torch's profiler into `output_dir/profile`."""

    profile_step_start: Annotated[PositiveInt, Needs("profile", True)] = 10
    """First step of the profiler's window."""

    profile_step_end: Annotated[PositiveInt, Needs("profile", True)] = 12
    """First step after the profiler's window."""


class RuntimeConfig(Section):
    """The device, how code runs on it, and how a run's health is watched."""

    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""

    compile: Annotated[Literal["auto"] | bool, Shrinks(False)] = "auto"
    """torch.compile for each transformer block. `auto`: on GPUs."""

    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Share of its activations that a compiled block saves; below 1 it recomputes the cheapest ones, on GPUs. `auto`:
    1, and a run that is not expected to fit without recomputation recomputes as little as will: from activation
    functions and norms (parallel.recompute_modules), by norms and MLPs, to whole layers."""

    distributed_timeout_minutes: PositiveFloat = 10
    """A run whose ranks wait for each other for so long in a step is ended, and the rank that hangs named. With servers
    that sample, rl.weight_sync_timeout and rl.generation_timeout are added."""

    max_bad_steps: PositiveInt = 20
    """Steps in a row with NaN or Inf in loss or gradients, all of them skipped, after which the run ends."""

    rerun_bad_steps: bool = False
    """Repeats a step that gave NaN, Inf or a loss spike before its update. Waits for the device in every step."""

    loss_spike_threshold: Annotated[float, Field(gt=1)] | None = None
    """A loss so many times the mean before it is a spike: the run goes back and leaves out its data. Absent: never."""

    loss_spike_window: Annotated[PositiveInt, Needs("loss_spike_threshold")] = 100
    """Steps that the mean before a spike is taken over."""

    check_weight_hash_across_dp_replicas_interval: PositiveInt | None = None
    """Steps between comparisons of the weights that several ranks hold, also made before each save. Absent: never."""

    enable_straggler_detection: bool = False
    """Measures how long each rank computes, and names those that are slower than the others."""

    straggler_interval: Annotated[PositiveInt, Needs("enable_straggler_detection", True)] = 100
    """Steps between these measurements; the measured step runs under the profiler."""

    straggler_threshold: Annotated[float, Field(gt=1), Needs("enable_straggler_detection", True)] = 1.25
    """A rank is slow when it computes so many times as long as the median of the ranks with the same work."""

    @property
    def activation_share(self) -> float:
        """The activation_memory_budget; an `auto` that nobody has chosen for is 1."""
        return 1.0 if self.activation_memory_budget == "auto" else self.activation_memory_budget
