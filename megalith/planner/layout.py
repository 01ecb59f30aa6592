"""How a run is laid out, from its configuration and the number of processes: what is where, and what that costs.

Nothing here starts a process or a device, so a layout can be looked at without one. `layout_text.py` puts it on the
screen.
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
from megalith.planner.counts import MetaModel, flops_per_token, layers_of
from megalith.planner.memory import MemoryEstimate, StageMemory
from megalith.planner.traffic import Transfer, transfers


@dataclass(frozen=True)
class StageLayout:
    """What the ranks of one pipeline rank have. Without a pipeline there is one, with everything."""

    number: int
    chunks: tuple[Stage, ...]
    parameters: int
    """Of all its layers, embedding and head, whole."""
    in_flight: int
    """The most micro-batches (with several chunks a rank: micro-batches in a chunk) whose activations are held."""
    memory: MemoryEstimate
    """Expected, on a device of the stage, in bytes."""

    @property
    def embedding(self) -> bool:
        return any(chunk.embedding for chunk in self.chunks)

    @property
    def head(self) -> bool:
        return any(chunk.head for chunk in self.chunks)


@dataclass(frozen=True)
class Layout:
    """A run over `coordinates` ranks."""

    config: RunConfig
    coordinates: list[Coordinates]
    """By rank."""
    stages: list[StageLayout]
    """By pipeline rank."""
    micro_batches: int
    """Of a data-parallel rank in a step, at the full global batch size."""
    bubble: float
    """The share of time that the schedule makes ranks wait, for equal stages and free transfers, 0 to 1."""
    weighed_bubble: float
    """The same for stages that take as long as they have FLOPs."""
    transfers: list[Transfer]
    """What each axis moves."""

    @property
    def world_size(self) -> int:
        return len(self.coordinates)

    @property
    def size(self) -> Coordinates:
        """The size of each axis."""
        last = self.coordinates[-1]
        return Coordinates(last.pp + 1, last.dp + 1, last.cp + 1, last.tp + 1)

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 shards the dense parameters, and gathers them."""
        strategy = self.config.parallel.data_parallel_sharding_strategy
        return strategy != "no_shard" and self.size.dp * self.size.cp > 1

    def stage_of(self, rank: int) -> StageLayout:
        return self.stages[self.coordinates[rank].pp]


def build_layout(config: RunConfig, world_size: int, meta: MetaModel | None = None) -> Layout:
    """The layout of a resolved `config` on `world_size` processes; `meta`: its model, where that has been counted.
    Raises ConfigError where there is none."""
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
        coordinates=[Coordinates(*place) for place in product(*map(range, axes))],
        stages=stages,
        micro_batches=micro_batches,
        bubble=bubble,
        weighed_bubble=weighed,
        transfers=transfers(
            config, meta.on_rank(parallel), world_size, [stage.chunks for stage in stages], micro_batches
        ),
    )


def _micro_batches(config: RunConfig, dp: int) -> int:
    """Of a step."""
    batch = BatchSizeSchedule.from_config(config.train, dp)
    return batch.global_batch_size // (config.train.micro_batch_size * dp)


def fullest(config: RunConfig, world_size: int, meta: MetaModel | None = None) -> int:
    """Bytes that are expected on the rank that has most."""
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
    """`config` without an `auto` that hangs on the machine, and a line of what was chosen, where something was: the
    trainer's choices, and so the planner's. `meta`: the model, where that has been counted."""
    config, choices = resolve_auto(config, machine)
    meta = meta or (MetaModel(config.model, config.lora) if machine.memory else None)
    config, again = with_recomputation(config, world_size, machine.memory, meta)
    config, attention = with_saved_attention(config, world_size, machine.memory, meta)
    config, dispatch = with_static_dispatch(config, world_size, machine, meta)
    config, unsharded = with_unsharded_layers(config, world_size, machine.memory, meta)
    config, cached = with_cached_weights(config, world_size, machine.memory, meta)
    config, experts = with_cached_experts(config, world_size, machine.memory, meta)
    return config, auto_note(choices + again + attention + dispatch + unsharded + cached + experts)


MOST_COPIES = 1.25  # times the tokens that an all-to-all of exact sizes sends
WORTH_CHEAP = 1 / 8  # of the layers: to gather so many again takes as long as what is cheap in all of them
USABLE = 0.9  # of a GPU's memory: the rest is the allocator's, the libraries', and what the estimate is off


def with_unsharded_layers(
    config: RunConfig, world_size: int, memory: int, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """`config` without an `auto` of fsdp_unsharded_layers, and what was chosen, with its reason, where layers were: as
    many as are expected to fit into `memory`, bytes of a device (0: not known, none)."""
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
    """The most that an `auto` of fsdp_unsharded_layers may choose."""
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
    """`config` without an `auto` of recompute_saves_attention, and what was chosen; `memory` as above."""
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
    """`config` without an `auto` of activation_memory_budget, and what was chosen: of a run that recomputes nothing and
    is not expected to fit so the first of RECOMPUTED that is, and where none is what takes least, if the device has
    that. What is CHEAP also before layers are gathered again, which costs more, and so that fewer are. `memory` as
    above."""
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

    every = [(config, 0), *((way, 0) for way in _recomputing(config, world_size, RECOMPUTED[1:]))]
    if kept:
        cheap = [config, *_recomputing(config, world_size, CHEAP)]
        fewest = min(cheap, key=lambda way: expected(way, 0))
        more = layers_kept(fewest) - layers_kept(config)
        every = [*((way, kept) for way in cheap), *[(fewest, 0)] * (more >= WORTH_CHEAP * kept), *every]
    for way, number in every:
        if fits(way, number):
            return chosen(way, number)
    least, _ = min(every, key=lambda each: expected(each[0], 0))
    if expected(least, 0) < memory:
        return chosen(least, 0)
    figures = f"{expected(config, 0) / 1e9:.1f} {device}, and {expected(least, 0) / 1e9:.1f} at least"
    return config, [f"parallel.recompute_granularity null ({figures}; see `megalith plan`)"]


def _recomputed_by(given: ParallelConfig, parallel: ParallelConfig) -> str:
    """The settings of `parallel` that are not as `given`, by which it recomputes or gathers tokens again."""
    granularity, said = parallel.recompute_granularity, []
    if granularity is not None:
        modules = f" of {' and '.join(parallel.recompute_modules)}" if granularity == "selective" else ""
        said.append(f"parallel.recompute_granularity {granularity}{modules}")
    if parallel.save_gathered_inputs != given.save_gathered_inputs:
        said.append("parallel.save_gathered_inputs false")
    return " and ".join(said)


def _recomputing(
    config: RunConfig, world_size: int, ways: Sequence[Mapping[str, Any]]
) -> Iterator[RunConfig]:
    """`config` with each of the ways that it can recompute in."""
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
    """`config` without an `auto` of moe_static_dispatch, where experts are spread over ranks, and what was chosen: true
    where the kernels of a GPU read the rows' numbers themselves, few more tokens travel, and it is expected to fit."""
    model, parallel = config.model, config.parallel
    size = parallel.expert_model_parallel_size
    if parallel.moe_static_dispatch != "auto" or not model.num_experts or size == 1:
        return config, []
    on, off = (config.with_settings({"parallel.moe_static_dispatch": value}) for value in (True, False))
    met = ranks_of_a_token(model, size)
    sends_more = parallel.moe_token_dispatcher_type == "alltoall" and size > MOST_COPIES * met
    if not machine.memory or not is_static(model, on.parallel):
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
    """`config` without an `auto` of fp8_cache_weights, and what was chosen where memory decides; `memory` as above."""
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
    """`config` with each of what an `auto` of fp8_cache_weights may choose: it takes the first where that takes no more
    memory, and otherwise if it fits."""
    train = config.train
    if train.fp8_format is None or train.fp8_cache_weights != "auto":
        return [config]
    on, off = (config.with_unvalidated({"train.fp8_cache_weights": value}) for value in (True, False))
    return [on, off] if casts_weights_once(on) else [off]


def with_cached_experts(
    config: RunConfig, world_size: int, memory: int, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """`config` without an `auto` of moe_cache_weights, and what was chosen where memory decides; `memory` as above."""
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
    """`on` where that is expected to fit into `memory`, else `off`; and which it is, with its reason."""
    expected = fullest(on, world_size, meta)
    fits = expected <= USABLE * memory
    with_it = "" if fits else " with true"
    figures = f"{why}{expected / 1e9:.1f} GB expected{with_it} on a GPU of {memory / 1e9:.1f}"
    return on if fits else off, [f"{setting} {str(fits).lower()} ({figures})"]


def alternative(layout: Layout, settings: Mapping[str, Any]) -> Layout | None:
    """The layout of the same run with other settings ("section.field" → value); None where they are refused."""
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
    """What a pipeline rank has. `schedule`: of all micro-batches, or of as many as show the fullest moment."""
    model = config.model
    layers = [len(layers_of(model, [chunk])) for chunk in chunks]
    in_flight, held = 1, sum(layers)
    if schedule is not None:
        in_flight = most_held(schedule, chunks[0].rank, [1] * len(chunks))
        held = most_held(schedule, chunks[0].rank, layers)
    whole = meta.in_layers(layers_of(model, chunks)) + meta.outside(chunks)
    return StageLayout(
        number=chunks[0].rank,
        chunks=tuple(chunks),
        parameters=whole.total() - whole["adapters"],
        in_flight=in_flight,
        memory=StageMemory(
            config, meta.on_rank(config.parallel), world_size, chunks, held, micro_batches > 1
        ).estimate(),
    )


def most_held(schedule: Schedule, rank: int, weights: Sequence[int]) -> int:
    """The most that `rank` holds between forward and backward passes, a micro-batch in chunk c counting weights[c]."""
    ends = Kind.BACKWARD_WEIGHT if schedule.kind == "zero_bubble" else Kind.BACKWARD
    held = most = 0
    for action in schedule.actions[rank]:
        if action.kind is Kind.FORWARD:
            held += weights[action.chunk]
            most = max(most, held)
        elif action.kind is ends:
            held -= weights[action.chunk]
    return most


def _durations(config: RunConfig, assignment: list[list[Stage]]) -> list[Durations]:
    """How long each stage takes by its FLOPs, in the model's order.

    A layer's forward pass, dgrad and wgrad are alike; the loss makes the head's gradients in the
    forward pass (ops/cross_entropy.py).
    """
    data = config.data
    cost = flops_per_token(config.model, data.seq_length, config.lora, data.decoder_length)
    layer = (cost.causal - cost.head) / config.model.num_layers
    stages = sorted((chunk for chunks in assignment for chunk in chunks), key=lambda s: (s.chunk, s.rank))
    work = [max(len(stage.layers) * layer, 1.0) for stage in stages]
    return [Durations(each + 3 * stage.head * cost.head, each, each) for stage, each in zip(stages, work)]
