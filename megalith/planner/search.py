"""Search for a job's fastest layouts, among those that the trainer accepts and that fit the devices.

Candidates combine all sizes of tensor, context, pipeline and expert parallelism that divide the world size with
pipeline splits, micro-batch sizes, sharding and recomputation. They are validated with the trainer's own checks. The
model is counted once on the meta device; memory and time of a candidate are then arithmetic, with a formula for the
bubble. Recomputation is tried in order of cost until a candidate fits. The best layouts are then computed in full, with
simulated pipelines.
"""

from __future__ import annotations

import heapq
from bisect import bisect, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from megalith.config import RunConfig, require_run_config
from megalith.config.rules.auto_settings import resolve_auto
from megalith.config.rules.fp8_rules import check_fp8
from megalith.config.rules.model_rules import check_model
from megalith.config.rules.parallel_rules import check_parallel, data_parallel_size
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.optim.optimizer import check_optimizer
from megalith.parallel.pipeline.pipeline_rules import check_layout
from megalith.parallel.pipeline.schedules import Schedule, in_flight_bound
from megalith.parallel.pipeline.stages import Stage, assign_layers, schedule_kind, shortened_schedule
from megalith.planner.candidates import (
    ACTIVATIONS,
    BY_MEMORY,
    CHEAP,
    OFFLOADED,
    PARALLEL,
    RECOMPUTED,
    REDUCED,
    SEARCHED_DEFAULTS,
    candidates,
    least_batch,
)
from megalith.planner.counts import MetaModel, layers_of
from megalith.planner.flops import flops_per_token, throughput
from megalith.planner.layout import StageLayout, stage_layout
from megalith.planner.memory import MemoryEstimate, StageMemory
from megalith.planner.memory_choices import USABLE, with_auto
from megalith.planner.plan_result import PlannedLayout, PlanResult
from megalith.planner.rates import Rates, check_precision, peak_flops, rates_of
from megalith.planner.saved_activations import saved_activations
from megalith.planner.step_time import step_time
from megalith.progress import Progress

SPARE = 0.98, 3e9  # usable fraction of the memory, because of fragmentation; bytes of libraries and contexts
SHARDED = (PARALLEL + "data_parallel_sharding_strategy", PARALLEL + "fsdp_unsharded_layers")
MAX_SIMULATED = 20  # of the best layouts by formula
DEEP = 8  # layers per stage from which full recomputation needs the least memory

Assignment = list[list[Stage]]  # chunks of layers by pipeline rank


def plan(
    config: RunConfig,
    gpus: int,
    device: str | None = None,
    *,
    gpus_per_node: int = 8,
    top: int = 10,
    rates: Rates | None = None,
    memory_gb: float | None = None,
    show_progress: bool = False,
) -> PlanResult:
    """Search for the fastest layouts of a job on `gpus` devices. The layout in `config` is ignored.

    Args:
        config: settings of the job, such as model, batch and sequence length.
        gpus: number of devices.
        device: the driver's name or a short one like H100. None means H200, the only chip with measured rates.
        gpus_per_node: devices per node.
        top: number of layouts to return.
        rates: rates of the chip, instead of `device`.
        memory_gb: memory per device that the job may use, in 10^9 bytes. None means all of it.
        show_progress: show a progress bar.

    Returns:
        The layouts, fastest first.

    Raises:
        ConfigError: `gpus` or `gpus_per_node` is below 1, the device is unknown or lacks the job's precision, the
            model is invalid, or no layout can train it (with the trainer's message).
    """
    require_run_config(config, "megalith.plan")
    if gpus < 1 or gpus_per_node < 1:
        raise ConfigError(
            f"--gpus is {gpus} and --gpus-per-node {gpus_per_node}, but both must be at least 1"
        )
    check_model(config.model)
    rates = rates or rates_of(device)
    check_precision(config, rates)
    answer = PlanResult(config, gpus, gpus_per_node, rates, usable_bytes(rates, memory_gb))
    search = _Search(answer, memory_gb is not None, show_progress)
    check_training(search.clean.with_settings({"train.micro_batch_size": 1}), 1)
    check_optimizer(config.optim)
    search.run()
    adam, reduced = config.optim.optimizer in ("adamw", "adam"), config.optim.reduces_moments
    for smaller in [*(REDUCED if adam else []), *([] if reduced else [OFFLOADED])]:
        if not answer.fitting:
            search.run_again(smaller, top)
    if not answer.tried:
        least = least_batch(config, gpus, gpus_per_node)
        has_message = answer.refused and config.train.global_batch_size >= least
        raise ConfigError(answer.refused.most_common(1)[0][0] if has_message else _too_few(answer, least))
    finalists = heapq.nsmallest(
        max(MAX_SIMULATED, 2 * top), search.fitting, key=lambda each: each.time.seconds
    )
    exact = []
    with Progress("simulate", len(finalists), "layouts", show=show_progress) as progress:
        for each in finalists:
            exact += [done] if (done := search.exact(each)) is not None else []
            progress.add()
    fitting = sorted((each for each in exact if each.fits), key=lambda each: each.time.seconds)
    answer.best = list(_distinct(fitting))[:top]
    too_large = [*search.too_large, *(each for each in exact if not each.fits)]
    answer.too_large = heapq.nsmallest(top, too_large, key=lambda each: each.bytes)
    return answer


def _distinct(layouts: Iterable[PlannedLayout]) -> Iterator[PlannedLayout]:
    """Yield distinct layouts. Layouts with equal time and memory that differ only in sharding count as duplicates.

    For example, `optim_grads_params` with all layers kept gathered equals `optim_grads`.
    """
    seen = set()
    for each in layouts:
        others = each.config.model_dump()
        for path in SHARDED:
            section, _, name = path.partition(".")
            del others[section][name]
        key = (each.time.seconds, each.bytes, repr(others))
        if key not in seen:
            seen.add(key)
            yield each


def _too_few(answer: PlanResult, least: int) -> str:
    batch = answer.config.train.global_batch_size
    return (
        f"train.global_batch_size is {batch}, but {answer.gpus} GPUs need {least} or a multiple "
        "of it, with a sequence for each replica and a micro-batch for each pipeline stage; "
        "change train.global_batch_size, or use fewer --gpus"
    )


def usable_bytes(rates: Rates, memory_gb: float | None = None) -> float:
    """Return the usable bytes per device, at most `memory_gb`. Raises ConfigError if the device has less."""
    share, libraries = SPARE
    usable = rates.wiring.memory * 1e9 * share - libraries
    if memory_gb is None:
        return usable
    if memory_gb * 1e9 > usable:
        raise ConfigError(
            f"--memory-gb is {memory_gb:g}, but a job can use only {usable / 1000000000.0:.1f} of {rates.device}'s "
            f"{rates.wiring.memory:g} GB; lower --memory-gb, or leave it out"
        )
    return memory_gb * 1e9


def planned(
    config: RunConfig, gpus: int, rates: Rates, gpus_per_node: int = 8, memory_gb: float | None = None
) -> PlannedLayout:
    """Evaluate the layout in `config`. Raises ConfigError if the trainer rejects it."""
    check_layout(config, gpus)
    check_optimizer(config.optim)
    check_precision(config, rates)
    answer = PlanResult(config, gpus, gpus_per_node, rates, usable_bytes(rates, memory_gb))
    search = _Search(answer, memory_gb is not None)
    return search.laid_out(config, {})


@dataclass(frozen=True)
class _Candidate:
    """A candidate that the trainer accepts, before recomputation is chosen."""

    chosen: RunConfig
    """Configuration with every speed-related `auto` resolved."""
    assignment: Assignment
    settings: dict[str, Any]
    ways: list[dict[str, Any]]
    """Ways to recompute, in order of cost."""


class _Search:
    def __init__(self, answer: PlanResult, limited: bool = False, show_progress: bool = False):
        """Prepare a search.

        `limited`: the search may use less memory than the devices have, a limit that the run itself does not know.
        """
        self.answer, self.config, self.show_progress = answer, answer.config, show_progress
        self.limited = limited
        self.world, self.rates = answer.gpus, answer.rates
        self.meta = MetaModel(self.config.model, self.config.lora)
        model, data, lora = self.config.model, self.config.data, self.config.lora
        self.flops = flops_per_token(model, data.seq_length, lora, data.decoder_length).causal
        self.machine = self.rates.machine(self.world, answer.gpus_per_node)
        if limited:
            self.machine = replace(self.machine, memory=int(answer.usable / USABLE))
        self.fitting: list[PlannedLayout] = []
        self.too_large: list[PlannedLayout] = []
        self.without_state: list[tuple[float, _Candidate]] = []
        """(smallest memory without optimizer state, candidate) of the candidates that do not fit in any variant."""
        self.tight = False
        self.clean = self.config.with_settings(SEARCHED_DEFAULTS | {"optim.optimizer_cpu_offload": False})
        on_rank = self.meta.on_rank(self.clean.parallel)
        every = range(self.config.model.num_layers)
        saves = any(
            saved_activations(on_rank, number, recomputed=["mlp_act"]) < saved_activations(on_rank, number)
            for number in on_rank.kinds(every)
        )
        # ACTIVATIONS saves nothing if every MLP consists of experts.
        self.ways = [way for way in RECOMPUTED if saves or way is not ACTIVATIONS]

    def run(self) -> None:
        """Estimate every candidate layout."""
        every = list(candidates(self.config, self.world, self.answer.gpus_per_node))
        with Progress("plan", len(every), "candidates", show=self.show_progress) as progress:
            for settings in every:
                if (candidate := self._candidate(settings)) is not None:
                    self._recompute(candidate)
                progress.add()

    def run_again(self, more: Mapping[str, Any], nearest: int) -> None:
        """Try candidates again with settings that reduce the optimizer state.

        Args:
            more: the settings.
            nearest: number of candidates to try that would not fit even without optimizer state.
        """
        every = list(self.without_state)
        sizes = sorted(least for least, _ in every)
        most = max(sizes[: bisect(sizes, self.answer.usable) + nearest], default=0)
        near = [candidate for least, candidate in every if least <= most]
        for each in near:
            chosen = each.chosen.with_unvalidated(more)
            self._recompute(replace(each, chosen=chosen, settings=each.settings | more))
        self.without_state = every

    def _candidate(self, settings: dict[str, Any]) -> _Candidate | None:
        """Return the candidate with these settings. None if the trainer rejects it."""
        try:
            chosen, _ = resolve_auto(self.clean.with_unvalidated(settings), self.machine)
            assignment = assign_layers(chosen.model, chosen.parallel)
        except ConfigError as error:
            self.answer.refused[str(error)] += 1
            return None
        gathers = settings[PARALLEL + "sequence_parallel"]
        ways = [way for way in self.ways if gathers or "save_gathered_inputs" not in way]
        return _Candidate(chosen, assignment, settings, ways)

    def _recompute(self, candidate: _Candidate) -> None:
        """Try the recomputation methods, in order of cost, until one fits without FSDP2 gathering layers again.

        If a method fits only with layers gathered again, the cheap methods are tried too, because they may be faster.
        With many layers per stage, full recomputation needs the least memory. If it does not fit, no other method is
        tried. Full recomputation is tried first if no method fit for the previous candidate.
        """
        *ways, full = candidate.ways
        slower = [{}, *CHEAP[:-1]]  # with layers gathered again slower than the next way without
        attempt = partial(self._try, candidate)
        layers = self.config.model.num_layers // candidate.chosen.parallel.pipeline_model_parallel_size
        try_full, least = layers >= DEEP, None
        first = len(self.too_large)
        if try_full and self.tight:
            try_full, least = False, attempt(full)
        for way in ways:
            if least is not None and not least.fits:
                break
            layout = attempt(way)
            fits = layout is not None and self._count(layout)
            if fits and not (way in slower and _regathers(layout)):
                return
            if try_full and layout is not None:
                try_full, least = False, attempt(full)
        least = least or attempt(full)
        self.tight = least is not None and not self._count(least)
        tried = self.too_large[first:]
        if tried and (least is None or self.tight):
            self.without_state.append((min(map(_without_state, tried)), candidate))

    def _count(self, layout: PlannedLayout) -> bool:
        """Record a layout and return True if it fits."""
        self.answer.tried += 1
        self.answer.fitting += layout.fits
        (self.fitting if layout.fits else self.too_large).append(layout)
        return layout.fits

    def _try(self, candidate: _Candidate, way: dict[str, Any]) -> PlannedLayout | None:
        """Estimate a layout by formula. Returns None if the trainer rejects it."""
        recomputation = {PARALLEL + name: value for name, value in way.items()}
        try:
            config = candidate.chosen.with_unvalidated(recomputation)
            check_parallel(config, self.world)
            check_fp8(config)
        except ConfigError as error:
            self.answer.refused[str(error)] += 1
            return None
        dp = data_parallel_size(config.parallel, self.world)
        micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * dp)
        config, memory = self._gathered(config, candidate.assignment, micro_batches)
        settings = candidate.settings | recomputation
        if max(each.total for each in memory) > self.answer.usable:
            return PlannedLayout(config, settings, self.world, memory)
        return self._timed(config, settings, memory, exact=False)

    def _timed(self, config: RunConfig, settings: dict, memory: list, exact: bool = True) -> PlannedLayout:
        time = step_time(config, self.meta, self.world, self.rates, self.answer.gpus_per_node, exact)
        tokens = config.train.global_batch_size * config.data.seq_length
        peak = peak_flops(self.rates, config.train.peak_dtype)
        speed = throughput(tokens, time.seconds, self.world, self.flops, peak)
        fits = max(each.total for each in memory) <= self.answer.usable
        return PlannedLayout(config, settings, self.world, memory, time, speed, fits)

    def _gathered(
        self, config: RunConfig, assignment: Assignment, micro_batches: int
    ) -> tuple[RunConfig, list[MemoryEstimate]]:
        """Resolve fsdp_unsharded_layers as the trainer does, and return the memory."""
        auto = config.parallel.fsdp_unsharded_layers == "auto"
        if not auto or config.parallel.data_parallel_sharding_strategy != "optim_grads_params":
            return config, self._memory(config, assignment, micro_batches)

        @cache
        def keeping(number: int) -> tuple[RunConfig, list[MemoryEstimate]]:
            kept = config.with_unvalidated({PARALLEL + "fsdp_unsharded_layers": number})
            return kept, self._memory(kept, assignment, micro_batches)

        def expected(number: int) -> int:
            return max(each.total for each in keeping(number)[1])

        room = USABLE * self.machine.memory
        none, most = keeping(0), max(len(chunk.layers) for chunks in assignment for chunk in chunks)
        if max(each.total for each in none[1]) > room:
            return none
        number = most if expected(most) <= room else bisect_right(range(1, most), room, key=expected)
        return keeping(number)

    def _memory(self, config: RunConfig, assignment: Assignment, micro_batches: int) -> list[MemoryEstimate]:
        """Estimate the ranks that may need the most memory: the first, the second, and the last with the head."""
        parallel, meta = config.parallel, self.meta.on_rank(config.parallel)
        ranks, estimates = len(assignment), []
        for rank in sorted({0, min(1, ranks - 1), ranks - 1}):
            chunks = assignment[rank]
            layers = len(layers_of(config.model, chunks))
            in_flight = layers
            if ranks > 1:
                kind, virtual = schedule_kind(parallel), len(chunks)
                form = Schedule(kind, ranks, micro_batches, virtual, ranks, [])
                in_flight = -(-in_flight_bound(form, rank) * layers // virtual)
            estimate = StageMemory(config, meta, self.world, chunks, in_flight, micro_batches > 1)
            estimates.append(estimate.estimate())
        return estimates

    def exact(self, layout: PlannedLayout) -> PlannedLayout | None:
        """Evaluate a layout in full, with a simulated pipeline. Returns None if the trainer rejects it."""
        try:
            check_layout(layout.config, self.world)
        except ConfigError as error:
            self.answer.refused[str(error)] += 1
            return None
        return self.laid_out(layout.config, layout.settings)

    def laid_out(self, config: RunConfig, settings: dict[str, Any]) -> PlannedLayout:
        if PARALLEL + "fsdp_unsharded_layers" not in settings and settings:
            config = config.with_settings({PARALLEL + "fsdp_unsharded_layers": "auto"})
        unresolved = config
        config, _ = with_auto(config, self.world, self.machine, self.meta)
        if self.limited and settings:
            unlimited = self.rates.machine(self.world, self.answer.gpus_per_node)
            settings = settings | _by_memory(
                with_auto(unresolved, self.world, unlimited, self.meta)[0], config
            )
        stages = self.stages(config)
        memory = [stage.memory for stage in stages]
        return self._timed(config, settings, memory)

    def stages(self, config: RunConfig) -> list[StageLayout]:
        parallel = config.parallel
        dp = data_parallel_size(parallel, self.world)
        micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * dp)
        schedule = (
            shortened_schedule(parallel, micro_batches)[0]
            if parallel.pipeline_model_parallel_size > 1
            else None
        )
        return [
            stage_layout(config, self.meta, self.world, chunks, schedule, micro_batches)
            for chunks in assign_layers(config.model, parallel)
        ]


def _regathers(layout: PlannedLayout) -> bool:
    """Return True if FSDP frees some layers and gathers them again."""
    parallel = layout.config.parallel
    chunks = (chunk for chunks in assign_layers(layout.config.model, parallel) for chunk in chunks)
    freed = parallel.unsharded_layers < max(len(chunk.layers) for chunk in chunks)
    return parallel.data_parallel_sharding_strategy == "optim_grads_params" and freed


def _without_state(layout: PlannedLayout) -> int:
    return max(each.total - each.optimizer for each in layout.memory)


def _by_memory(unlimited: RunConfig, limited: RunConfig) -> dict[str, Any]:
    """Return the settings that differ because memory is limited."""
    settings = {}
    for paths in BY_MEMORY:
        by_memory, by_less = (
            {path: _value(config, path) for path in paths} for config in (unlimited, limited)
        )
        if by_less != by_memory:
            settings |= by_less
    return settings


def _value(config: RunConfig, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)
