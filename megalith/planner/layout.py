"""A run's layout, from its configuration and number of processes, with expected memory, bubble and communication.

No process or device is needed. memory_choices.py resolves the settings whose `auto` depends on the device's memory,
and layout_text.py prints a layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megalith.config import RunConfig
from megalith.config.rules.parallel_rules import data_parallel_size
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError
from megalith.parallel.mesh import Coordinates
from megalith.parallel.pipeline.pipeline_rules import check_layout
from megalith.parallel.pipeline.schedules import Kind, Schedule
from megalith.parallel.pipeline.simulate import Durations, simulate
from megalith.parallel.pipeline.stages import (
    Stage,
    assign_layers,
    padded_micro_batches,
    run_schedule,
    shortened_schedule,
)
from megalith.planner.counts import MetaModel, layers_of
from megalith.planner.flops import flops_per_token
from megalith.planner.memory import MemoryEstimate, StageMemory
from megalith.planner.traffic import Transfer, transfers


@dataclass(frozen=True)
class StageLayout:
    """The layers and modules of the model on one pipeline rank. Without a pipeline, this is the full model."""

    number: int
    chunks: tuple[Stage, ...]
    parameters: int
    """Parameters of its layers, embedding and head, before sharding."""
    in_flight: int
    """Maximum number of micro-batches with saved activations at a time; with several chunks per rank, of (micro-batch,
    chunk) pairs.
    """
    memory: MemoryEstimate
    """Expected memory of a device of the stage, in bytes."""

    @property
    def embedding(self) -> bool:
        return any(chunk.embedding for chunk in self.chunks)

    @property
    def head(self) -> bool:
        return any(chunk.head for chunk in self.chunks)


@dataclass(frozen=True)
class Layout:
    """The layout of a run."""

    config: RunConfig
    coordinates: list[Coordinates]
    """Mesh coordinates by rank."""
    stages: list[StageLayout]
    """Stages by pipeline rank."""
    micro_batches: int
    """Micro-batches per step and data-parallel rank, at the full global batch size."""
    bubble: float
    """Bubble of the schedule if all stages take equal time and transfers take none, 0 to 1."""
    weighed_bubble: float
    """Bubble with stage times proportional to FLOPs, 0 to 1."""
    transfers: list[Transfer]
    """Communication of each axis."""

    @property
    def world_size(self) -> int:
        return len(self.coordinates)

    @property
    def size(self) -> Coordinates:
        """Size of each axis."""
        last = self.coordinates[-1]
        return Coordinates(last.pp + 1, last.dp + 1, last.cp + 1, last.tp + 1)

    @property
    def gathers(self) -> bool:
        """True if FSDP2 shards and gathers the dense parameters."""
        strategy = self.config.parallel.data_parallel_sharding_strategy
        return strategy != "no_shard" and self.size.dp * self.size.cp > 1

    def stage_of(self, rank: int) -> StageLayout:
        return self.stages[self.coordinates[rank].pp]


def build_layout(config: RunConfig, world_size: int, meta: MetaModel | None = None) -> Layout:
    """Return the layout of a run.

    Args:
        config: the configuration, with every `auto` resolved.
        world_size: number of processes.
        meta: the model, if it is counted already.

    Raises:
        ConfigError: the configuration is impossible on `world_size` processes.
    """
    parallel = config.parallel
    dp = data_parallel_size(parallel, world_size)
    axes = (
        parallel.pipeline_model_parallel_size,
        dp,
        parallel.context_parallel_size,
        parallel.tensor_model_parallel_size,
    )
    meta = meta or MetaModel(config.model, config.lora)
    assignment, micro_batches = assign_layers(config.model, parallel), _micro_batches(config, dp)
    several = parallel.pipeline_model_parallel_size > 1
    schedule = run_schedule(parallel, micro_batches) if several else None
    stages = [
        stage_layout(config, meta, world_size, chunks, schedule, micro_batches) for chunks in assignment
    ]
    bubble = weighed = 0.0
    if schedule is not None:
        bubble = simulate(schedule).bubble
        weighed = simulate(schedule, _durations(config, assignment)).bubble
    return Layout(
        config=config,
        coordinates=[Coordinates(*position) for position in product(*map(range, axes))],
        stages=stages,
        micro_batches=micro_batches,
        bubble=bubble,
        weighed_bubble=weighed,
        transfers=transfers(
            config, meta.on_rank(parallel), world_size, [stage.chunks for stage in stages], micro_batches
        ),
    )


def _micro_batches(config: RunConfig, dp: int) -> int:
    """Return the number of micro-batches per step and data-parallel rank."""
    batch = BatchSizeSchedule.from_config(config.train, dp)
    count = batch.global_batch_size // (config.train.micro_batch_size * dp)
    return padded_micro_batches(config.parallel, count) if config.parallel.dynamic_context_parallel else count


def fullest(config: RunConfig, world_size: int, meta: MetaModel | None = None) -> int:
    """Return the expected bytes on the fullest rank."""
    meta = meta or MetaModel(config.model, config.lora)
    parallel = config.parallel
    micro_batches = _micro_batches(config, data_parallel_size(parallel, world_size))
    several = parallel.pipeline_model_parallel_size > 1
    schedule = shortened_schedule(parallel, micro_batches)[0] if several else None
    assignment = assign_layers(config.model, parallel)
    stages = (
        stage_layout(config, meta, world_size, chunks, schedule, micro_batches) for chunks in assignment
    )
    return max(stage.memory.total for stage in stages)


def alternative(layout: Layout, settings: Mapping[str, Any]) -> Layout | None:
    """Return the run's layout with other settings ("section.field" → value), or None if they are rejected."""
    config = layout.config.with_settings(settings)
    try:
        check_layout(config, layout.world_size)
    except ConfigError:
        return None
    return build_layout(config, layout.world_size)


def stage_layout(
    config: RunConfig,
    meta: MetaModel,
    world_size: int,
    chunks: Sequence[Stage],
    schedule: Schedule | None,
    micro_batches: int,
) -> StageLayout:
    """Return the StageLayout of a pipeline rank. `schedule` has all micro-batches, or enough to reach the memory
    peak."""
    model = config.model
    layers = [len(layers_of(model, [chunk])) for chunk in chunks]
    in_flight, saved_layers = 1, sum(layers)
    if schedule is not None:
        in_flight = max_in_flight(schedule, chunks[0].rank, [1] * len(chunks))
        saved_layers = max_in_flight(schedule, chunks[0].rank, layers)
    parameters = meta.in_layers(layers_of(model, chunks)) + meta.outside(chunks)
    return StageLayout(
        number=chunks[0].rank,
        chunks=tuple(chunks),
        parameters=parameters.total() - parameters["adapters"],
        in_flight=in_flight,
        memory=StageMemory(
            config, meta.on_rank(config.parallel), world_size, chunks, saved_layers, micro_batches > 1
        ).estimate(),
    )


def max_in_flight(schedule: Schedule, rank: int, weights: Sequence[int]) -> int:
    """Return the maximum number of micro-batches in flight on `rank`.

    A micro-batch in chunk c counts as weights[c].
    """
    ends = Kind.BACKWARD_WEIGHT if schedule.kind == "zero_bubble" else Kind.BACKWARD
    current = most = 0
    for action in schedule.actions[rank]:
        if action.kind is Kind.FORWARD:
            current += weights[action.chunk]
            most = max(most, current)
        elif action.kind is ends:
            current -= weights[action.chunk]
    return most


def _durations(config: RunConfig, assignment: list[list[Stage]]) -> list[Durations]:
    """Return stage times proportional to FLOPs, in model order.

    A layer's forward pass, dgrad and wgrad take the same time. The loss computes the head's gradients in the forward
    pass (ops/cross_entropy.py).
    """
    data = config.data
    cost = flops_per_token(config.model, data.seq_length, config.lora, data.decoder_length)
    layer = (cost.causal - cost.head) / config.model.num_layers
    stages = sorted((chunk for chunks in assignment for chunk in chunks), key=lambda s: (s.chunk, s.rank))
    work = [max(len(stage.layers) * layer, 1.0) for stage in stages]
    return [Durations(each + 3 * stage.head * cost.head, each, each) for stage, each in zip(stages, work)]
