"""`megalith train run.yaml --dry-run --world-size N`: a run up to its first step, without its devices.

Settings, tokenizer, data and checkpoint are opened as a run would. The layout is then built as rank 0, the last rank
and one rank of each pipeline stage would build it, over a process group that exchanges nothing and on the meta
device, and the bytes of weights that each has are laid beside the planner's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalith.comm.collectives import local
from megalith.config import RunConfig
from megalith.config.rules.fastest import Machine, with_fastest
from megalith.errors import TrainingError
from megalith.parallel.apply import apply
from megalith.parallel.mesh import build_mesh
from megalith.planner.layout import Layout, build_layout
from megalith.report.layout_text import layout_text, paragraph
from megalith.training.build import build_meta_model
from megalith.training.precheck import opened

DIFFERENCE = 0.02  # of bytes: a shard of few rows is padded to the longest one
MOST_STAGES = 16  # that a rank is built of


@dataclass(frozen=True)
class BuiltRank:
    """A rank's part of the model, as its own code has built it."""

    rank: int
    weights: int
    """Bytes that it has."""
    expected: int
    """The planner's."""

    @property
    def agrees(self) -> bool:
        return abs(self.weights - self.expected) <= DIFFERENCE * self.expected


def dry_run(config: RunConfig, world_size: int, gpus_per_node: int = 8) -> str:
    """What a run of `world_size` processes would begin with, as text. Raises the MegalithError that it would end with,
    and a TrainingError where a rank has other weights than the planner counts."""
    config, notes = opened(config, world_size)
    config, chosen = with_fastest(config, Machine(min(gpus_per_node, world_size)))
    layout = build_layout(config, world_size)
    ranks = build_ranks(layout)
    lines = [*map(paragraph, [*notes, *chosen]), layout_text(layout)]
    for built in ranks:
        lines.append(
            f"rank {built.rank}: {built.weights / 1e9:.4f} GB of weights built, {built.expected / 1e9:.4f} planned"
        )
    if wrong := [built.rank for built in ranks if not built.agrees]:
        raise TrainingError(
            f"ranks {', '.join(map(str, wrong))} have other weights than the planner counts:\n"
            + "\n".join(lines[-len(ranks) :])
        )
    return "\n".join([*lines, f"dry run: {world_size} processes can train this; no device was used"])


def build_ranks(layout: Layout) -> list[BuiltRank]:
    """The first rank, the last, and one of each pipeline stage (of at most MOST_STAGES)."""
    each = layout.world_size // len(layout.stages)
    step = -(-len(layout.stages) // MOST_STAGES)
    return [
        _build(layout, rank)
        for rank in sorted({*range(0, layout.world_size, each * step), layout.world_size - 1})
    ]


def _build(layout: Layout, rank: int) -> BuiltRank:
    config, meta = layout.config, torch.device("meta")
    with _alone_among(layout.world_size, rank):
        mesh = build_mesh(
            config.parallel, layout.world_size, "cpu", has_experts=config.model.num_experts is not None
        )
        chunks = apply(build_meta_model(config), config.with_settings({"runtime.compile": False}), mesh, meta)
        weights = sum(local(p).nbytes for chunk in chunks for p in _own(chunk.parameters()))
    return BuiltRank(rank, weights, layout.stage_of(rank).memory.weights)


def _own(parameters: Iterator[torch.nn.Parameter]) -> Sequence[torch.nn.Parameter]:
    """Each once."""
    return list({id(parameter): parameter for parameter in parameters}.values())


@contextmanager
def _alone_among(world_size: int, rank: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is one and no other is there."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
