"""Estimate of the step time, from the configuration and a chip's table of rates (rates.py), without devices.

passes.py gives the time of a micro-batch. For a pipeline, the schedule is simulated with the times of its stages. Three
times are added once per step: the gradient reduction that the last backward pass does not hide, the optimizer, and
waits for the slowest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megalith.config import ParallelConfig, RunConfig
from megalith.config.rules.expert_rules import expert_data_parallel_size
from megalith.config.rules.parallel_rules import data_parallel_size, shard_size
from megalith.config.train import BatchSizeSchedule
from megalith.hardware import GIGA
from megalith.optim.optimizer import state_bytes
from megalith.parallel.pipeline.simulate import Durations, simulate
from megalith.parallel.pipeline.stages import (
    Stage,
    assign_layers,
    padded_micro_batches,
    schedule_kind,
    shortened_schedule,
)
from megalith.parallel.pipeline.timeline import Timeline
from megalith.planner.counts import MetaModel, layers_of
from megalith.planner.layer_times import FLASH_DIMS, GATHERING, GEMM_SLOWDOWN, REDUCING
from megalith.planner.passes import Passes
from megalith.planner.rates import Rates
from megalith.planner.traffic import hidden_bytes

UPDATE = 4 + 2 * 12  # bytes per parameter: norm; read gradient, weight and moments, write weight and moments
WAITS = 1.012  # factor for waiting for the slowest rank

PARTS = (
    "GEMMs",
    "attention",
    "elementwise",
    "host",
    "tensor",
    "context",
    "expert",
    "data",
    "bubble",
    "optimizer",
)


@dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds."""

    seconds: float
    parts: dict[str, float]
    """Seconds on the busiest rank, by the names in PARTS. The parts tensor, context, expert and data are exposed
    communication.
    """
    timeline: Timeline | None
    """The simulated pipeline with enough micro-batches to show its pattern; None without a pipeline."""

    @property
    def bubble(self) -> float:
        """Bubble as a fraction of the step."""
        return self.parts["bubble"] / self.seconds

    @property
    def exposed(self) -> float:
        """Exposed communication as a fraction of the step."""
        return sum(self.parts[name] for name in ("tensor", "context", "expert", "data")) / self.seconds


def step_time(
    config: RunConfig, meta: MetaModel, world_size: int, rates: Rates, gpus_per_node: int, exact: bool = True
) -> StepTime:
    """Estimate the time of a step.

    Args:
        config: the run, with every `auto` resolved.
        meta: its model.
        world_size: number of processes.
        rates: the chip's rates.
        gpus_per_node: GPUs per node.
        exact: simulate the pipeline. Otherwise use the bubble's formula and the slowest stage, which is faster.
    """
    parallel = config.parallel
    assignment = assign_layers(config.model, parallel)
    dp = data_parallel_size(parallel, world_size)
    size = BatchSizeSchedule.from_config(config.train, dp).global_batch_size
    micro_batches = size // (config.train.micro_batch_size * dp)
    if config.parallel.dynamic_context_parallel:
        micro_batches = padded_micro_batches(config.parallel, micro_batches)
    passes = Passes(config, meta.on_rank(parallel), world_size, rates, gpus_per_node, micro_batches)
    work = [[passes.chunk(chunk) for chunk in chunks] for chunks in assignment]
    busy = [micro_batches * sum(f.total() + b.total() for f, b in chunks) for chunks in work]
    slowest = max(range(len(work)), key=busy.__getitem__)
    parts = Counter(dict.fromkeys(PARTS, 0.0))
    for forward, backward in work[slowest]:
        for name, seconds in (forward + backward).items():
            parts[name] += micro_batches * seconds
    timeline = None
    if len(work) > 1:
        total = busy[slowest] * (1 + _bubble(parallel, micro_batches))
        if exact:
            schedule, rest = shortened_schedule(parallel, micro_batches)
            timeline = simulate(schedule, _durations(passes, work, zero=schedule.kind == "zero_bubble"))
            total = timeline.total + rest * busy[slowest] / micro_batches
        parts["bubble"] = total - busy[slowest]
    ends = [_step_work(passes, chunks, sum(b.total() for _, b in w)) for chunks, w in zip(assignment, work)]
    for name, seconds in max(ends, key=Counter.total).items():
        parts[name] += seconds
    seconds = parts.total() * (WAITS if world_size > 1 else 1.0)
    parts["data"] += seconds - parts.total()
    return StepTime(seconds, dict(parts), timeline)


def caution(config: RunConfig) -> str:
    """Return a sentence about the terms of the estimate that are not based on measurements, or an empty string."""
    model, seq = config.model, config.data.seq_length
    if model.linear_attention_layers:
        return "the delta rule of linear attention was not measured: its time is estimated from the bytes that it moves"
    apart = config.separates_documents or any(
        model.reach(layer, seq) < seq for layer in range(model.num_layers)
    )
    if not apart or model.head_dim in FLASH_DIMS:
        return ""
    measured = " and ".join(map(str, FLASH_DIMS))
    return (
        f"attention of documents and windows was measured at head dims {measured}, not at {model.head_dim}: its time "
        "is taken from those and is likely too short"
    )


def _bubble(parallel: ParallelConfig, micro_batches: int) -> float:
    """Return the bubble as a fraction of the work, by the formula in simulate.py."""
    ranks, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    third = 3 if schedule_kind(parallel) == "zero_bubble" else 1
    return (ranks - 1) / (virtual * micro_batches) / third


def _durations(
    passes: Passes, work: Sequence[Sequence[tuple[Counter, Counter]]], zero: bool
) -> list[Durations]:
    """Return the stage durations in model order."""
    parallel = passes.parallel
    between = passes.world // parallel.pipeline_model_parallel_size
    link, bandwidth = passes.link(2, between)
    p2p = passes.rates.collective_time("copy", link, 2, hidden_bytes(passes.config), bandwidth)
    stages = [chunks[c] for c in range(len(work[0])) for chunks in work]
    split = 0.5 if zero else 1.0
    return [Durations(f.total(), split * b.total(), (1 - split) * b.total(), p2p=p2p) for f, b in stages]


def _step_work(passes: Passes, chunks: Sequence[Stage], backward: float) -> Counter[str]:
    """Return the time after the micro-batches: the exposed part of the gradient reduction, and the update."""
    parallel, config, times = passes.parallel, passes.config, Counter()
    here, ends = passes.meta.in_layers(layers_of(passes.model, chunks)), passes.meta.outside(chunks).total()
    adapters, experts = here["adapters"], here["experts"]
    dense = here.total() - adapters - experts
    saved = passes.meta.saved(chunks)
    trained = adapters + saved if adapters else dense + ends
    ranks, shards = passes.dp * passes.context, shard_size(parallel, passes.world)
    strategy = parallel.data_parallel_sharding_strategy
    each = strategy in ("optim_grads", "optim_grads_params")
    if ranks > 1 and passes.fsdp:
        gathered = 2 * dense * (1 - passes.freed)
        reduced = (saved if adapters else ends) if each else trained
        seconds = passes.collective_time(
            "all_gather", shards, passes.tensor, (gathered + 4 * ends) * (shards - 1) / shards
        )
        seconds += passes.collective_time(
            "reduce_scatter", shards, passes.tensor, 4 * reduced * (shards - 1) / shards
        )
        times["elementwise"] += (
            GATHERING * (gathered / 2) + REDUCING * (0 if each else dense)
        ) / passes.streams
    else:
        seconds = 2 * passes.collective_time(
            "all_gather", ranks, passes.tensor, 4 * trained * (ranks - 1) / max(ranks, 1)
        )
    copies = ranks // shards if passes.fsdp else 1
    if copies > 1:
        stride = passes.tensor * shards
        seconds += 2 * passes.collective_time(
            "all_gather", copies, stride, 4 * trained / shards * (copies - 1) / copies
        )
    replicas = expert_data_parallel_size(parallel, passes.world) if experts and not adapters else 1
    if replicas > 1:
        stride = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
        seconds += 2 * passes.collective_time(
            "all_gather", replicas, stride, 4 * experts * (replicas - 1) / replicas
        )
    # Overlaps the last backward pass (and the first forward pass if parameters are gathered).
    times["data"] += max(GEMM_SLOWDOWN["NCCL"] * seconds, seconds - backward)
    state = trained / shards + (0 if adapters else experts / (shards and replicas if passes.fsdp else 1))
    offloaded = config.optim.optimizer_offload_fraction if config.optim.optimizer_cpu_offload else 0.0
    moments, _ = state_bytes(config.optim)
    times["optimizer"] += (UPDATE - 16 + 2 * moments) * state * (1 - offloaded) / passes.streams
    if offloaded:
        times["optimizer"] += max(
            offloaded * state / (passes.rates.host_adam * GIGA),
            8 * offloaded * state / (passes.rates.host_link * GIGA),
        )
    return times
