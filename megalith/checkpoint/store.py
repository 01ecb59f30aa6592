"""Saving a step: its folder is whole or not there.

A save writes into `step_00000100.tmp`, syncs every file, writes the manifest last, renames the folder, and only
then moves `latest` and deletes steps that need not be kept. So whenever a save dies, the steps before it are
whole; its remains are cleared by the next save. A step that is saved again stands aside as
`step_00000100.replaced` until the new one has its name, and counts as the step if it never gets it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from megalith.checkpoint.files import (
    record_and_sync,
    replace_text,
    sync_folder,
    tensor_record,
    write_safetensors,
    write_text,
)
from megalith.checkpoint.manifest import MANIFEST, Manifest, RunRecord
from megalith.checkpoint.steps import LATEST, REPLACED, TOKENIZER, filename, list_steps, save_order
from megalith.errors import CheckpointError
from megalith.parallel.gather import GlobalTensor


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where a step is saved."""
    return checkpoints / f"step_{step:08d}"


def save_step(
    checkpoints: Path,
    record: RunRecord,
    tensors: Mapping[str, Mapping[str, Tensor | GlobalTensor]],
    write_tokenizer: Callable[[Path], None] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Writes `step_NNNNNNNN` with a safetensors file for each part of `tensors`; returns its folder.

    `write_tokenizer` fills the folder that it is given. With `keep_last`, only that many of the steps saved
    last stay, and those divisible by `keep_every`. Raises CheckpointError when the disk refuses; the steps
    before are then as they were.
    """
    final = step_folder(checkpoints, record.step)
    temporary = checkpoints / f"{final.name}.tmp"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        _clear_remains(checkpoints)
        _write_step(temporary, record, _next_save_number(checkpoints), tensors, write_tokenizer)
        _move_into_place(temporary, final)
        replace_text(checkpoints / LATEST, final.name + "\n")
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"the checkpoint {final} could not be saved: {error.strerror or error}; the steps saved before are "
            "whole: make room or mend the disk, then go on from the last of them"
        ) from error
    if keep_last is not None:
        _delete_old(checkpoints, final, keep_last, keep_every)
    return final


def _next_save_number(checkpoints: Path) -> int:
    return 1 + max(
        (save_order(step, unreadable=0)[1] for step in list_steps(checkpoints).values()), default=0
    )


def _write_step(
    folder: Path,
    record: RunRecord,
    save_number: int,
    tensors: Mapping[str, Mapping[str, Tensor | GlobalTensor]],
    write_tokenizer: Callable[[Path], None] | None,
) -> None:
    folder.mkdir()
    files = {filename(part): write_safetensors(folder / filename(part), tensors[part]) for part in tensors}
    if write_tokenizer is not None:
        (folder / TOKENIZER).mkdir()
        write_tokenizer(folder / TOKENIZER)
        for path in sorted((folder / TOKENIZER).rglob("*")):
            if path.is_dir():
                sync_folder(path)
            else:
                files[path.relative_to(folder).as_posix()] = record_and_sync(path)
        sync_folder(folder / TOKENIZER)
    manifest = Manifest(
        **record.model_dump(),
        save_number=save_number,
        files=files,
        tensors={
            filename(part): {name: tensor_record(tensor) for name, tensor in named.items()}
            for part, named in tensors.items()
        },
    )
    write_text(folder / MANIFEST, manifest.to_json())
    sync_folder(folder)


def _move_into_place(temporary: Path, final: Path) -> None:
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        os.replace(final, replaced)
    os.replace(temporary, final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _clear_remains(checkpoints: Path) -> None:
    """Removes what killed saves and deletions left, and gives a step that was set aside its name back."""
    for folder in list(checkpoints.iterdir()):
        if folder.name.startswith("step_") and folder.name.endswith(".tmp"):
            shutil.rmtree(folder)
        elif REPLACED.fullmatch(folder.name):
            final = folder.with_name(folder.name.removesuffix(".replaced"))
            if final.exists():
                shutil.rmtree(folder)
            else:
                os.replace(folder, final)


def _delete_old(checkpoints: Path, newest: Path, keep_last: int, keep_every: int | None) -> None:
    steps = list_steps(checkpoints)
    in_order = sorted(steps, key=lambda step: save_order(steps[step], unreadable=-1))
    for step in in_order[:-keep_last]:
        if steps[step] == newest or (keep_every and step % keep_every == 0):
            continue
        doomed = steps[step].with_name(f"{steps[step].name}.tmp")
        with contextlib.suppress(OSError):  # what cannot be deleted now is tried again after the next save
            os.replace(steps[step], doomed)
            shutil.rmtree(doomed)
