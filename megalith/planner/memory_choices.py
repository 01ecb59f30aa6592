"""Resolves settings whose value `auto` depends on device memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
from megalith.parallel.pipeline.stages import assign_layers
from megalith.planner.candidates import CHEAP, PARALLEL, RECOMPUTED, SHARDS
from megalith.planner.counts import MetaModel
from megalith.planner.layout import fullest


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
    """Resolve fsdp_unsharded_layers `auto` to the largest number of layers that are expected to fit.

    Args:
        config: the run.
        world_size: number of ranks.
        memory: memory of a device in bytes, or 0 if unknown.
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
    """Return the maximum for fsdp_unsharded_layers `auto`."""
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
    """Choose recompute_saves_attention if it is `auto`. See `with_unsharded_layers` for arguments and result."""
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
    """Resolve `auto` of activation_memory_budget. Arguments and result are the same as in `with_unsharded_layers`.

    If a run without recomputation is not expected to fit, choose the first method in RECOMPUTED that fits. If none
    fits, choose the one that needs the least memory, unless the device has less. The methods in CHEAP take less time
    than gathering layers again with FSDP. They are therefore also chosen if the memory that they free keeps clearly
    more layers gathered.
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
    """Return, as text, the settings in `parallel` that recompute or re-gather more than `configured` does."""
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
    """Yield `config` with each recomputation method in `ways` that is valid for it."""
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
    """Choose moe_static_dispatch if it is `auto`. The result is as in `with_unsharded_layers`. The setting becomes true
    with expert parallelism if three conditions hold: a grouped GEMM kernel reads the number of rows on the device,
    static dispatch sends only few more tokens, and the layout is expected to fit.
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
    return _enable_if_it_fits(on, off, setting, world_size, machine.memory, meta, f"{why}, ")


def with_cached_weights(
    config: RunConfig, world_size: int, memory: int, meta: MetaModel | None = None
) -> tuple[RunConfig, list[str]]:
    """Choose fp8_cache_weights if it is `auto`. See `with_unsharded_layers` for arguments and result."""
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
        _enable_if_it_fits(on, off, "train.fp8_cache_weights", world_size, memory, meta)
        if again
        else (off, [])
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
    """Choose moe_cache_weights if it is `auto`. See `with_unsharded_layers` for arguments and result."""
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
    return _enable_if_it_fits(on, off, "train.moe_cache_weights", world_size, memory, meta)


def _enable_if_it_fits(
    on: RunConfig,
    off: RunConfig,
    setting: str,
    world_size: int,
    memory: int,
    meta: MetaModel | None,
    why: str = "",
) -> tuple[RunConfig, list[str]]:
    """Return `on` if it is expected to fit into `memory`, otherwise `off`, with a text that gives the choice and the
    reason.
    """
    expected = fullest(on, world_size, meta)
    fits = expected <= USABLE * memory
    with_it = "" if fits else " with true"
    figures = f"{why}{expected / 1e9:.1f} GB expected{with_it} on a GPU of {memory / 1e9:.1f}"
    return on if fits else off, [f"{setting} {str(fits).lower()} ({figures})"]
