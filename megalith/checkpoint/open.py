"""Opens checkpoints: selects a step and verifies its files.

Every file to be read is verified against the manifest before any tensor is used. From a folder of steps, the most
recently saved intact step is opened. All ranks of a job open the same step: if one rank finds a damaged file, all ranks
skip the step.

Each file that a machine's ranks read is hashed once, by one of these ranks. In the layout that saved the checkpoint,
the job hashes each file about once; in another layout, a machine may hash files of which it needs only parts.
"""

from __future__ import annotations

import re
import socket
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megalith.checkpoint.agree import collectively
from megalith.checkpoint.files import DTYPES
from megalith.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    fetch_error,
    read_manifest,
)
from megalith.checkpoint.read import Checkpoint, check_file, files_for, is_task_file, is_tokenizer_file
from megalith.checkpoint.steps import CHECKPOINTS, STEP, list_steps, save_order
from megalith.comm.collectives import Axis
from megalith.errors import CheckpointError, printable
from megalith.parallel.gather import ALONE
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import StorePath, open_location
from megalith.temporary_folders import TemporaryFolder

THREADS = 4  # concurrently hashed or fetched files
FETCHED = "megalith_checkpoint_"  # prefix of temporary folders for fetched files
# Other formats, recognized by a file name, and the command that converts them.
OTHERS = (
    (re.compile(r"config\.json"), "a Hugging Face model", "import-hf"),
    (
        re.compile(r"latest_checkpointed_iteration\.txt|iter_\d{7}|mp_rank_\d+.*|.*\.distcp|\.metadata"),
        "a checkpoint of Megatron-LM",
        "import-megatron",
    ),
)


def open_checkpoint(
    path: str | Path | StorePath,
    parts: Collection[str] | None = ("model", "optimizer"),
    *,
    world: Axis = ALONE,
    shards: Mapping[str, Mapping[str, LocalShard]] | None = None,
    show_progress: bool = False,
) -> Checkpoint | None:
    """Open an intact checkpoint. Verifies the manifest and the files of `parts`. Tensors are read later.

    Of several steps, the one saved last is opened. If it is damaged, a warning names it and the previous one is tried.
    Every rank of `world` calls the function and gets the same step.

    Args:
        path: a run's output folder, its `checkpoints` folder, one step folder, or the URL of one of these.
        parts: parts to verify (`model`, `optimizer`). None means all that were saved.
        world: ranks of the job.
        shards: this rank's shards by part and name; only files with pieces of them are verified.
        show_progress: show a progress bar.

    Returns:
        The checkpoint. None if the folder does not exist or has no step yet, as at the first start of a run that
        loads from its own output folder.

    Raises:
        CheckpointError: on every rank, if a given step is missing or damaged, no step is intact, or the folder contains
            something else.
    """
    path = open_location(path)

    def candidates() -> list[str] | None:
        try:
            return _candidates(path) if world.rank == 0 else None
        except OSError as error:
            if isinstance(path, StorePath):
                raise fetch_error(path, error) from error
            raise

    steps = collectively(world, candidates)[0]
    if steps is None:
        return None
    refused: list[str] = []
    for candidate in map(open_location, steps):
        try:
            checkpoint = _open_step(candidate, parts, world, shards, show_progress)
        except DamagedCheckpointError as error:
            if candidate == path:
                raise
            refused.append(str(error))
            continue
        if refused and world.rank == 0:
            warnings.warn(
                f"using {printable(candidate)}, the newest intact checkpoint; skipped: {'; '.join(refused)}",
                stacklevel=2,
            )
        return checkpoint
    raise CheckpointError(
        f"no checkpoint in {open_location(steps[0]).parent} is intact: {'; '.join(refused)}"
    )


def open_existing(
    path: str | Path | StorePath, parts: Collection[str] | None = ("model",), *, show_progress: bool = False
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does for a single process. Raise CheckpointError if there is none."""
    checkpoint = open_checkpoint(path, parts, show_progress=show_progress)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {path}; pass a run folder, its checkpoints folder, or one step folder"
        )
    return checkpoint


def check_files(checkpoint: Checkpoint, names: Collection[str], show_progress: bool = False) -> list[str]:
    """Return one sentence for each of the files `names` that is damaged."""

    def problem(name: str) -> str | None:
        try:
            check_file(checkpoint.folder, checkpoint.files, name, checkpoint.manifest.files[name])
        except DamagedCheckpointError as error:
            return str(error)
        return None

    names, problems = sorted(names), []
    sizes = [checkpoint.manifest.files[name].bytes for name in names]
    with (
        Progress("check", sum(sizes), show=show_progress) as progress,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        for size, message in zip(sizes, threads.map(problem, names)):
            problems += [message] if message else []
            progress.add(size)
    return problems


def step_problems(folder: Path | StorePath, show_progress: bool = False) -> list[str]:
    """Return the problems in the manifest, files and tensors of a step. Empty if it is intact."""
    try:
        checkpoint = _with_files(folder, _manifest_of(folder), [{"host": ""}], ALONE)
        if problems := check_files(checkpoint, checkpoint.manifest.files, show_progress):
            return problems
        checkpoint.check_contents()
    except CheckpointError as error:
        return [str(error)]
    return []


def _candidates(path: Path | StorePath) -> list[str] | None:
    """Return the step folders to try, in order."""
    if STEP.fullmatch(path.name) or (path / MANIFEST).exists():
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}; {_existing_steps(path.parent)}")
        return [str(path)]
    if not path.exists():
        return None
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; pass a run's folder or one of its step folders")
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = list_steps(folder)
    if not steps:
        _refuse_other_weights(folder)
        return None
    newest_first = sorted(steps.values(), key=lambda step: save_order(step, unreadable=1), reverse=True)
    return [str(step) for step in newest_first]


def _open_step(
    folder: Path | StorePath,
    parts: Collection[str] | None,
    world: Axis,
    shards: Mapping[str, Mapping[str, LocalShard]] | None,
    show_progress: bool,
) -> Checkpoint:
    opened: list[Manifest] = []

    def read() -> dict[str, Any]:
        try:
            manifest = _manifest_of(folder)
        except DamagedCheckpointError as error:
            return {"damage": [str(error)]}
        opened.append(manifest)
        needed = _needed_files(folder, manifest, parts, shards)
        return {
            "damage": [],
            "number": manifest.save_number,
            "host": socket.gethostname(),
            "needed": sorted(needed),
        }

    answers = collectively(world, read)
    _refuse_damage(answers)
    if len({answer["number"] for answer in answers}) > 1:
        raise CheckpointError(
            f"{folder} is not the same on all machines; checkpoint.load must name a shared folder"
        )
    (manifest,) = opened
    mine = _share_of_hashing(answers, manifest, world.rank)
    checkpoint = _with_files(folder, manifest, answers, world)
    _refuse_damage(collectively(world, lambda: {"damage": check_files(checkpoint, mine, show_progress)}))
    return checkpoint


def _with_files(
    folder: Path | StorePath, manifest: Manifest, answers: Sequence[Mapping[str, Any]], world: Axis
) -> Checkpoint:
    """Return the checkpoint. Files of a step in a store are fetched into a temporary folder, one per machine."""
    if isinstance(folder, Path):
        return Checkpoint(folder, manifest, folder)
    host = answers[world.rank]["host"]
    first = next(rank for rank, answer in enumerate(answers) if answer["host"] == host)
    is_owner = world.rank == first
    made: list[TemporaryFolder] = []

    def make() -> str:
        made.append(TemporaryFolder(FETCHED))
        return str(made[-1].path)

    local = collectively(world, lambda: make() if is_owner else None)[first]
    if not Path(local).is_dir():  # created in another container with the same host name
        local = make()
    checkpoint = Checkpoint(folder, manifest, Path(local))
    for temporary in made:
        weakref.finalize(checkpoint, temporary.remove)
    return checkpoint


def _manifest_of(folder: Path | StorePath) -> Manifest:
    manifest = read_manifest(folder)
    named = STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise DamagedCheckpointError(
            f"{folder / MANIFEST} is for step {manifest.step}, but its folder has another step's "
            "name; use another step"
        )
    for part, table in manifest.tensors.items():
        for name, stored in table.items():
            if stored.dtype not in DTYPES:
                raise CheckpointError(
                    f"{folder / MANIFEST} gives the {part}'s tensor {name} the dtype {stored.dtype!r}, but this "
                    f"version of Megalith supports {', '.join(DTYPES)}; use the version that wrote it"
                )
    return manifest


def _needed_files(
    folder: Path | StorePath,
    manifest: Manifest,
    parts: Collection[str] | None,
    shards: Mapping[str, Mapping[str, LocalShard]] | None,
) -> set[str]:
    needed = {name for name in manifest.files if is_tokenizer_file(name) or is_task_file(name)}
    for part in manifest.tensors if parts is None else parts:
        if part not in manifest.tensors:
            raise CheckpointError(
                f"{folder} was saved without {part}; to start with a new optimizer state, set "
                "checkpoint.load_optim to false"
            )
        needed |= manifest.files_of(part) if shards is None else files_for(manifest, part, shards[part])
    return needed


def _share_of_hashing(answers: Sequence[Mapping[str, Any]], manifest: Manifest, rank: int) -> list[str]:
    """Return the files that this rank verifies: its share of the files that the ranks of its machine read. Shares are
    balanced by size.
    """
    load = {peer: 0 for peer, answer in enumerate(answers) if answer["host"] == answers[rank]["host"]}
    files = sorted({name for peer in load for name in answers[peer]["needed"]})
    mine = []
    for name in sorted(files, key=lambda name: -manifest.files[name].bytes):
        peer = min(load, key=load.get)
        load[peer] += manifest.files[name].bytes
        if peer == rank:
            mine.append(name)
    return mine


def _refuse_damage(answers: Sequence[Mapping[str, Any]]) -> None:
    damage = {text: None for answer in answers for text in answer["damage"]}
    if damage:
        raise DamagedCheckpointError("; ".join(damage))


def _existing_steps(folder: Path | StorePath) -> str:
    steps = list_steps(folder) if folder.is_dir() else {}
    return f"{folder} has the steps {', '.join(map(str, steps))}" if steps else f"{folder} has no steps"


def _refuse_other_weights(folder: Path | StorePath) -> None:
    names = sorted(item.name for item in folder.iterdir())
    for mark, kind, command in OTHERS:
        if any(mark.fullmatch(name) for name in names):
            raise CheckpointError(
                f"{folder} contains {kind}, not steps of a Megalith run; convert it with megalith {command} {folder} "
                "RUN, and load RUN"
            )
    weights = next((name for name in names if name.endswith((".safetensors", ".distcp", ".pt"))), None)
    if weights:
        raise CheckpointError(
            f"{folder} contains {weights} but no step_NNNNNNNN folder, so it is not a Megalith run; pass a "
            "run's folder or one of its step folders"
        )
