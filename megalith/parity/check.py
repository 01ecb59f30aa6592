"""The same job in one layout after the other, each against one process.

A configuration made small: what each field becomes stands on it (`Shrinks`), the sizes in config/small.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megalith.config import RunConfig
from megalith.errors import ConfigError, nearest_of
from megalith.launch.pool import Pool, RankFailed
from megalith.parity.differences import Errors, compare
from megalith.parity.job import run_job
from megalith.parity.layouts import LAYOUTS, ParityLayout
from megalith.training.trainer import prepare


@dataclass(frozen=True)
class Result:
    """One layout's."""

    name: str
    layout: ParityLayout
    seconds: float
    errors: Errors | None  # None: the job failed
    failure: str = ""

    @property
    def equal(self) -> bool:
        return self.errors is not None and self.errors.within()


def in_layout(config: RunConfig, layout: ParityLayout) -> RunConfig:
    """`config` spread as `layout` says."""
    tree = config.to_tree()
    tree["parallel"] |= layout.parallel
    return RunConfig.from_tree(tree)


def choose(
    config: RunConfig, names: Sequence[str], most_processes: int
) -> tuple[dict[str, ParityLayout], dict[str, str]]:
    """The layouts with these names, or all that `config` can take with so many processes; why not the others.

    Raises ConfigError for a named layout that there is not or that cannot be, and where none can.
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
            "the configuration can take no layout: " + "; ".join(dict.fromkeys(refused.values()))
        )
    return chosen, refused


def check(
    config: RunConfig, layouts: Mapping[str, ParityLayout], device_type: str = "cpu"
) -> Iterator[Result]:
    """Runs the job of `config` in one process, then in each layout; gives each result when it is there."""
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
        raise ConfigError(f"there is no layout {name!r}{nearest_of(name, LAYOUTS)}")
    layout = LAYOUTS[name]
    if layout.processes > most_processes:
        raise ConfigError(
            f"layout {name} takes {layout.processes} processes, but --nproc-max is {most_processes}; raise it to "
            f"{layout.processes}, or name a smaller layout"
        )
    return layout


def shrink(config: RunConfig, steps: int, device: str = "cpu") -> RunConfig:
    """The small run of `steps` steps in fp32, on made-up data and one process; `config.model` has its shape.

    On a GPU attention has no dropout, the one thing that a fused kernel makes different in every layout.
    """
    tree = {section: getattr(config, section).shrunk(config) for section in RunConfig.model_fields}
    tree["train"]["train_iters"] = steps
    tree["runtime"]["device"] = device
    if device != "cpu":
        tree["model"]["attention_dropout"] = 0.0
    return RunConfig.from_tree(tree)
