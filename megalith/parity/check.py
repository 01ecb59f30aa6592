"""Run one job in many layouts and compare each with one process.

The layouts use each single axis, every pair of axes, and triples, with variants. parity/sizes.py makes the
configuration small.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.config import RunConfig
from megalith.errors import ConfigError, nearest_of
from megalith.launch.pool import Pool, RankFailed
from megalith.parity.differences import Errors, compare
from megalith.parity.job import run_job
from megalith.training.build import prepare


@dataclass(frozen=True)
class ParityLayout:
    """A layout: the number of processes, and settings of section `parallel`."""

    processes: int
    parallel: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """True if the layout needs a model with experts."""
        return any("expert" in setting for setting in self.parallel)


TP2 = {"tensor_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}
SP = {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2, "cp_comm_type": "p2p"}
CP4 = {"context_parallel_size": 4, "cp_comm_type": "p2p"}
GATHER = {"cp_comm_type": "all_gather"}
A2A = {"cp_comm_type": "a2a"}
A2A_P2P = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
PP2 = {"pipeline_model_parallel_size": 2}
PP3 = {"pipeline_model_parallel_size": 3}
PP4 = {"pipeline_model_parallel_size": 4}
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
ZERO_BUBBLE = {"pipeline_schedule": "zero_bubble"}
ZERO1 = {"data_parallel_sharding_strategy": "optim"}
ZERO2 = {"data_parallel_sharding_strategy": "optim_grads"}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
TWO_COPIES = {"num_distributed_optimizer_instances": 2}
UNEVEN = {"decoder_first_pipeline_num_layers": 3}
EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
EP8 = {"expert_model_parallel_size": 8}
ETP2 = {"expert_tensor_parallel_size": 2}
STATIC = {"moe_static_dispatch": True}
TOKENS_GATHERED = {"moe_token_dispatcher_type": "allgather"}
PING_PONG = {"tp_comm_overlap": True}
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}

# The remaining factor of the processes is data parallelism. Layouts with stages are for a model of 4 layers.
LAYOUTS: dict[str, ParityLayout] = {
    # each axis alone
    "tp2": ParityLayout(2, TP2),
    "tp4": ParityLayout(4, TP4),
    "tp2-sp": ParityLayout(2, TP2 | SP),
    "tp4-sp": ParityLayout(4, TP4 | SP),
    "cp2": ParityLayout(2, CP2),
    "cp2-auto": ParityLayout(2, {"context_parallel_size": 2}),
    "cp2-all_gather": ParityLayout(2, CP2 | GATHER),
    "cp2-a2a": ParityLayout(2, CP2 | A2A),
    "cp4": ParityLayout(4, CP4),
    "cp4-all_gather": ParityLayout(4, CP4 | GATHER),
    "cp4-a2a": ParityLayout(4, CP4 | A2A),
    "cp4-a2a+p2p": ParityLayout(4, CP4 | A2A_P2P),
    "pp2": ParityLayout(2, PP2),
    "pp4": ParityLayout(4, PP4),
    "pp2-interleaved": ParityLayout(2, PP2 | VIRTUAL),
    "pp4-interleaved": ParityLayout(4, PP4 | {"pipeline_model_parallel_layout": "E|t|t||t||t|L"}),
    "pp2-zero_bubble": ParityLayout(2, PP2 | ZERO_BUBBLE),
    "pp4-zero_bubble": ParityLayout(4, PP4 | ZERO_BUBBLE),
    "pp2-uneven": ParityLayout(2, PP2 | UNEVEN),
    "pp3-counted": ParityLayout(3, PP3 | COUNTED),
    "pp4-uneven": ParityLayout(4, PP4 | {"pipeline_model_parallel_layout": "Ett||t|tL"}),
    "dp2": ParityLayout(2),
    "dp4": ParityLayout(4),
    "dp2-zero1": ParityLayout(2, ZERO1),
    "dp4-zero1": ParityLayout(4, ZERO1),
    "dp2-zero2": ParityLayout(2, ZERO2),
    "dp4-zero2": ParityLayout(4, ZERO2),
    "dp2-zero3": ParityLayout(2, ZERO3),
    "dp4-zero3": ParityLayout(4, ZERO3),
    "dp4-zero1-hybrid": ParityLayout(4, ZERO1 | TWO_COPIES),
    "dp4-zero2-hybrid": ParityLayout(4, ZERO2 | TWO_COPIES),
    "dp4-zero3-hybrid": ParityLayout(4, ZERO3 | TWO_COPIES),
    # every pair
    "tp2-cp2": ParityLayout(4, TP2 | CP2),
    "tp2-sp-cp2": ParityLayout(4, TP2 | SP | CP2),
    "tp2-cp2-all_gather": ParityLayout(4, TP2 | CP2 | GATHER),
    "tp2-sp-cp2-a2a": ParityLayout(4, TP2 | SP | CP2 | A2A),
    "tp2-pp2": ParityLayout(4, TP2 | PP2),
    "tp2-sp-pp2": ParityLayout(4, TP2 | SP | PP2),
    "tp2-pp2-interleaved": ParityLayout(4, TP2 | PP2 | VIRTUAL),
    "tp2-sp-pp2-zero_bubble": ParityLayout(4, TP2 | SP | PP2 | ZERO_BUBBLE),
    "tp2-dp2": ParityLayout(4, TP2),
    "tp2-sp-dp2-zero1": ParityLayout(4, TP2 | SP | ZERO1),
    "tp2-dp2-zero2": ParityLayout(4, TP2 | ZERO2),
    "tp2-sp-dp2-zero3": ParityLayout(4, TP2 | SP | ZERO3),
    "cp2-pp2": ParityLayout(4, CP2 | PP2),
    "cp2-a2a-pp2-interleaved": ParityLayout(4, CP2 | A2A | PP2 | VIRTUAL),
    "cp2-all_gather-pp2-zero_bubble": ParityLayout(4, CP2 | GATHER | PP2 | ZERO_BUBBLE),
    "cp2-dp2": ParityLayout(4, CP2),
    "cp2-a2a-dp2-zero1": ParityLayout(4, CP2 | A2A | ZERO1),
    "cp2-dp2-zero2": ParityLayout(4, CP2 | ZERO2),
    "cp2-dp2-zero3": ParityLayout(4, CP2 | ZERO3),
    "cp2-dp2-zero3-hybrid": ParityLayout(4, CP2 | ZERO3 | TWO_COPIES),
    "pp2-dp2": ParityLayout(4, PP2),
    "pp2-dp2-zero1": ParityLayout(4, PP2 | ZERO1),
    "pp2-dp2-zero2": ParityLayout(4, PP2 | ZERO2),
    "pp2-dp2-zero3": ParityLayout(4, PP2 | ZERO3),
    "pp2-interleaved-dp2-zero2": ParityLayout(4, PP2 | VIRTUAL | ZERO2),
    "pp2-zero_bubble-dp2-zero1": ParityLayout(4, PP2 | ZERO_BUBBLE | ZERO1),
    # triples
    "tp2-pp2-dp2": ParityLayout(8, TP2 | PP2),
    "tp2-sp-pp2-dp2-zero1": ParityLayout(8, TP2 | SP | PP2 | ZERO1),
    "tp2-pp2-interleaved-dp2-zero2": ParityLayout(8, TP2 | PP2 | VIRTUAL | ZERO2),
    "tp2-sp-pp2-dp2-zero3": ParityLayout(8, TP2 | SP | PP2 | ZERO3),
    "tp2-sp-pp2-zero_bubble-dp2": ParityLayout(8, TP2 | SP | PP2 | ZERO_BUBBLE),
    "tp2-cp2-dp2": ParityLayout(8, TP2 | CP2),
    "tp2-sp-cp2-a2a-dp2-zero1": ParityLayout(8, TP2 | SP | CP2 | A2A | ZERO1),
    "tp2-sp-cp2-dp2-zero2-hybrid": ParityLayout(8, TP2 | SP | CP2 | ZERO2 | TWO_COPIES),
    "tp2-sp-cp2-all_gather-dp2-zero3": ParityLayout(8, TP2 | SP | CP2 | GATHER | ZERO3),
    "tp2-cp2-pp2": ParityLayout(8, TP2 | CP2 | PP2),
    "tp2-sp-cp2-a2a-pp2-interleaved": ParityLayout(8, TP2 | SP | CP2 | A2A | PP2 | VIRTUAL),
    "tp2-sp-cp2-pp2-zero_bubble": ParityLayout(8, TP2 | SP | CP2 | PP2 | ZERO_BUBBLE),
    "cp2-pp2-dp2": ParityLayout(8, CP2 | PP2),
    "cp2-a2a-pp2-interleaved-dp2-zero1": ParityLayout(8, CP2 | A2A | PP2 | VIRTUAL | ZERO1),
    "cp2-all_gather-pp2-zero_bubble-dp2-zero1": ParityLayout(8, CP2 | GATHER | PP2 | ZERO_BUBBLE | ZERO1),
    "cp2-pp2-dp2-zero3": ParityLayout(8, CP2 | PP2 | ZERO3),
    "tp4-sp-pp2": ParityLayout(8, TP4 | SP | PP2),
    "cp4-a2a+p2p-dp2-zero2": ParityLayout(8, CP4 | A2A_P2P | ZERO2),
    "pp4-dp2-zero3": ParityLayout(8, PP4 | ZERO3),
    # ping-pong micro-batches
    "tp2-overlap": ParityLayout(2, TP2 | PING_PONG),
    "tp2-sp-overlap": ParityLayout(2, TP2 | SP | PING_PONG),
    "tp4-sp-overlap": ParityLayout(4, TP4 | SP | PING_PONG),
    "cp2-a2a-overlap": ParityLayout(2, CP2 | A2A | PING_PONG),
    "tp2-sp-cp2-a2a-overlap": ParityLayout(4, TP2 | SP | CP2 | A2A | PING_PONG),
    "tp2-sp-cp2-overlap": ParityLayout(4, TP2 | SP | CP2 | PING_PONG),
    "tp2-sp-pp2-overlap": ParityLayout(4, TP2 | SP | PP2 | PING_PONG),
    "tp2-sp-dp2-zero3-overlap": ParityLayout(4, TP2 | SP | ZERO3 | PING_PONG),
    # experts; the other axes shard everything else
    "ep2": ParityLayout(2, EP2),
    "ep4": ParityLayout(4, EP4),
    "ep2-allgather": ParityLayout(2, EP2 | TOKENS_GATHERED),
    "ep2-static": ParityLayout(2, EP2 | STATIC),
    "ep4-zero3-static": ParityLayout(4, EP4 | ZERO3 | STATIC),
    "tp2-sp-etp2-ep2-static": ParityLayout(4, TP2 | SP | ETP2 | EP2 | STATIC),
    "pp2-ep2-allgather-static": ParityLayout(4, PP2 | EP2 | TOKENS_GATHERED | STATIC),
    "ep2-dp4": ParityLayout(4, EP2),
    "ep2-dp4-zero1": ParityLayout(4, EP2 | ZERO1),
    "ep2-dp4-zero2-hybrid": ParityLayout(4, EP2 | ZERO2 | TWO_COPIES),
    "ep2-dp4-zero3": ParityLayout(4, EP2 | ZERO3),
    "ep4-zero3": ParityLayout(4, EP4 | ZERO3),
    "tp2-ep2": ParityLayout(2, TP2 | EP2),
    "tp2-sp-ep2": ParityLayout(2, TP2 | SP | EP2),
    "tp2-etp2": ParityLayout(2, TP2 | ETP2),
    "tp2-sp-etp2-ep2": ParityLayout(4, TP2 | SP | ETP2 | EP2),
    "tp2-sp-etp2-ep2-allgather": ParityLayout(4, TP2 | SP | ETP2 | EP2 | TOKENS_GATHERED),
    "cp2-ep2": ParityLayout(2, CP2 | EP2),
    "tp2-sp-cp2-a2a-ep4": ParityLayout(4, TP2 | SP | CP2 | A2A | EP4),
    "pp2-ep2": ParityLayout(4, PP2 | EP2),
    "pp2-interleaved-ep2-zero2": ParityLayout(4, PP2 | VIRTUAL | EP2 | ZERO2),
    "pp2-zero_bubble-tp2-sp-ep2": ParityLayout(4, PP2 | ZERO_BUBBLE | TP2 | SP | EP2),
    "tp2-sp-ep8-zero1": ParityLayout(8, TP2 | SP | EP8 | ZERO1),
    "tp2-sp-pp2-dp2-ep4-zero1": ParityLayout(8, TP2 | SP | PP2 | EP4 | ZERO1),
    "tp2-cp2-dp2-ep2-etp2-zero3": ParityLayout(8, TP2 | CP2 | EP2 | ETP2 | ZERO3),
    "tp2-sp-cp2-pp2-ep2-etp2": ParityLayout(8, TP2 | SP | CP2 | PP2 | EP2 | ETP2),
}


@dataclass(frozen=True)
class Result:
    """Result of one layout."""

    name: str
    layout: ParityLayout
    seconds: float
    errors: Errors | None  # None: the job failed
    failure: str = ""

    @property
    def equal(self) -> bool:
        return self.errors is not None and self.errors.within()


def in_layout(config: RunConfig, layout: ParityLayout) -> RunConfig:
    """Return `config` in a layout."""
    tree = config.to_tree()
    tree["parallel"] |= layout.parallel
    return RunConfig.from_tree(tree)


def choose(
    config: RunConfig, names: Sequence[str], most_processes: int
) -> tuple[dict[str, ParityLayout], dict[str, str]]:
    """Choose the layouts to run.

    Args:
        config: the small configuration.
        names: names of layouts; empty chooses all that the configuration supports.
        most_processes: maximum number of processes.

    Returns:
        The layouts by name, and the reasons for rejecting others by name.

    Raises:
        ConfigError: a named layout is unknown or not possible, or no layout is possible.
    """
    if names:
        chosen = {name: _named(name, most_processes) for name in names}
        for layout in chosen.values():
            prepare(in_layout(config, layout), layout.processes)
        return chosen, {}
    chosen, refused = {}, {}
    for name, layout in LAYOUTS.items():
        if layout.processes > most_processes or (layout.has_experts and config.model.num_experts is None):
            continue
        try:
            prepare(in_layout(config, layout), layout.processes)
            chosen[name] = layout
        except ConfigError as error:
            refused[name] = str(error)
    if not chosen:
        raise ConfigError(
            "no layout supports the configuration: " + "; ".join(dict.fromkeys(refused.values()))
        )
    return chosen, refused


def check(
    config: RunConfig, layouts: Mapping[str, ParityLayout], device_type: str = "cpu"
) -> Iterator[Result]:
    """Run the job in one process, then in each layout. Yields each result as it finishes."""
    one = run_job(config)
    pool = Pool(max(layout.processes for layout in layouts.values()), device_type=device_type)
    try:
        for name, layout in layouts.items():
            began, errors, failure = time.monotonic(), None, ""
            try:
                outcomes = pool.run(run_job, in_layout(config, layout), size=layout.processes)
                errors = compare(outcomes, one)
            except RankFailed as error:
                failure = str(error).strip().splitlines()[-1]
            yield Result(name, layout, time.monotonic() - began, errors, failure)
    finally:
        pool.close()


def _named(name: str, most_processes: int) -> ParityLayout:
    if name not in LAYOUTS:
        raise ConfigError(f"unknown layout {name!r}{nearest_of(name, LAYOUTS)}")
    layout = LAYOUTS[name]
    if layout.processes > most_processes:
        raise ConfigError(
            f"layout {name} needs {layout.processes} processes, but --nproc-max is {most_processes}; raise "
            f"--nproc-max to {layout.processes}, or choose a smaller layout"
        )
    return layout
