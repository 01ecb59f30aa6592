"""Goodput: the share of time in which a job trains, with failures, saves and restarts.

Failures come at random (exponentially) at a rate a GPU, so the mean time between those of a job of N GPUs is M = 1 /
(N · rate). A save stalls training for δ seconds each interval τ, and a failure costs R seconds (it is noticed, the
job starts again, the checkpoint is loaded) and what was trained since the last save. Then (Daly, 2006) τ seconds of
work take M · e^(R/M) · (e^((τ+δ)/M) − 1) on average, and the best interval is about √(2δM) (Young, 1974), with Daly's
correction √(2δM)·(1 + √(δ/2M)/3 + δ/18M) − δ. A save in the background cannot begin before the last is on the disk: τ
is no shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalith.config import RunConfig
from megalith.planner.counts import count_parameters
from megalith.planner.memory import MASTER_BYTES

HOURS_OF_LLAMA3 = 54 * 24
FAILURES_A_GPU_HOUR = (
    419 / 16384 / HOURS_OF_LLAMA3
)  # The Llama 3 Herd of Models: 419 unexpected stops in 54 days
SIZES = (8, 64, 512, 1024, 4096, 16384, 32768, 100_000)
MANIFEST_BYTES = 83  # of JSON a shard: docs/checkpoints.md
MANIFEST_SECONDS = 1.66e-5  # of rank 0's CPU a shard
TENSORS_A_LAYER = 8  # and as many of each moment


@dataclass(frozen=True)
class Costs:
    """Seconds, of what was measured (docs/checkpoints.md, docs/reliability.md) or is given."""

    stall: float = 0.8
    """Training waits while a save copies its state: of `async_save`."""
    notice: float = 10.0
    """From a failure to the start of the new processes."""
    start: float = 30.0
    """From there to the first step, compilation from its cache included, without the load."""
    disk: float = 0.7
    """GB/s that a rank writes and reads, with checksums."""
    store: float = 1000.0
    """GB/s of the whole file system."""


@dataclass(frozen=True)
class Goodput:
    """A job of so many GPUs."""

    gpus: int
    between_failures: float
    """Seconds, on average."""
    checkpoint_bytes: int
    files: int
    save: float
    """Seconds until a checkpoint is on the disk."""
    restart: float
    """Seconds from a failure to the next step."""
    interval: float
    """The best, in seconds of work between two saves."""
    share: float
    """Of the time, that trains."""
    manifest_bytes: int
    manifest_seconds: float
    connections: int
    """That the rendezvous and its store hold: a rank each."""


def checkpoint_bytes(config: RunConfig) -> int:
    """Weights in fp32 and the optimizer's moments, which a checkpoint has in fp32."""
    counts = count_parameters(config.model, lora=config.lora)
    trained = counts.adapters or counts.total
    return MASTER_BYTES * counts.total + {"sgd": 4, "muon": 4}.get(config.optim.optimizer, 8) * trained


def goodput(
    config: RunConfig, gpus: int, costs: Costs = Costs(), failures_a_gpu_hour: float = FAILURES_A_GPU_HOUR
) -> Goodput:
    """With the best save interval. The figures of a checkpoint are of one file a rank."""
    between = 3600 / (gpus * failures_a_gpu_hour)
    size = checkpoint_bytes(config)
    bandwidth = min(gpus * costs.disk, costs.store) * 1e9
    shards = 3 * TENSORS_A_LAYER * config.model.num_layers * min(gpus, 1024)
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
    )


def best_interval(stall: float, between: float) -> float:
    """Daly's, seconds of work between saves; with a stall of 2 M or more it is M."""
    if stall >= 2 * between:
        return between
    ratio = stall / (2 * between)
    return math.sqrt(2 * stall * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def training_share(interval: float, stall: float, restart: float, between: float) -> float:
    """Of all time, 0 to 1."""
    try:
        return interval / (between * math.exp(restart / between) * math.expm1((interval + stall) / between))
    except OverflowError:
        return 0.0
