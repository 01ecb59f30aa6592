"""What a job would be refused for, found before a process of it starts; and a run up to its first step without devices.

The ranks refuse the same by the same rules, each when it has come so far: after seconds of imports, and after all of
them have met. Here one process asks what takes no device and little time. On several machines the output folder and
its checkpoints are left to rank 0: a launcher that joins a running job finds there what that job has written.

`megalith train run.yaml --dry-run --world-size N` opens settings, tokenizer, data and checkpoint as a run would. The
layout is then built as rank 0, the last rank and one rank of each pipeline stage would build it, over a process group
that exchanges nothing and on the meta device, and the bytes of weights that each has are laid beside the planner's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megalith.checkpoint import open_checkpoint
from megalith.checkpoint.state import check_model_fits
from megalith.config import RunConfig
from megalith.config.rules.fastest import Machine
from megalith.config.rules.notes import overlap_notes
from megalith.config.rules.run_rules import check_base
from megalith.data.blend import dataset_prefixes
from megalith.data.chat.chat_files import chat_files
from megalith.data.idx_format import require_files
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError, TrainingError
from megalith.hardware import largest_gpu_memory, pick_device
from megalith.launch.lock import OutputLock, check_output_dir
from megalith.local_shards import local
from megalith.parallel.apply import apply
from megalith.parallel.mesh import build_mesh
from megalith.planner.fit import memory_warnings, require_fit
from megalith.planner.layout import Layout, build_layout, with_auto
from megalith.planner.micro_batches import micro_batch_notes
from megalith.planner.rates import Rates, check_precision
from megalith.remote import size_of
from megalith.report.layout_text import layout_text, memory_unit, wrap_paragraph
from megalith.training.build import PreparedRun, build_meta_model, open_datasets, prepare, vocabulary_rows
from megalith.training.resume import check_resumable

MOST_INDEX_BYTES = (
    2**27
)  # of .idx files that are read whole here: six million documents, a fraction of a second


def check_job(
    config: RunConfig,
    world_sizes: Sequence[int],
    nproc: int,
    one_machine: bool,
    check_data: Callable[[RunConfig, Tokenizer | None], object] | None = None,
) -> None:
    """Raises the MegalithError with which every rank would refuse `config`.

    `world_sizes` are those that the job may have: one of them has to be possible. `nproc` processes are on this
    machine. `check_data` is of data that is not pre-training's.
    """
    check_base(config)
    (prepared, tokenizer, _), world_size = _prepare_any(config, world_sizes)
    device = pick_device(config.runtime.device, nproc - 1)
    if device.type == "cuda" and (memory := largest_gpu_memory()):
        machine = Machine(nproc, compiled=True, memory=memory, ranks=world_size)
        layout = build_layout(with_auto(prepared, world_size, machine)[0], world_size)
        for warning in memory_warnings(layout, memory):
            print(wrap_paragraph(warning), flush=True)
    (check_data or _check_data)(prepared, tokenizer)
    if config.train.skip_train:  # it writes nothing
        _check_checkpoint(prepared, tokenizer)
    elif one_machine:
        with OutputLock(config.train.output_dir):
            saving = config.checkpoint
            check_output_dir(config.train.output_dir, saving.load, saving.save, config.model.init_from)
        _check_checkpoint(prepared, tokenizer)


def check_opens(config: RunConfig, world_size: int) -> tuple[RunConfig, list[str]]:
    """The prepared configuration of a run on `world_size` processes, and its notes, once data and checkpoint are open:
    what a dry run asks. Raises the MegalithError with which every rank would refuse it."""
    check_base(config)
    prepared, tokenizer, notes = prepare(config, world_size)
    _check_data(prepared, tokenizer)
    _check_checkpoint(prepared, tokenizer)
    return prepared, notes


def _prepare_any(config: RunConfig, world_sizes: Sequence[int]) -> tuple[PreparedRun, int]:
    """The run on the largest possible number of processes, and that number."""
    for world_size in reversed(world_sizes):
        try:
            return prepare(config, world_size), world_size
        except ConfigError:
            if world_size == world_sizes[0]:
                raise
    raise AssertionError("a job has at least one size")


def _check_data(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Its files are there, and small ones whole and enough for the splits."""
    if config.chat is not None:  # tokenized by the ranks, unless its length was needed already
        data = config.data
        for path in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
            if path is not None:
                chat_files(path)
        return
    index_bytes = [size_of(require_files(prefix)[1]) for prefix in dataset_prefixes(config.data)]
    if sum(index_bytes) <= MOST_INDEX_BYTES:
        evaluated = min(config.train.eval_iters, 1)
        open_datasets(config, (1, evaluated, evaluated), tokenizer)


def _check_checkpoint(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """The one to load is there and, by its manifest, of this model."""
    if config.checkpoint.load is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks warn of steps that are damaged
        found = open_checkpoint(config.checkpoint.load, ())
    checkpoint = check_resumable(found, config, tokenizer)
    if checkpoint is not None:
        check_model_fits(checkpoint, build_meta_model(config), vocabulary_rows(config))


DIFFERENCE = 0.02  # of bytes


@dataclass(frozen=True)
class BuiltRank:
    """A rank's part of the model, as its own code has built it."""

    rank: int
    weights: int
    """Bytes that it has."""
    even: float
    """The same if all shards were alike: of fewer rows than ranks the first have one, and the last none."""
    expected: int
    """The planner's."""

    @property
    def agrees(self) -> bool:
        return abs(self.even - self.expected) <= DIFFERENCE * self.expected


def dry_run(config: RunConfig, world_size: int, rates: Rates | None = None, gpus_per_node: int = 8) -> str:
    """What a run of `world_size` processes would begin with, as text; `rates`: of the GPUs by whose memory and links an
    `auto` is chosen. Raises the MegalithError that it would end with, a ConfigError where the job is not expected to
    fit these GPUs, and a TrainingError where a rank has other weights than the planner counts."""
    config, notes = check_opens(config, world_size)
    machine = Machine(min(gpus_per_node, world_size), ranks=world_size)
    if rates is not None:
        check_precision(config, rates)
        machine = rates.machine(world_size, gpus_per_node)
    notes += micro_batch_notes(config, world_size, machine)
    config, chosen = with_auto(config, world_size, machine)
    chosen += overlap_notes(config, compiled=rates is None or machine.compiled)
    layout = build_layout(config, world_size)
    if rates is not None:
        require_fit(layout, rates)
    ranks = build_ranks(layout)
    lines = [*map(wrap_paragraph, [*notes, *chosen]), layout_text(layout)]
    figures: dict[tuple[int, float, int], list[int]] = {}
    for built in ranks:
        figures.setdefault((built.weights, built.even, built.expected), []).append(built.rank)
    name, unit = memory_unit([max(built.weights, built.expected) for built in ranks])
    told = [
        wrap_paragraph(
            f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}: {weights / unit:.4f} {name} of weights built, "
            f"{planned / unit:.4f} planned{', were all shards alike' * (abs(weights - even) > DIFFERENCE * even)}"
        )
        for (weights, even, planned), alike in figures.items()
    ]
    if wrong := [built.rank for built in ranks if not built.agrees]:
        raise TrainingError(
            f"ranks {', '.join(map(str, wrong))} have other weights than the planner counts: {'; '.join(told)}"
        )
    used = "no device was used"
    if rates is None and config.runtime.device != "cpu":
        used += ", and auto is chosen as on CPUs; with --device NAME as on such GPUs"
    return "\n".join([*lines, *told, f"dry run: {world_size} processes can train this; {used}"])


def build_ranks(layout: Layout) -> list[BuiltRank]:
    """The first rank, the last, and one of each pipeline stage."""
    each = layout.world_size // len(layout.stages)
    chosen = sorted({*range(0, layout.world_size, each), layout.world_size - 1})
    return [_build(layout, rank) for rank in chosen]


def _build(layout: Layout, rank: int) -> BuiltRank:
    config, meta = layout.config, torch.device("meta")
    with fake_process_group(layout.world_size, rank):
        mesh = build_mesh(
            config.parallel, layout.world_size, "cpu", has_experts=config.model.num_experts is not None
        )
        chunks = apply(build_meta_model(config), config.with_settings({"runtime.compile": False}), mesh, meta)
        own = [parameter for chunk in chunks for parameter in _own(chunk.parameters())]
        weights, even = sum(local(each).nbytes for each in own), sum(map(_even_share, own))
    return BuiltRank(rank, weights, even, layout.stage_of(rank).memory.weights)


def _even_share(parameter: torch.nn.Parameter) -> float:
    """Bytes of a rank's shard, if all were alike."""
    ranks = 1
    if isinstance(parameter, DTensor):
        sharded = (axis for axis, each in enumerate(parameter.placements) if hasattr(each, "dim"))
        ranks = math.prod(map(parameter.device_mesh.size, sharded))
    return parameter.numel() * parameter.element_size() / ranks


def _own(parameters: Iterator[torch.nn.Parameter]) -> Sequence[torch.nn.Parameter]:
    """Each once."""
    return list({id(parameter): parameter for parameter in parameters}.values())


@contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
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
