"""Every layout of a job that the trainer accepts and that fits the devices, by the time that a step takes.

The candidates are all sizes of tensor, context, pipeline and expert parallelism that divide the job, with chunks of
layers, micro-batch sizes, ways to shard and ways to recompute. What a candidate may be is asked of the trainer's own
rules. The model is counted once on the meta device; memory and time of a candidate are then arithmetic, with the
pipeline's bubble by its formula. Recomputation is tried from the cheapest on, and ends with the first that fits. The
best few are laid out in full and their pipelines simulated, with stages as unequal as they are.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalith.config import RunConfig
from megalith.config.rules.fastest import with_fastest
from megalith.config.rules.model_rules import check_model
from megalith.config.rules.parallel_rules import check_parallel, data_parallel_size
from megalith.config.rules.run_rules import check_fp8, check_training
from megalith.errors import ConfigError
from megalith.optim.optimizer import check_optimizer
from megalith.parallel.pipeline.pipeline_rules import check_layout
from megalith.parallel.pipeline.schedules import Schedule, in_flight_bound
from megalith.parallel.pipeline.stages import assign_layers, schedule_kind, suggested_layout, virtual_size
from megalith.planner.counts import MetaModel, Throughput, flops_per_token, layers_of, throughput
from megalith.planner.layout import USABLE, StageLayout, stage_layout, with_auto
from megalith.planner.memory import MemoryEstimate, StageMemory
from megalith.planner.rates import Rates, peak_flops, rates_of
from megalith.planner.step_time import StepTime, short_schedule, step_time
from megalith.progress import Progress

SPARE = 0.98, 3e9  # of a device's memory, for fragments; bytes of libraries and contexts
SIMULATED = 20  # of the best by formula
LARGEST_MICRO_BATCH = 2**16  # tokens
DEEP = 8  # layers of a stage from which on full recomputation takes least
SHORTEST_SHARD = 2048  # tokens of a sequence that a context-parallel rank has at least
PARALLEL = "parallel."
CLEAN = {  # what a search decides
    PARALLEL + name: value
    for name, value in {
        "tensor_model_parallel_size": 1, "sequence_parallel": False, "save_gathered_inputs": True,
        "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_virtual_pipeline_stage": None, "pipeline_schedule": "1f1b",
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None, "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False, "pipeline_model_parallel_layout": None,
        "context_parallel_size": 1, "cp_comm_type": "auto", "hierarchical_context_parallel_sizes": None,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
        "data_parallel_sharding_strategy": "no_shard", "num_distributed_optimizer_instances": 1,
        "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": 1,
        "recompute_modules": ["core_attn"], "distribute_saved_activations": False, "cpu_offloading_num_layers": 0,
        "tp_comm_overlap": "auto", "fsdp_unsharded_layers": "auto", "symmetric_memory_groups": "auto",
    }.items()
}  # fmt: skip
# From the cheapest on.
NO_GEMM = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp_act"]}
SHARDS = {"save_gathered_inputs": False}  # under SP
RECOMPUTED: list[dict[str, Any]] = [
    {},
    NO_GEMM,
    SHARDS,
    NO_GEMM | SHARDS,
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"], **SHARDS},
    {"recompute_granularity": "full", "recompute_method": "uniform"},
]
# What is tried where nothing fits otherwise, in this order.
OFFLOADED = {"optim.optimizer_cpu_offload": True, "optim.optimizer_offload_fraction": 1.0}
REDUCED = [{"optim.exp_avg_dtype": dtype, "optim.exp_avg_sq_dtype": dtype} for dtype in ("bf16", "fp8")]


@dataclass(frozen=True)
class PlannedLayout:
    """One layout of a job, with what it takes."""

    config: RunConfig
    settings: dict[str, Any]
    """Of CLEAN, those that are not the defaults, with the micro-batch."""
    world_size: int
    memory: list[MemoryEstimate]
    """Of a device of each pipeline rank; in a search of those that may be the fullest."""
    time: StepTime | None = None
    """None: not asked, since it does not fit."""
    speed: Throughput | None = None
    fits: bool = False

    @property
    def bytes(self) -> int:
        """On the fullest device."""
        return max(each.total for each in self.memory)

    @property
    def name(self) -> str:
        """As people write it: `TP8 PP16 DP64, micro-batch 1, optim, full recomputation`."""
        parallel, train = self.config.parallel, self.config.train
        sizes = {
            "TP": parallel.tensor_model_parallel_size,
            "PP": parallel.pipeline_model_parallel_size,
            "VP": virtual_size(parallel),
            "CP": parallel.context_parallel_size,
            "EP": parallel.expert_model_parallel_size,
        }
        dp = data_parallel_size(parallel, self.world_size)
        words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1] + [f"DP{dp}"]
        found = [
            " ".join(words),
            f"micro-batch {train.micro_batch_size}",
            parallel.data_parallel_sharding_strategy,
        ]
        if parallel.pipeline_schedule != "1f1b":
            found.append(parallel.pipeline_schedule)
        if granularity := parallel.recompute_granularity:
            modules = " + ".join(parallel.recompute_modules) if granularity == "selective" else "full"
            found.append(f"recomputed: {modules}")
        if not parallel.save_gathered_inputs:
            found.append("gathered again")
        if self.config.optim.reduces_moments:
            found.append(
                f"moments in {self.config.optim.exp_avg_dtype} and {self.config.optim.exp_avg_sq_dtype}"
            )
        if self.config.optim.optimizer_cpu_offload:
            found.append("optimizer state on the host")
        return ", ".join(found)


@dataclass
class PlanAnswer:
    """What `plan` has found."""

    config: RunConfig
    gpus: int
    gpus_per_node: int
    rates: Rates
    usable: float
    """Bytes of a device that a layout may take."""
    best: list[PlannedLayout] = field(default_factory=list)
    """By time."""
    too_large: list[PlannedLayout] = field(default_factory=list)
    """The nearest to fitting of those that do not fit."""
    refused: Counter[str] = field(default_factory=Counter)
    """The trainer's sentences, and how many candidates each refused."""
    tried: int = 0
    fitting: int = 0

    def days(self, layout: PlannedLayout, tokens: float) -> float:
        """For so many tokens, without any interruption."""
        return tokens / (layout.speed.tokens_per_second_per_device * self.gpus) / 86400


def plan(
    config: RunConfig,
    gpus: int,
    device: str | None = None,
    *,
    gpus_per_node: int = 8,
    top: int = 10,
    rates: Rates | None = None,
    show_progress: bool = False,
) -> PlanAnswer:
    """The layouts of `config`'s job on `gpus` devices, the fastest first; its own layout is not looked at.

    `device`: the driver's name or a short one like H100; None: the H200, whose rates were measured. Raises ConfigError
    for a name that is not known, and where a model cannot be trained in any layout: with the trainer's own sentence.
    """
    if gpus < 1 or gpus_per_node < 1:
        raise ConfigError(f"--gpus is {gpus} and --gpus-per-node {gpus_per_node}; give 1 or more")
    check_model(config.model)
    rates = rates or rates_of(device)
    answer = PlanAnswer(config, gpus, gpus_per_node, rates, usable_bytes(rates))
    search = _Search(answer, show_progress)
    check_training(search.clean.with_settings({"train.micro_batch_size": 1}), 1)
    check_optimizer(config.optim)
    search.run({})
    adam, reduced = config.optim.optimizer in ("adamw", "adam"), config.optim.reduces_moments
    for smaller in [*(REDUCED if adam else []), *([] if reduced else [OFFLOADED])]:
        if not answer.fitting:
            search.run(smaller)
    if not answer.tried:
        raise ConfigError(
            answer.refused.most_common(1)[0][0] if answer.refused else "there is no layout to try"
        )
    finalists = heapq.nsmallest(max(SIMULATED, 2 * top), search.found, key=lambda each: each.time.seconds)
    exact = []
    with Progress("simulate", len(finalists), "layouts", show=show_progress) as progress:
        for each in finalists:
            exact += [done] if (done := search.exact(each)) is not None else []
            progress.add()
    answer.best = sorted((each for each in exact if each.fits), key=lambda each: each.time.seconds)[:top]
    answer.too_large = heapq.nsmallest(top, search.too_large, key=lambda each: each.bytes)
    return answer


def usable_bytes(rates: Rates) -> float:
    """Of a device, for what the estimate counts."""
    share, libraries = SPARE
    return rates.wiring.memory * 1e9 * share - libraries


def planned(config: RunConfig, gpus: int, rates: Rates, gpus_per_node: int = 8) -> PlannedLayout:
    """The layout that `config` says, in full. Raises ConfigError where the trainer refuses it."""
    check_layout(config, gpus)
    check_optimizer(config.optim)
    answer = PlanAnswer(config, gpus, gpus_per_node, rates, usable_bytes(rates))
    search = _Search(answer)
    return search.laid_out(config, {})


class _Search:
    def __init__(self, answer: PlanAnswer, show_progress: bool = False):
        self.answer, self.config, self.show_progress = answer, answer.config, show_progress
        self.world, self.rates = answer.gpus, answer.rates
        self.meta = MetaModel(self.config.model, self.config.lora)
        model, data, lora = self.config.model, self.config.data, self.config.lora
        self.flops = flops_per_token(model, data.seq_length, lora, data.decoder_length).causal
        self.machine = self.rates.machine(self.world, answer.gpus_per_node)
        self.found: list[PlannedLayout] = []
        self.too_large: list[PlannedLayout] = []
        self.tight = False
        self.clean = self.config.with_settings(CLEAN | {"optim.optimizer_cpu_offload": False})

    def run(self, more: Mapping[str, Any]) -> None:
        """Tries every candidate, with these settings besides."""
        candidates = [sizes | further for sizes in self._sizes() for further in self._further(sizes)]
        with Progress("plan", len(candidates), "candidates", show=self.show_progress) as progress:
            for candidate in candidates:
                gathers = candidate[PARALLEL + "sequence_parallel"]
                ways = [way for way in RECOMPUTED if gathers or "save_gathered_inputs" not in way]
                if (chosen := self._chosen(settings := candidate | more)) is not None:
                    self._recompute(chosen, settings, ways)
                progress.add()

    def _chosen(self, settings: dict[str, Any]) -> RunConfig | None:
        """With what is fastest for `auto`, whatever is recomputed; None where the trainer refuses it."""
        try:
            return with_fastest(self.clean.with_settings(settings), self.machine)[0]
        except ConfigError as error:
            self.answer.refused[str(error)] += 1
            return None

    def _recompute(self, chosen: RunConfig, settings: dict[str, Any], ways: list[dict[str, Any]]) -> None:
        """Tries the ways to recompute, until one fits. Of a stage with many layers the last takes least, so where it
        does not fit, the others need not be tried; after a layout of which none has fitted it comes first."""
        *ways, full = ways
        layers = self.config.model.num_layers // chosen.parallel.pipeline_model_parallel_size
        ask, least = layers >= DEEP, None
        if ask and self.tight:
            ask, least = False, self._try(chosen, settings, full)
        for way in ways:
            if least is not None and not least.fits:
                break
            layout = self._try(chosen, settings, way)
            if layout is not None and self._count(layout):
                return
            if ask and layout is not None:
                ask, least = False, self._try(chosen, settings, full)
        least = least or self._try(chosen, settings, full)
        self.tight = least is not None and not self._count(least)

    def _count(self, layout: PlannedLayout) -> bool:
        """Whether it fits."""
        self.answer.tried += 1
        self.answer.fitting += layout.fits
        (self.found if layout.fits else self.too_large).append(layout)
        return layout.fits

    def _try(self, chosen: RunConfig, settings: dict[str, Any], way: dict[str, Any]) -> PlannedLayout | None:
        """By arithmetic; None where the trainer refuses it."""
        try:
            parallel = chosen.parallel.model_copy(update=way)  # unchecked: the values are those of RECOMPUTED
            config = chosen.model_copy(update={"parallel": parallel})
            check_parallel(config, self.world)
            check_fp8(config)
            assignment = assign_layers(config.model, config.parallel)
        except ConfigError as error:
            self.answer.refused[str(error)] += 1
            return None
        dp = data_parallel_size(config.parallel, self.world)
        micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * dp)
        config, memory = self._gathered(config, assignment, micro_batches)
        settings = settings | {PARALLEL + name: value for name, value in way.items()}
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
        self, config: RunConfig, assignment: list, micro_batches: int
    ) -> tuple[RunConfig, list[MemoryEstimate]]:
        """With fsdp_unsharded_layers for the search: all layers or none; `laid_out` has what the trainer chooses."""
        auto = config.parallel.fsdp_unsharded_layers == "auto"
        if auto and config.parallel.data_parallel_sharding_strategy == "optim_grads_params":
            parallel = config.parallel.model_copy(update={"fsdp_unsharded_layers": config.model.num_layers})
            every = config.model_copy(update={"parallel": parallel})
            memory = self._memory(every, assignment, micro_batches)
            if max(each.total for each in memory) <= USABLE * self.rates.wiring.memory * 1e9:
                return every, memory
        return config, self._memory(config, assignment, micro_batches)

    def _memory(self, config: RunConfig, assignment: list, micro_batches: int) -> list[MemoryEstimate]:
        """Of the ranks that may be the fullest: the first, which holds most, the second, the last with the head."""
        parallel, meta = config.parallel, self.meta.on_rank(config.parallel)
        ranks, found = len(assignment), []
        for rank in sorted({0, min(1, ranks - 1), ranks - 1}):
            chunks = assignment[rank]
            layers = len(layers_of(config.model, chunks))
            held = layers
            if ranks > 1:
                kind, virtual = schedule_kind(parallel), len(chunks)
                form = Schedule(kind, ranks, micro_batches, virtual, ranks, [])
                held = -(-in_flight_bound(form, rank) * layers // virtual)
            estimate = StageMemory(config, meta, self.world, chunks, held, micro_batches > 1)
            found.append(estimate.estimate())
        return found

    def exact(self, layout: PlannedLayout) -> PlannedLayout | None:
        """The same, every stage laid out and the pipeline simulated; None where the trainer refuses it after all."""
        try:
            check_layout(layout.config, self.world)
        except ConfigError as error:
            self.answer.refused[str(error)] += 1
            return None
        return self.laid_out(layout.config, layout.settings)

    def laid_out(self, config: RunConfig, settings: dict[str, Any]) -> PlannedLayout:
        if PARALLEL + "fsdp_unsharded_layers" not in settings and settings:
            config = config.with_settings({PARALLEL + "fsdp_unsharded_layers": "auto"})
        config, _ = with_auto(config, self.world, self.machine, self.meta)
        stages = self.stages(config)
        memory = [stage.memory for stage in stages]
        return self._timed(config, settings, memory)

    def stages(self, config: RunConfig) -> list[StageLayout]:
        parallel = config.parallel
        dp = data_parallel_size(parallel, self.world)
        micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * dp)
        schedule = (
            short_schedule(parallel, micro_batches)[0] if parallel.pipeline_model_parallel_size > 1 else None
        )
        return [
            stage_layout(config, self.meta, self.world, chunks, schedule, micro_batches)
            for chunks in assign_layers(config.model, parallel)
        ]

    def _sizes(self) -> Iterator[dict[str, Any]]:
        """Tensor, context, pipeline and expert parallelism whose product divides the job."""
        model, seq, node = self.config.model, self.config.data.seq_length, self.answer.gpus_per_node
        experts = model.num_experts
        for tensor in _divisors(self.world, most=node):
            for context in _divisors(self.world // tensor, most=max(seq // SHORTEST_SHARD, 1)):
                if context & (context - 1) or seq % (2 * context * tensor):
                    continue
                for pipeline in _divisors(self.world // tensor // context, most=model.num_layers + 2):
                    stage = self.world // pipeline
                    for expert in [e for e in _divisors(stage) if experts % e == 0] if experts else [1]:
                        yield {
                            PARALLEL + "tensor_model_parallel_size": tensor,
                            PARALLEL + "sequence_parallel": tensor > 1,
                            PARALLEL + "context_parallel_size": context,
                            PARALLEL + "pipeline_model_parallel_size": pipeline,
                            PARALLEL + "expert_model_parallel_size": expert,
                        }

    def _further(self, sizes: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Micro-batches, chunks of layers, and what is sharded."""
        tensor, _, context, pipeline, _ = sizes.values()
        ranks = self.world // (tensor * pipeline)
        dp, batch = ranks // context, self.config.train.global_batch_size
        if batch % dp:
            return
        longest = max(LARGEST_MICRO_BATCH * context // self.config.data.seq_length, 1)
        micros = [2**power for power in range(7) if 2**power <= longest and batch // dp % 2**power == 0]
        strategies = ["no_shard"] if ranks == 1 else ["optim", "no_shard"]
        if ranks > 1 and pipeline == 1:
            strategies += ["optim_grads", "optim_grads_params"]
        for micro in micros:
            for split in self._splits(pipeline, batch // dp // micro):
                for strategy in strategies:
                    yield {
                        "train.micro_batch_size": micro,
                        PARALLEL + "data_parallel_sharding_strategy": strategy,
                        **{PARALLEL + name: value for name, value in split.items()},
                    }

    def _splits(self, pipeline: int, micro_batches: int) -> Iterator[dict[str, Any]]:
        """How the layers are assigned, and the schedule."""
        if pipeline == 1:
            yield {}
            return
        if micro_batches < pipeline:
            return
        layers, found = self.config.model.num_layers, False
        ends = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
        for counted, accounts in ((0, {}), (2, ends)):
            if (layers + counted) % pipeline:
                continue
            each, found = (layers + counted) // pipeline, True
            for virtual in _divisors(each, most=10):
                if virtual == 1:
                    if not counted or pipeline > 2:  # of two stages either way is the even split
                        yield accounts
                    if not counted:
                        yield {"pipeline_schedule": "zero_bubble"}
                elif micro_batches % pipeline == 0:
                    yield accounts | {"virtual_pipeline_model_parallel_size": virtual}
        if not found:
            yield {"pipeline_model_parallel_layout": suggested_layout(layers, pipeline)}


def _divisors(value: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(value, most or value) + 1) if value % size == 0]


def longest_sequence(
    config: RunConfig, gpus: int, rates: Rates, gpus_per_node: int = 8, show_progress: bool = False
) -> PlanAnswer | None:
    """The answer for the longest sequence, a multiple of 1,024, of which some layout fits; the tokens of a step stay
    about as many. None where not even 1,024 tokens fit."""
    tokens = config.train.global_batch_size * config.data.seq_length

    def fitting(blocks: int) -> PlanAnswer | None:
        seq = 1024 * blocks
        positions = max(seq, config.model.max_position_embeddings or 0)
        batch = max(2 ** max(tokens // seq, 1).bit_length() // 2, 1)
        asked = {
            "data.seq_length": seq,
            "model.max_position_embeddings": positions,
            "train.global_batch_size": batch,
        }
        try:
            found = plan(config.with_settings(asked), gpus, rates=rates, gpus_per_node=gpus_per_node, top=1)
        except ConfigError:
            return None
        finally:
            progress.update(progress.done + 1, f"{seq:,} tokens tried")
        return found if found.best else None

    low, best = 0, None
    blocks = 1
    with Progress("longest sequence", None, show=show_progress) as progress:
        while blocks <= 2**14 and (found := fitting(blocks)) is not None:
            low, best, blocks = blocks, found, 2 * blocks
        step = low // 2
        while step >= max(low // 8, 1):  # to an eighth
            if (found := fitting(low + step)) is not None:
                low, best = low + step, found
            step //= 2
    return best


def with_batch(config: RunConfig, seq_length: int | None, global_batch_size: int | None) -> RunConfig:
    """With another sequence length and batch; positions that are too few for it are raised."""
    asked: dict[str, Any] = {}
    if seq_length is not None:
        asked["data.seq_length"] = seq_length
    seq = seq_length or config.data.seq_length
    if (config.model.max_position_embeddings or 0) < seq:
        asked["model.max_position_embeddings"] = seq
    if global_batch_size is not None:
        asked["train.global_batch_size"] = global_batch_size
    return config.with_settings(asked)


def preset_config(preset: str, gpus: int, seq_length: int | None, global_batch_size: int | None) -> RunConfig:
    """A pre-training job of a preset in bf16: its sequence up to 8,192 tokens, a sequence for every eight GPUs."""
    config = RunConfig.from_tree(
        {
            "model": {"preset": preset},
            "data": {"mock": True},
            "optim": {"lr": 1e-4},
            "train": {"train_iters": 1, "precision": "bf16", "global_batch_size": 1},
        }
    )
    seq = seq_length or min(config.model.max_position_embeddings or 4096, 8192)
    batch = global_batch_size or max(64, 2 ** (max(gpus // 8, 1) - 1).bit_length())
    return with_batch(config, seq, batch)


def changed(layout: PlannedLayout) -> dict[str, dict[str, Any]]:
    """The settings of a layout that are not the defaults, section → key → value, for a run file."""
    tree: dict[str, dict[str, Any]] = {}
    for path, value in layout.settings.items():
        section, _, name = path.partition(".")
        if CLEAN.get(path, ...) != value:
            tree.setdefault(section, {})[name] = value
    return tree
