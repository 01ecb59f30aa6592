"""Results of the layout search: layouts with their memory, time and speed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megalith.config import RunConfig
from megalith.config.rules.parallel_rules import data_parallel_size
from megalith.parallel.pipeline.stages import virtual_size
from megalith.planner.candidates import PARALLEL, SEARCHED_DEFAULTS
from megalith.planner.flops import Throughput
from megalith.planner.memory import MemoryEstimate
from megalith.planner.rates import Rates
from megalith.planner.step_time import StepTime


@dataclass(frozen=True)
class PlannedLayout:
    """One layout of a job with its estimated memory and time."""

    config: RunConfig
    settings: dict[str, Any]
    """Settings of SEARCHED_DEFAULTS that differ from the defaults, and the micro-batch size."""
    world_size: int
    memory: list[MemoryEstimate]
    """Memory per device of each pipeline rank. During the search, only ranks that may need the most memory are listed.
    """
    time: StepTime | None = None
    """Estimated time of a step; None if the layout does not fit."""
    speed: Throughput | None = None
    fits: bool = False

    @property
    def bytes(self) -> int:
        """Memory of the fullest device."""
        return max(each.total for each in self.memory)

    @property
    def name(self) -> str:
        """The layout in short form: `TP8 PP16 DP64, micro-batch 1, optim, recomputed: full`."""
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
        parts = [
            " ".join(words),
            f"micro-batch {train.micro_batch_size}",
            parallel.data_parallel_sharding_strategy,
        ]
        if parallel.pipeline_schedule != "1f1b":
            parts.append(parallel.pipeline_schedule)
        if granularity := parallel.recompute_granularity:
            modules = " + ".join(parallel.recompute_modules) if granularity == "selective" else "full"
            parts.append(f"recomputed: {modules}")
        if not parallel.save_gathered_inputs:
            parts.append("gathered again")
        if PARALLEL + "fsdp_unsharded_layers" in self.settings:
            number = parallel.fsdp_unsharded_layers
            parts.append("1 layer stays gathered" if number == 1 else f"{number} layers stay gathered")
        if self.config.optim.reduces_moments:
            dtypes = {self.config.optim.exp_avg_dtype: 1, self.config.optim.exp_avg_sq_dtype: 2}
            parts.append(f"moments in {' and '.join(dtypes)}")
        if self.config.optim.optimizer_cpu_offload:
            parts.append("optimizer state on the host")
        return ", ".join(parts)


@dataclass
class PlanResult:
    """Result of `plan`."""

    config: RunConfig
    gpus: int
    gpus_per_node: int
    rates: Rates
    usable: float
    """Memory per device that a layout may use, in bytes."""
    best: list[PlannedLayout] = field(default_factory=list)
    """The best layouts, fastest first."""
    too_large: list[PlannedLayout] = field(default_factory=list)
    """Layouts that do not fit, smallest first."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of candidates that the trainer rejected, by its error message."""
    tried: int = 0
    fitting: int = 0

    def days(self, layout: PlannedLayout, tokens: float) -> float:
        """Return the days to train on `tokens` tokens without interruption."""
        return tokens / (layout.speed.tokens_per_second_per_device * self.gpus) / 86400


def changed(layout: PlannedLayout) -> dict[str, dict[str, Any]]:
    """Return a layout's settings that differ from the defaults: section → key → value, as in a run file."""
    tree: dict[str, dict[str, Any]] = {}
    for path, value in layout.settings.items():
        section, _, name = path.partition(".")
        if SEARCHED_DEFAULTS.get(path, ...) != value:
            tree.setdefault(section, {})[name] = value
    return tree
