"""Goodput: the fraction of time that a job trains, given failures, saves and restarts.

Failures are exponentially distributed with a rate per GPU, so a job of N GPUs fails every M = 1 / (N · rate) seconds on
average. A save stalls training for δ seconds after every τ seconds of work. A failure costs R seconds (detection,
restart, loading) and the work since the last save. On average τ seconds of work then take M · e^(R/M) · (e^((τ+δ)/M) −
1) (Daly, 2006). The best interval is about √(2δM) (Young, 1974), with Daly's correction √(2δM)·(1 + √(δ/2M)/3 + δ/18M)
− δ, but not shorter than an asynchronous save takes.

With snapshots in host memory (checkpoint.memory_interval), most failures cost a shorter restart and the work since the
last snapshot. The rest, such as lost machines, still cost a restart from storage. The two kinds are independent, so the
fractions of time that each leaves for training are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalith.config import RunConfig
from megalith.optim.optimizer import state_bytes
from megalith.planner.counts import count_parameters
from megalith.planner.memory import MASTER_BYTES

HOURS_OF_LLAMA3 = 54 * 24
# The Llama 3 Herd of Models: 419 unexpected interruptions in 54 days on 16,384 GPUs.
FAILURES_PER_GPU_HOUR = 419 / 16384 / HOURS_OF_LLAMA3
SIZES = (8, 64, 512, 1024, 4096, 16384, 32768, 100_000)
MANIFEST_BYTES = 83  # of JSON per shard (docs/checkpoints.md)
MANIFEST_SECONDS = 1.66e-5  # of rank 0's CPU per shard
TENSORS_PER_LAYER = 8  # and the same number for each moment


@dataclass(frozen=True)
class Costs:
    """Costs of saves and failures: durations in seconds, and bandwidths.

    Defaults are measured values (docs/checkpoints.md, docs/reliability.md).
    """

    stall: float = 0.8
    """Seconds that training stalls while an asynchronous save copies the state."""
    notice: float = 10.0
    """Seconds from a failure to the start of new processes."""
    start: float = 30.0
    """Seconds from the start of new processes to the first step, with compiled code from the cache, without loading the
    checkpoint.
    """
    disk: float = 0.7
    """GB/s per rank for writing and reading, with checksums."""
    store: float = 1000.0
    """GB/s of the file system."""
    memory_restart: float = 15.0
    """Seconds from a failure to the next step, with snapshots in memory."""
    memory_stall: float = 0.3
    """Seconds that training stalls per snapshot in memory."""
    memory_share: float = 0.8
    """Fraction of failures that snapshots in memory can recover from, 0 to 1: those that leave the machines running."""


@dataclass(frozen=True)
class Goodput:
    """Estimate for a job of `gpus` GPUs."""

    gpus: int
    between_failures: float
    """Mean seconds between failures."""
    checkpoint_bytes: int
    files: int
    save: float
    """Seconds until a checkpoint is on the disk."""
    restart: float
    """Seconds from a failure to the next step."""
    interval: float
    """Best interval: seconds of work between two saves."""
    share: float
    """Fraction of time in which the job trains, 0 to 1."""
    manifest_bytes: int
    manifest_seconds: float
    connections: int
    """Connections of the rendezvous store, one per rank."""
    memory_interval: float
    """Best interval: seconds of work between two snapshots in memory."""
    share_with_memory: float
    """Fraction of time in which the job trains with snapshots in memory, 0 to 1."""


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the checkpoint size in bytes: weights and moments in fp32.

    With adapters, only trained parameters count.
    """
    counts = count_parameters(config.model, lora=config.lora)
    stored = config.optim.model_copy(
        update=dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "muon_state_dtype"), "fp32")
    )
    return (MASTER_BYTES + state_bytes(stored)[0]) * counts.trained


def goodput(
    config: RunConfig, gpus: int, costs: Costs = Costs(), failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR
) -> Goodput:
    """Estimate the fraction of time that a job trains with the best save interval.

    Args:
        config: the run.
        gpus: number of GPUs. Each rank writes one checkpoint file.
        costs: seconds of saves and restarts, and bandwidths of disks and store.
        failures_per_gpu_hour: rate of failures.
    """
    between = 3600 / (gpus * failures_per_gpu_hour)
    size = checkpoint_bytes(config)
    bandwidth = min(gpus * costs.disk, costs.store) * 1e9
    shards = 3 * TENSORS_PER_LAYER * config.model.num_layers * min(gpus, 1024)
    manifest = MANIFEST_SECONDS * shards
    save = size / bandwidth + manifest
    restart = costs.notice + costs.start + size / bandwidth
    interval = max(best_interval(costs.stall, between), save)
    return Goodput(
        gpus=gpus,
        between_failures=between,
        checkpoint_bytes=size,
        files=gpus + 1,
        save=save,
        restart=restart,
        interval=interval,
        share=training_share(interval, costs.stall, restart, between),
        manifest_bytes=MANIFEST_BYTES * shards,
        manifest_seconds=manifest,
        connections=gpus,
        memory_interval=best_interval(costs.memory_stall, between / costs.memory_share)
        if costs.memory_share
        else 0.0,
        share_with_memory=share_with_memory(costs, save, restart, between),
    )


def share_with_memory(costs: Costs, save: float, restart: float, between: float) -> float:
    """Return the fraction of time that the job trains if it uses snapshots in memory and the best intervals.

    Args:
        costs: stalls and the restart from memory.
        save: shortest interval between checkpoints, in seconds.
        restart: seconds of a restart from storage.
        between: mean seconds between failures, of both kinds together.
    """
    share = 1.0
    if costs.memory_share > 0:
        apart = between / costs.memory_share
        interval = best_interval(costs.memory_stall, apart)
        share *= training_share(interval, costs.memory_stall, costs.memory_restart, apart)
    if costs.memory_share < 1:
        apart = between / (1 - costs.memory_share)
        share *= training_share(max(best_interval(costs.stall, apart), save), costs.stall, restart, apart)
    return share


def best_interval(stall: float, between: float) -> float:
    """Return Daly's optimal time between saves, in seconds of work.

    Args:
        stall: seconds that training waits for a save.
        between: mean seconds between failures, M. The result is M if `stall` is at least 2 M.
    """
    if stall >= 2 * between:
        return between
    ratio = stall / (2 * between)
    return math.sqrt(2 * stall * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def training_share(interval: float, stall: float, restart: float, between: float) -> float:
    """Return the fraction of time that the job trains, 0 to 1.

    Args:
        interval: seconds between saves.
        stall: seconds that training waits for a save.
        restart: seconds of a restart.
        between: mean seconds between failures.
    """
    try:
        return interval / (between * math.exp(restart / between) * math.expm1((interval + stall) / between))
    except OverflowError:
        return 0.0
