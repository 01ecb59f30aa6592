"""Settings of batches, losses, evaluations and logs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags


def batch(flags: ParsedFlags) -> None:
    """Set train.global_batch_size, by default one micro-batch per model replica, or a batch size schedule.

    The schedule sets train.step_batch_size_schedule, whose thresholds are tokens in the flag and samples in the
    setting, and optim.schedule_unit to samples. --rampup-batch-size is ignored, as by core 0.20.
    """
    size = flags["--global-batch-size"]
    if flags["--step-batch-size-schedule"] is not None:
        steps = _batch_steps(flags, flags["--step-batch-size-schedule"])
        if steps and size not in (None, steps[-1][1]):
            flags.problems.append(
                f"--global-batch-size {size} contradicts --step-batch-size-schedule, which ends with {steps[-1][1]}; "
                "remove --global-batch-size"
            )
        flags.set("train.step_batch_size_schedule", steps)
        size = steps[-1][1] if steps else 1
        if steps and flags["--train-samples"] is None:
            _schedules_by_samples(flags, size)
    if size is None and flags["--micro-batch-size"] is not None:
        devices = math.prod(flags[f"--{name}-size"] for name in ("tensor-model-parallel", "pipeline-model-parallel",
                                                                 "context-parallel"))  # fmt: skip
        size = flags["--micro-batch-size"] * max((flags.world_size or devices) // devices, 1)
        flags.notes.append(f"the global batch size is {size} by default: one micro-batch per model replica")
    if size is not None:
        flags.set("train.global_batch_size", size)
    if (ramp := flags["--rampup-batch-size"]) is not None:
        flags.notes.append(
            f"--rampup-batch-size {' '.join(map(str, ramp))} is ignored, as by core 0.20, which replaced it by "
            "--step-batch-size-schedule: every step has the full batch. For the ramp of earlier versions set "
            f"train.rampup_batch_size: {ramp} in a run file (--emit)"
        )


def _schedules_by_samples(flags: ParsedFlags, size: int) -> None:
    flags.set("optim.schedule_unit", "samples")
    flags.notes.append(
        "with --step-batch-size-schedule, learning rate and weight decay depend on samples, as in Megatron; lengths in "
        f"iterations count {size} samples each, the schedule's last batch. Core 0.20 counts --micro-batch-size × model "
        "replicas: for equal rates give --train-samples, --lr-decay-samples and --lr-warmup-samples"
    )


def _batch_steps(flags: ParsedFlags, text: str) -> list[list[int]]:
    """Parse TOKENS:SIZE pairs such as `0:768 250B:1536` to [first sample, batch size] pairs.

    A threshold in tokens becomes one in samples when it is divided by the sequence length.
    """
    length = flags["--seq-length"] or flags["--encoder-seq-length"] or 1
    try:
        pairs = [step.split(":") for step in text.replace(",", " ").split()]
        steps = sorted([_count(tokens) // length, _count(size)] for tokens, size in pairs)
    except (ValueError, OverflowError):
        steps = []
    if not steps or steps[0][0] != 0:
        flags.problems.append(
            f"--step-batch-size-schedule is {text!r}: it needs TOKENS:SIZE pairs, the first from 0, like "
            "'0:768 250B:1536'"
        )
        return []
    return steps


def _count(text: str) -> int:
    """Return the number in a text such as `250B` (250,000,000,000), as in Megatron-LM."""
    text = text.strip().upper()
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:], 1)
    return int(float(text if factor == 1 else text[:-1]) * factor)


def evaluation(flags: ParsedFlags) -> None:
    """Set train.eval_interval and train.eval_iters.

    `--eval-iters -1` becomes 0. Without --eval-interval, eval_iters is 0 unless --skip-train is given.
    """
    interval = flags["--eval-interval"]
    if interval:
        flags.set("train.eval_interval", interval)
    iters = flags["--eval-iters"] if interval or flags["--skip-train"] else 0
    flags.set("train.eval_iters", 0 if iters == -1 else iters)


def trackers(flags: ParsedFlags) -> None:
    """Set log.tensorboard, log.tensorboard_dir, log.wandb, log.wandb_project, log.wandb_name and log.tracker_names."""
    if flags["--tensorboard-dir"] or flags["--wandb-project"]:
        flags.set("log.tracker_names", "megatron")
    if flags["--tensorboard-dir"]:
        flags.set("log.tensorboard", True)
        flags.set("log.tensorboard_dir", flags["--tensorboard-dir"])
    if flags["--wandb-project"]:
        flags.set("log.wandb", True)
        flags.set("log.wandb_project", flags["--wandb-project"])
        flags.set("log.wandb_name", flags["--wandb-exp-name"])
        if not flags["--wandb-exp-name"]:
            flags.problems.append(
                "--wandb-project needs --wandb-exp-name, the run's name; add --wandb-exp-name"
            )


def per_token_loss(flags: ParsedFlags) -> None:
    """Set train.calculate_per_token_loss.

    Without it every micro-batch has the same weight, even if --eod-mask-loss or an encoder's masking leaves
    micro-batches different numbers of valid tokens.
    """
    if flags["--eod-mask-loss"] or flags.program != "pretrain-gpt":
        flags.set("train.calculate_per_token_loss", flags["--calculate-per-token-loss"])
