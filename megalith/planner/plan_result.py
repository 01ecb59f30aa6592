"""What a plan has found: layouts of a job with their memory, time and speed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megalith.config import RunConfig
from megalith.config.rules.parallel_rules import data_parallel_size
from megalith.parallel.pipeline.stages import virtual_size
from megalith.planner.candidates import CLEAN, PARALLEL
from megalith.planner.counts import Throughput
from megalith.planner.memory import MemoryEstimate
from megalith.planner.rates import Rates
from megalith.planner.step_time import StepTime


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
        if PARALLEL + "fsdp_unsharded_layers" in self.settings:
            number = parallel.fsdp_unsharded_layers
            found.append("1 layer stays gathered" if number == 1 else f"{number} layers stay gathered")
        if self.config.optim.reduces_moments:
            dtypes = {self.config.optim.exp_avg_dtype: 1, self.config.optim.exp_avg_sq_dtype: 2}
            found.append(f"moments in {' and '.join(dtypes)}")
        if self.config.optim.optimizer_cpu_offload:
            found.append("optimizer state on the host")
        return ", ".join(found)


@dataclass
class PlanResult:
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


def changed(layout: PlannedLayout) -> dict[str, dict[str, Any]]:
    """The settings of a layout that are not the defaults, section → key → value, for a run file."""
    tree: dict[str, dict[str, Any]] = {}
    for path, value in layout.settings.items():
        section, _, name = path.partition(".")
        if CLEAN.get(path, ...) != value:
            tree.setdefault(section, {})[name] = value
    return tree
