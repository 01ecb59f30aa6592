"""A run's layout from its configuration and number of processes, with expected memory, bubble and communication.

No process or device is needed. This file also resolves the settings whose `auto` depends on the device's memory.
`layout_text.py` prints a layout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megalith.config import ParallelConfig, RunConfig
from megalith.config.rules.auto_settings import Machine, auto_note, resolve_auto
from megalith.config.rules.expert_rules import (
    expert_data_parallel_size,
    has_grouped_kernel,
    is_static,
    ranks_of_a_token,
)
from megalith.config.rules.parallel_rules import (
    check_parallel,
    data_parallel_size,
    saved_attention_obstacle,
)
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError
from megalith.parallel.fp8_linears import casts_weights_once
from megalith.parallel.mesh import Coordinates
from megalith.parallel.pipeline.pipeline_rules import check_layout
from megalith.parallel.pipeline.schedules import Kind, Schedule
from megalith.parallel.pipeline.simulate import Durations, simulate
from megalith.parallel.pipeline.stages import Stage, assign_layers, run_schedule, shortened_schedule
from megalith.planner.candidates import CHEAP, PARALLEL, RECOMPUTED, SHARDS
from megalith.planner.counts import MetaModel, layers_of
from megalith.planner.flops import flops_per_token
from megalith.planner.memory import MemoryEstimate, StageMemory
from megalith.planner.traffic import Transfer, transfers


@dataclass(frozen=True)
class StageLayout:
    """The part of the model on one pipeline rank. Without a pipeline there is one, with the full model."""

    number: int
    chunks: tuple[Stage, ...]
    parameters: int
    """Parameters of its layers, embedding and head, before sharding."""
    in_flight: int
    """Maximum of micro-batches with saved activations; with several chunks per rank, of (micro-batch, chunk) pairs."""
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
    """Bubble of the schedule with equal stages and free transfers, 0 to 1."""
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
    return batch.global_batch_size // (config.train.micro_batch_size * dp)


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


def with_auto(
    config: RunConfig, world_size: int, machine: Machine, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """Resolve every `auto` that depends on the machine, for trainer and planner.

    Returns:
        The configuration, and a line with the choices if there were any.
    """
    config, choices = resolve_auto(config, machine)
    meta = meta or (MetaModel(config.model, config.lora) if machine.memory else None)
    config, again = with_recomputation(config, world_size, machine.memory, meta)
    config, attention = with_saved_attention(config, world_size, machine.memory, meta)
    config, dispatch = with_static_dispatch(config, world_size, machine, meta)
    config, unsharded = with_unsharded_layers(config, world_size, machine.memory, meta)
    config, cached = with_cached_weights(config, world_size, machine.memory, meta)
    config, experts = with_cached_experts(config, world_size, machine.memory, meta)
    return config, auto_note(choices + again + attention + dispatch + unsharded + cached + experts)


MAX_COPIES = 1.25  # tokens sent by static dispatch, relative to an all-to-all of exact sizes
WORTH_CHEAP = 1 / 8  # gathering this fraction of the layers again takes as long as CHEAP in all layers
USABLE = 0.9  # of a GPU's memory; the rest is for fragmentation, libraries and the estimate's error


def with_unsharded_layers(
    config: RunConfig, world_size: int, memory: int, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """Choose fsdp_unsharded_layers if it is `auto`: as many layers as are expected to fit.

    Args:
        config: the run.
        world_size: number of ranks.
        memory: memory of a device in bytes; 0 if unknown.
        meta: the model on the meta device. Default: built from `config`.

    Returns:
        The configuration, and a note on the choice and its reason, if there was one.
    """
    if config.parallel.fsdp_unsharded_layers != "auto":
        return config, []
    most = _layers_to_keep(config, world_size) if memory else 0
    if not most:
        return _keeping(config, 0), []
    meta = meta or MetaModel(config.model, config.lora)

    def expected(number: int) -> int:
        return fullest(_keeping(config, number), world_size, meta)

    number = bisect_right(range(1, most + 1), USABLE * memory, key=expected)
    figures = f"{expected(number) / 1e9:.1f} GB expected on a GPU of {memory / 1e9:.1f}"
    return _keeping(config, number), [f"parallel.fsdp_unsharded_layers {number} of {most} ({figures})"]


def _layers_to_keep(config: RunConfig, world_size: int) -> int:
    """Return the largest number that `auto` of fsdp_unsharded_layers may choose."""
    parallel = config.parallel
    sharded = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    ranks = world_size // parallel.tensor_model_parallel_size // parallel.pipeline_model_parallel_size
    if parallel.fsdp_unsharded_layers != "auto" or not sharded or ranks == 1:
        return 0
    return max(len(chunk.layers) for chunks in assign_layers(config.model, parallel) for chunk in chunks)


def _keeping(config: RunConfig, number: int) -> RunConfig:
    return config.with_settings({"parallel.fsdp_unsharded_layers": number})


def with_saved_attention(
    config: RunConfig, world_size: int, memory: int, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """Choose recompute_saves_attention if it is `auto`. Arguments and result are those of `with_unsharded_layers`."""
    parallel = config.parallel
    if parallel.recompute_granularity != "full" or parallel.recompute_saves_attention != "auto":
        return config, []
    on, off = (config.with_settings({"parallel.recompute_saves_attention": value}) for value in (True, False))
    if not memory:
        return off, []
    why, fits = saved_attention_obstacle(config.model, parallel), False
    if not why:
        expected = fullest(on, world_size, meta)
        fits = expected <= USABLE * memory
        why = f"{expected / 1e9:.1f} GB expected{'' if fits else ' with true'} on a GPU of {memory / 1e9:.1f}"
    return on if fits else off, [f"parallel.recompute_saves_attention {str(fits).lower()} ({why})"]


def with_recomputation(
    config: RunConfig, world_size: int, memory: int, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """Resolve `auto` of activation_memory_budget. Arguments and result as in `with_unsharded_layers`.

    If a run without recomputation is not expected to fit, choose the first way in RECOMPUTED that fits. If none fits,
    choose the one that needs the least memory, unless the device has less. The ways in CHEAP cost less than FSDP
    gathering layers again, so they are also chosen if clearly fewer layers are then gathered again.
    """
    if config.runtime.activation_memory_budget != "auto":
        return config, []
    config = config.with_settings({"runtime.activation_memory_budget": 1.0})
    if not memory or config.parallel.recompute_granularity is not None:
        return config, []
    meta = meta or MetaModel(config.model, config.lora)
    kept = _layers_to_keep(config, world_size)

    def expected(way: RunConfig, number: int) -> int:
        way = _keeping(way, number) if kept else way
        return min(fullest(each, world_size, meta) for each in with_casts(way))

    def fits(way: RunConfig, number: int) -> bool:
        return expected(way, number) <= USABLE * memory

    def chosen(way: RunConfig, number: int) -> tuple[RunConfig, list[str]]:
        if way is config:
            return config, []
        figures = f"{expected(way, number) / 1e9:.1f} {device}, else {expected(config, number) / 1e9:.1f}"
        if fits(config, number):
            figures += " and fewer layers gathered"
        return way, [f"{_recomputed_by(config.parallel, way.parallel)} ({figures})"]

    device = f"GB expected on a GPU of {memory / 1e9:.1f}"

    def layers_kept(way: RunConfig) -> int:
        return bisect_right(range(1, kept + 1), USABLE * memory, key=lambda number: expected(way, number))

    options = [(config, 0), *((way, 0) for way in _recomputing(config, world_size, RECOMPUTED[1:]))]
    if kept:
        cheap = [config, *_recomputing(config, world_size, CHEAP)]
        fewest = min(cheap, key=lambda way: expected(way, 0))
        more = layers_kept(fewest) - layers_kept(config)
        options = [*((way, kept) for way in cheap), *[(fewest, 0)] * (more >= WORTH_CHEAP * kept), *options]
    for way, number in options:
        if fits(way, number):
            return chosen(way, number)
    least, _ = min(options, key=lambda each: expected(each[0], 0))
    if expected(least, 0) < memory:
        return chosen(least, 0)
    figures = f"{expected(config, 0) / 1e9:.1f} {device}, and {expected(least, 0) / 1e9:.1f} at least"
    return config, [f"parallel.recompute_granularity null ({figures}; see `megalith plan`)"]


def _recomputed_by(configured: ParallelConfig, parallel: ParallelConfig) -> str:
    """Return as text the settings that make `parallel` recompute more, or gather tokens again, than `configured`."""
    granularity, reasons = parallel.recompute_granularity, []
    if granularity is not None:
        modules = f" of {' and '.join(parallel.recompute_modules)}" if granularity == "selective" else ""
        reasons.append(f"parallel.recompute_granularity {granularity}{modules}")
    if parallel.save_gathered_inputs != configured.save_gathered_inputs:
        reasons.append("parallel.save_gathered_inputs false")
    return " and ".join(reasons)


def _recomputing(
    config: RunConfig, world_size: int, ways: Sequence[Mapping[str, Any]]
) -> Iterator[RunConfig]:
    """Yield `config` with each of these ways to recompute that is valid for it."""
    for way in ways:
        if SHARDS.keys() & way.keys() and not config.parallel.sequence_parallel:
            continue
        try:
            changed = config.with_settings({PARALLEL + name: value for name, value in way.items()})
            check_parallel(changed, world_size)
        except ConfigError:  # as under zero_bubble
            continue
        yield changed


def with_static_dispatch(
    config: RunConfig, world_size: int, machine: Machine, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """Choose moe_static_dispatch if it is `auto`. The result is that of `with_unsharded_layers`.

    It becomes true with expert parallelism if a grouped GEMM kernel reads the number of rows on the device, if few more
    tokens are sent than without it, and if the layout is expected to fit.
    """
    model, parallel = config.model, config.parallel
    size = parallel.expert_model_parallel_size
    if parallel.moe_static_dispatch != "auto" or not model.num_experts or size == 1:
        return config, []
    on, off = (config.with_settings({"parallel.moe_static_dispatch": value}) for value in (True, False))
    met = ranks_of_a_token(model, size)
    sends_more = parallel.moe_token_dispatcher_type == "alltoall" and size > MAX_COPIES * met
    if not machine.memory or not is_static(model, on.parallel) or parallel.dynamic_context_parallel:
        return off, []
    setting, why = "parallel.moe_static_dispatch", f"{met:.1f} of {size} ranks have experts of a token"
    if not has_grouped_kernel(model, parallel, config.train.precision):
        return off, [f"{setting} false (no grouped kernel takes these experts)"]
    if sends_more:
        return off, [f"{setting} false ({why}: it would send {size / met:.1f} times as much)"]
    return _where_it_fits(on, off, setting, world_size, machine.memory, meta, f"{why}, ")


def with_cached_weights(
    config: RunConfig, world_size: int, memory: int, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """Choose fp8_cache_weights if it is `auto`. Arguments and result are those of `with_unsharded_layers`."""
    train, parallel = config.train, config.parallel
    if train.fp8_format is None or train.fp8_cache_weights != "auto":
        return config, []
    on, off = (config.with_settings({"train.fp8_cache_weights": value}) for value in (True, False))
    if not memory or not casts_weights_once(on):
        return off, []
    dp = data_parallel_size(parallel, world_size)
    passes = BatchSizeSchedule.from_config(train, dp).global_batch_size // (train.micro_batch_size * dp)
    again = passes > 1 or parallel.recompute_granularity is not None or parallel.overlaps
    expected, at_use = (fullest(each, world_size, meta) for each in (on, off))
    if expected <= at_use:
        figures = f"{expected / 1e9:.1f} GB expected, with false {at_use / 1e9:.1f}"
        return on, [f"train.fp8_cache_weights true ({figures})"]
    return (
        _where_it_fits(on, off, "train.fp8_cache_weights", world_size, memory, meta) if again else (off, [])
    )


def with_casts(config: RunConfig) -> list[RunConfig]:
    """Return `config` with each value that `auto` of fp8_cache_weights may choose, the preferred one first."""
    train = config.train
    if train.fp8_format is None or train.fp8_cache_weights != "auto":
        return [config]
    on, off = (config.with_unvalidated({"train.fp8_cache_weights": value}) for value in (True, False))
    return [on, off] if casts_weights_once(on) else [off]


def with_cached_experts(
    config: RunConfig, world_size: int, memory: int, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """Choose moe_cache_weights if it is `auto`. Arguments and result are those of `with_unsharded_layers`."""
    train, parallel = config.train, config.parallel
    if train.moe_cache_weights != "auto":
        return config, []
    on, off = (config.with_settings({"train.moe_cache_weights": value}) for value in (True, False))
    gathered = parallel.data_parallel_sharding_strategy != "no_shard"
    stored = train.precision == "bf16" and config.lora.rank is not None  # frozen, in what matmuls take
    if not memory or config.model.num_experts is None or train.precision == "fp32" or stored:
        return off, []
    if gathered and expert_data_parallel_size(parallel, world_size) > 1:
        return off, []
    return _where_it_fits(on, off, "train.moe_cache_weights", world_size, memory, meta)


def _where_it_fits(
    on: RunConfig,
    off: RunConfig,
    setting: str,
    world_size: int,
    memory: int,
    meta: MetaModel | None,
    why: str = "",
) -> tuple[RunConfig, list[str]]:
    """Return `on` if it is expected to fit into `memory`, else `off`; and the choice with its reason."""
    expected = fullest(on, world_size, meta)
    fits = expected <= USABLE * memory
    with_it = "" if fits else " with true"
    figures = f"{why}{expected / 1e9:.1f} GB expected{with_it} on a GPU of {memory / 1e9:.1f}"
    return on if fits else off, [f"{setting} {str(fits).lower()} ({figures})"]


def alternative(layout: Layout, settings: Mapping[str, Any]) -> Layout | None:
    """Return the run's layout with other settings ("section.field" → value); None if they are rejected."""
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
    """Return the maximum number of micro-batches in flight on `rank`; a micro-batch in chunk c counts weights[c]."""
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
    """Return stage times proportional to FLOPs, in the order of the model.

    A layer's forward pass, dgrad and wgrad take the same time. The loss computes the head's gradients in the forward
    pass (ops/cross_entropy.py).
    """
    data = config.data
    cost = flops_per_token(config.model, data.seq_length, config.lora, data.decoder_length)
    layer = (cost.causal - cost.head) / config.model.num_layers
    stages = sorted((chunk for chunks in assignment for chunk in chunks), key=lambda s: (s.chunk, s.rank))
    work = [max(len(stage.layers) * layer, 1.0) for stage in stages]
    return [Durations(each + 3 * stage.head * cost.head, each, each) for stage, each in zip(stages, work)]
