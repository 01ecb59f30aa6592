"""Checks of a job before its processes start, and dry runs.

`check_job` applies the ranks' rules in one process, without a device and within seconds, so that mistakes appear before
all ranks have started. With several machines, the output folder is not checked here but later by rank 0, because a
launcher that joins a running job would find the job's own files in it.

`megalith train run.yaml --dry-run --world-size N` opens settings, tokenizer, data and checkpoint like a run. It then
builds the model as rank 0, the last rank and one rank per pipeline stage, on the meta device and with a fake process
group, and compares the bytes of their weights with the planner's count.
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
from megalith.compat.process_groups import fake_store
from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine
from megalith.config.rules.notes import overlap_notes
from megalith.config.rules.run_rules import check_base
from megalith.data.blend import dataset_prefixes
from megalith.data.chat.chat_files import chat_files
from megalith.data.idx_format import require_files
from megalith.data.own_dataset import load_dataset_function
from megalith.data.text_data import check_text, text_entries
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError, TrainingError
from megalith.hardware import largest_gpu_memory, pick_device
from megalith.launch.lock import OutputLock, check_output_dir
from megalith.local_shards import local
from megalith.parallel.apply import apply
from megalith.parallel.pipeline.pipeline_rules import check_layout
from megalith.planner.fit import memory_warnings, require_fit, warnings_on_cpu
from megalith.planner.layout import Layout, build_layout
from megalith.planner.layout_text import layout_text
from megalith.planner.memory_choices import with_auto
from megalith.planner.micro_batches import micro_batch_notes
from megalith.planner.rates import Rates, check_precision
from megalith.remote import size_of
from megalith.tables import memory_unit, wrap_paragraph
from megalith.training.build import (
    PreparedRun,
    build_meta_model,
    build_run_mesh,
    mixture_settings,
    open_datasets,
    prepare,
    tokenize_text,
    vocabulary_rows,
)
from megalith.training.resume import check_resumable

# Total size of .idx files that are opened here: six million documents, a fraction of a second.
MAX_INDEX_BYTES = 2**27


def check_job(
    config: RunConfig,
    world_sizes: Sequence[int],
    nproc: int,
    one_machine: bool,
    check_data: Callable[[RunConfig, Tokenizer | None], object] | None = None,
) -> None:
    """Check a job before it starts.

    Args:
        config: the run's configuration.
        world_sizes: possible numbers of processes in ascending order; one must be valid.
        nproc: number of processes on this machine.
        one_machine: all processes run on this machine, so that the output folder can be checked.
        check_data: function that checks data of other formats than pre-training's.

    Raises:
        MegalithError: the error that every rank would raise.
    """
    check_base(config)
    (prepared, tokenizer, _), world_size = _prepare_any(config, world_sizes)
    if note := _forbidden_machines(prepared, world_sizes, nproc):
        print(wrap_paragraph(note), flush=True)
    device = pick_device(config.runtime.device, nproc - 1)
    if config.train.skip_train:
        pass  # there is no optimizer state
    elif device.type == "cpu" and one_machine:
        for warning in warnings_on_cpu(prepared, world_size):
            print(wrap_paragraph(warning), flush=True)
    elif device.type == "cuda" and (memory := largest_gpu_memory()):
        machine = Machine(nproc, compiled=True, memory=memory, ranks=world_size)
        layout = build_layout(with_auto(prepared, world_size, machine)[0], world_size)
        for warning in memory_warnings(layout, memory):
            print(wrap_paragraph(warning), flush=True)
    (check_data or _check_data)(prepared, tokenizer)
    reads_text = check_data is None and config.chat is None and config.data.dataset is None
    if config.train.skip_train:  # writes no files
        _check_checkpoint(prepared, tokenizer)
    elif one_machine:
        with OutputLock(config.train.output_dir):
            saving = config.checkpoint
            check_output_dir(config.train.output_dir, saving.load, saving.save, config.model.init_from)
        _check_checkpoint(prepared, tokenizer)
    if reads_text and not config.train.skip_train:
        # Tokenized here, because ranks that wait for long are stopped.
        tokenize_text(prepared, tokenizer, show_progress=True)


def check_opens(config: RunConfig, world_size: int) -> tuple[RunConfig, list[str]]:
    """Prepare a run for `world_size` processes and open its data and checkpoint.

    Returns:
        The prepared configuration and its notes.

    Raises:
        MegalithError: the error that every rank would raise.
    """
    check_base(config)
    prepared, tokenizer, notes = prepare(config, world_size)
    _check_data(prepared, tokenizer)
    _check_checkpoint(prepared, tokenizer)
    return prepared, notes


def _prepare_any(config: RunConfig, world_sizes: Sequence[int]) -> tuple[PreparedRun, int]:
    """Prepare the run for the largest valid number of processes. Returns the prepared run and that number."""
    for world_size in reversed(world_sizes):
        try:
            return prepare(config, world_size), world_size
        except ConfigError:
            if world_size == world_sizes[0]:
                raise
    raise AssertionError("no valid number of processes")


def _forbidden_machines(config: RunConfig, world_sizes: Sequence[int], nproc: int) -> str:
    """Return a note on the numbers of machines allowed by --nnodes but not by the layout, or an empty string."""
    forbidden: dict[int, ConfigError] = {}
    for world_size in world_sizes:
        try:
            check_layout(config, world_size)
        except ConfigError as error:
            forbidden[world_size // nproc] = error
    if not forbidden:
        return ""
    machines = ", ".join(map(str, forbidden)) + (" machine" if list(forbidden) == [1] else " machines")
    return f"note: the job cannot continue on {machines}: {next(iter(forbidden.values()))}"


def _check_data(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Check that the data files exist. If they are small, also check that they are intact and suffice for
    the splits.
    """
    if config.chat is not None:  # tokenized later by the ranks, unless `prepare` needed its length
        data = config.data
        for path in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
            if path is not None:
                chat_files(path)
        return
    if config.data.dataset is not None:
        load_dataset_function(config.data.dataset)
        return
    mixture_settings(config.data)
    text = text_entries(config.data)
    prefixes = [prefix for prefix in dataset_prefixes(config.data) if prefix not in text]
    index_bytes = [size_of(require_files(prefix)[1]) for prefix in prefixes]
    if text:
        check_text(config.data, tokenizer)
    elif sum(index_bytes) <= MAX_INDEX_BYTES:
        evaluated = min(config.train.eval_iters, 1)
        open_datasets(config, (1, evaluated, evaluated), tokenizer)


def _check_checkpoint(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Check that the checkpoint to load exists and its manifest matches the model."""
    if config.checkpoint.load is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks warn about damaged steps
        checkpoint = open_checkpoint(config.checkpoint.load, ())
    checkpoint = check_resumable(checkpoint, config, tokenizer)
    if checkpoint is not None:
        check_model_fits(checkpoint, build_meta_model(config), vocabulary_rows(config))


TOLERANCE = 0.02  # relative difference in bytes


@dataclass(frozen=True)
class BuiltRank:
    """The weights of one rank, as its parallel code builds them."""

    rank: int
    weights: int
    """Bytes of this rank's weights."""
    even: float
    """Weight bytes per rank if all shards had the same size. FSDP may give the last ranks no rows of a small
    parameter."""
    expected: int
    """Bytes expected by the planner."""

    @property
    def agrees(self) -> bool:
        return abs(self.even - self.expected) <= TOLERANCE * self.expected


def dry_run(config: RunConfig, world_size: int, rates: Rates | None = None, gpus_per_node: int = 8) -> str:
    """Describe the start of a run with `world_size` processes as text.

    Args:
        config: the run's configuration.
        world_size: number of processes.
        rates: measured rates of the GPUs; `auto` settings are chosen for their memory and links.
        gpus_per_node: GPUs per node.

    Raises:
        MegalithError: the error that the run would raise.
        ConfigError: the job is not expected to fit on these GPUs.
        TrainingError: a rank's weights differ from the planner's count.
    """
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
    by_bytes: dict[tuple[int, float, int], list[int]] = {}
    for built in ranks:
        by_bytes.setdefault((built.weights, built.even, built.expected), []).append(built.rank)
    name, unit = memory_unit([max(built.weights, built.expected) for built in ranks])
    weight_lines = [
        wrap_paragraph(
            f"rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}: {weights / unit:.4f} {name} of weights "
            f"built, {planned / unit:.4f} planned"
            f"{' for shards of equal size' * (abs(weights - even) > TOLERANCE * even)}"
        )
        for (weights, even, planned), same in by_bytes.items()
    ]
    if wrong := [built.rank for built in ranks if not built.agrees]:
        raise TrainingError(
            f"the weights of ranks {', '.join(map(str, wrong))} do not have the size that the planner predicted: "
            f"{'; '.join(weight_lines)}; please report this"
        )
    used = "no device was used"
    if rates is None and config.runtime.device != "cpu":
        used += ", and auto settings were chosen for CPUs; pass --device NAME to choose them for that GPU"
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    return "\n".join([*lines, *weight_lines, f"dry run: {processes} can train this; {used}"])


def build_ranks(layout: Layout) -> list[BuiltRank]:
    """Build the weights of the first rank, the last rank and one rank per pipeline stage."""
    each = layout.world_size // len(layout.stages)
    chosen = sorted({*range(0, layout.world_size, each), layout.world_size - 1})
    return [_build(layout, rank) for rank in chosen]


def _build(layout: Layout, rank: int) -> BuiltRank:
    config, meta = layout.config, torch.device("meta")
    with fake_process_group(layout.world_size, rank):
        mesh = build_run_mesh(config, layout.world_size, "cpu")
        chunks = apply(build_meta_model(config), config.with_settings({"runtime.compile": False}), mesh, meta)
        parameters = [parameter for chunk in chunks for parameter in _unique(chunk.parameters())]
        weights, even = sum(local(each).nbytes for each in parameters), sum(map(_even_share, parameters))
    models = 2 if config.has_reference_model else 1  # the reference is a second model with the same layout
    return BuiltRank(rank, models * weights, models * even, layout.stage_of(rank).memory.weights)


def _even_share(parameter: torch.nn.Parameter) -> float:
    """Return a parameter's size in bytes divided by its number of shards, as if all shards were equally large."""
    ranks = 1
    if isinstance(parameter, DTensor):
        sharded = (axis for axis, each in enumerate(parameter.placements) if hasattr(each, "dim"))
        ranks = math.prod(map(parameter.device_mesh.size, sharded))
    return parameter.numel() * parameter.element_size() / ranks


def _unique(parameters: Iterator[torch.nn.Parameter]) -> Sequence[torch.nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())


@contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """Simulate rank `rank` of a job with `world_size` processes, without the other processes."""
    if world_size == 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
