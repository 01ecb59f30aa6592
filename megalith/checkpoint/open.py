"""Opening a checkpoint: which step it is, and that its files are what was saved.

Every file that is going to be read is checked against the manifest before a tensor is touched. A folder of several
steps gives the one saved last that is whole. All ranks of a job open the same one: what one finds damaged, all leave.

What checking costs: the ranks of a machine share out the files that any of them reads, and hash each once. A job that
goes on in its own layout hashes what it saved, each rank its share; one that loads in another layout may have every
machine hash files of which it needs a part.
"""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
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

THREADS = 4  # files hashed or fetched at once
FETCHED = "megalith_checkpoint_"  # temporary folders of what is fetched
# What a folder holds that is not a run's, by the name of a file in it, and the command that makes a run of it.
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
    """Finds a whole checkpoint and checks its manifest and the files of `parts`; its tensors are read later.

    `parts` names parts, None all that were saved.

    `path` is a run's output folder, its `checkpoints`, or one step folder, or the URL of one. Of several steps the one
    saved last is taken; when it is damaged, a warning names it and the one before is tried. None when there is no
    such folder or no step in it yet, as at the first start of a run that loads from where it saves.

    Every rank of `world` calls it and gets the same step. With `shards`, those of this rank by part and name, only the
    files that hold pieces of them are checked.

    Raises CheckpointError when a step that was named is absent or damaged, when no step is whole, or when the
    folder holds something else; on every rank alike.
    """
    path = open_location(path)

    def candidates() -> list[str] | None:
        try:
            return _candidates(path) if world.rank == 0 else None
        except OSError as error:
            if isinstance(path, StorePath):
                raise fetch_error(path, error) from error
            raise

    found = collectively(world, candidates)[0]
    if found is None:
        return None
    refused: list[str] = []
    for candidate in map(open_location, found):
        try:
            checkpoint = _open_step(candidate, parts, world, shards, show_progress)
        except DamagedCheckpointError as error:
            if candidate == path:
                raise
            refused.append(str(error))
            continue
        if refused and world.rank == 0:
            warnings.warn(
                f"going back to {printable(candidate)}, the newest whole checkpoint; skipped: {'; '.join(refused)}",
                stacklevel=2,
            )
        return checkpoint
    raise CheckpointError(f"no checkpoint in {open_location(found[0]).parent} is whole: {'; '.join(refused)}")


def open_existing(
    path: str | Path | StorePath, parts: Collection[str] | None = ("model",), *, show_progress: bool = False
) -> Checkpoint:
    """`open_checkpoint` for one process, where there has to be one. Raises CheckpointError when there is none."""
    checkpoint = open_checkpoint(path, parts, show_progress=show_progress)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {path}; give a run folder, its checkpoints folder, or one step folder"
        )
    return checkpoint


def check_files(checkpoint: Checkpoint, names: Collection[str], show_progress: bool = False) -> list[str]:
    """What is wrong with the named files, a sentence each; nothing when they are whole."""

    def problem(name: str) -> str | None:
        try:
            check_file(checkpoint.folder, checkpoint.files, name, checkpoint.manifest.files[name])
        except DamagedCheckpointError as error:
            return str(error)
        return None

    names, found = sorted(names), []
    sizes = [checkpoint.manifest.files[name].bytes for name in names]
    with (
        Progress("check", sum(sizes), show=show_progress) as progress,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        for size, said in zip(sizes, threads.map(problem, names)):
            found += [said] if said else []
            progress.add(size)
    return found


def step_problems(folder: Path | StorePath, show_progress: bool = False) -> list[str]:
    """What is wrong with a step: its manifest, any of its files, or the tensors in them; nothing when it is whole."""
    try:
        checkpoint = _with_files(folder, _manifest_of(folder), [{"host": ""}], ALONE)
        if problems := check_files(checkpoint, checkpoint.manifest.files, show_progress):
            return problems
        checkpoint.check_contents()
    except CheckpointError as error:
        return [str(error)]
    return []


def _candidates(path: Path | StorePath) -> list[str] | None:
    """The step folders to try, in that order."""
    if STEP.fullmatch(path.name) or (path / MANIFEST).exists():
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}; {_known_steps(path.parent)}")
        return [str(path)]
    if not path.exists():
        return None
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a run's folder or one of its step folders")
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
            f"{folder} is not the same on all machines; checkpoint.load must name a folder that they share"
        )
    (manifest,) = opened
    mine = _share_of_hashing(answers, manifest, world.rank)
    checkpoint = _with_files(folder, manifest, answers, world)
    _refuse_damage(collectively(world, lambda: {"damage": check_files(checkpoint, mine, show_progress)}))
    return checkpoint


def _with_files(
    folder: Path | StorePath, manifest: Manifest, answers: Sequence[Mapping[str, Any]], world: Axis
) -> Checkpoint:
    """The step with a folder for what is fetched of it, where it is in a store: one a machine, for all its ranks."""
    if isinstance(folder, Path):
        return Checkpoint(folder, manifest, folder)
    host = answers[world.rank]["host"]
    first = next(rank for rank, answer in enumerate(answers) if answer["host"] == host)
    made = collectively(world, lambda: tempfile.mkdtemp(prefix=FETCHED) if world.rank == first else None)[
        first
    ]
    is_own = world.rank == first
    if not Path(made).is_dir():  # of another container that has the same name
        made, is_own = tempfile.mkdtemp(prefix=FETCHED), True
    checkpoint = Checkpoint(folder, manifest, Path(made))
    if is_own:
        weakref.finalize(checkpoint, shutil.rmtree, made, ignore_errors=True)
    return checkpoint


def _manifest_of(folder: Path | StorePath) -> Manifest:
    manifest = read_manifest(folder)
    named = STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise DamagedCheckpointError(
            f"{folder / MANIFEST} is of step {manifest.step}, which is not its folder's; use another step"
        )
    for part, table in manifest.tensors.items():
        for name, stored in table.items():
            if stored.dtype not in DTYPES:
                raise CheckpointError(
                    f"{folder / MANIFEST} gives the {part}'s tensor {name} the type {stored.dtype!r}, this Megalith "
                    f"knows {', '.join(DTYPES)}; use the Megalith that wrote it"
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
                f"{folder} has no {part}: it was saved without; to start the optimizer afresh, set "
                "checkpoint.load_optim to false"
            )
        needed |= manifest.files_of(part) if shards is None else files_for(manifest, part, shards[part])
    return needed


def _share_of_hashing(answers: Sequence[Mapping[str, Any]], manifest: Manifest, rank: int) -> list[str]:
    """The files that this rank checks, of those that its machine's ranks read: the largest first, evenly."""
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


def _known_steps(folder: Path | StorePath) -> str:
    steps = list_steps(folder) if folder.is_dir() else {}
    return f"{folder} has the steps {', '.join(map(str, steps))}" if steps else f"{folder} has no steps"


def _refuse_other_weights(folder: Path | StorePath) -> None:
    names = sorted(item.name for item in folder.iterdir())
    for mark, kind, command in OTHERS:
        if any(mark.fullmatch(name) for name in names):
            raise CheckpointError(
                f"{folder} holds {kind}, no steps of a Megalith run; write it as one: megalith {command} {folder} RUN, "
                "and begin from there"
            )
    found = next((name for name in names if name.endswith((".safetensors", ".distcp", ".pt"))), None)
    if found:
        raise CheckpointError(
            f"{folder} holds {found} but no step_NNNNNNNN folder, so it is no Megalith run; give a run's folder "
            "or one of its step folders"
        )
