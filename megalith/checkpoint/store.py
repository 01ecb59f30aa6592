"""Atomic creation of step folders.

A save writes into `step_00000100.tmp`, syncs every file, writes the manifest last, renames the folder, and only then
updates `latest` and deletes old steps. If a save is killed at any point, earlier steps stay intact, and the next save
removes its remains. A step that is saved again is renamed to `step_00000100.replaced` until the new one has its name,
and counts as the step if the new one never gets it.

An object store cannot rename. There, a save writes under a unique name in `step_00000100/`, then the manifest, which
completes the step (or replaces it), then `latest`. A step's manifest is deleted before its files; a folder without a
manifest is left from a killed save and removed by the next one.

One process of a job calls these functions; the others only write files into the temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalith.checkpoint.files import bytes_record, file_record
from megalith.checkpoint.manifest import MANIFEST, RunRecord, TensorRecord, first_problem, manifest_text
from megalith.checkpoint.steps import (
    LATEST,
    REPLACED,
    STEP,
    TASK,
    TOKENIZER,
    list_steps,
    next_save_number,
    save_number,
)
from megalith.errors import CheckpointError
from megalith.io import make_folder, replace_file, replace_folder, sync_folder, sync_path, write_file
from megalith.remote import StorePath


def step_folder(checkpoints: Path | StorePath, step: int) -> StepFolder:
    """Return the folder of a step to be saved, local or in an object store."""
    return (StoredStep if isinstance(checkpoints, StorePath) else StepFolder)(checkpoints, step)


class StepFolder:
    """`step_NNNNNNNN` in a run's `checkpoints`, from `begin` to `commit` or `abandon`.

    Methods raise OSError if the storage fails.
    """

    shared = "train.output_dir must be a folder that all machines share"

    def __init__(self, checkpoints: Path, step: int):
        self.checkpoints = checkpoints
        self.final = checkpoints / f"step_{step:08d}"
        """Path of the completed step."""
        self.temporary = checkpoints / f"{self.final.name}.tmp"
        """Path of the step's files until the step is completed."""
        self.prefix = ""
        """Prefix of the files' names in the manifest."""
        self.is_complete = False
        """True once `commit` has completed the step."""

    def begin(self) -> str:
        """Create the temporary folder and remove remains of killed saves. Return its name, for `use_folder`.

        Raises CheckpointError if `latest` is a folder.
        """
        make_folder(self.checkpoints)
        latest = self.checkpoints / LATEST
        if latest.is_dir() and not latest.is_symlink():
            raise CheckpointError(
                f"{latest} is a folder, but must be a file with the name of the newest step; move the folder away"
            )
        _clear_remains(self.checkpoints)
        if self.temporary.exists():  # could not be removed before, and must be now
            shutil.rmtree(self.temporary)
        self.temporary.mkdir()
        return self.temporary.name

    def use_folder(self, name: str) -> None:
        """Write into the folder that another process began."""

    def commit(
        self,
        record: RunRecord,
        table: Mapping[str, Mapping[str, TensorRecord]],
        written: Iterable[Mapping[str, Any]],
        write_tokenizer: Callable[[Path], None] | None,
        task_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Complete the step.

        Args:
            record: the run's state besides tensors.
            table: dtype and shape of each tensor, by part and name.
            written: the result of each writer's `ShardWriter.finish`.
            write_tokenizer: function that writes the tokenizer into the folder passed to it.
            task_files: contents by file name.

        Raises:
            CheckpointError: a file written by another process is not visible here.
        """
        files: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {
            part: {name: {**record.model_dump(), "pieces": []} for name, record in named.items()}
            for part, named in table.items()
        }
        for share in written:
            files |= {self.prefix + name: record for name, record in share["files"].items()}
            for part, name, piece in share["pieces"]:
                tensors[part][name]["pieces"].append(piece | {"file": self.prefix + piece["file"]})
        self._check_files_visible(files)
        files |= self._write_tokenizer(write_tokenizer)
        for name, content in (task_files or {}).items():
            self._write_task_file(f"{TASK}/{name}", content)
            files[f"{self.prefix}{TASK}/{name}"] = bytes_record(content).model_dump()
        number = max([next_save_number(self.checkpoints), *(end for _, end in record.abandoned)])
        fields = record.model_dump(mode="json")
        try:
            text = manifest_text({**fields, "save_number": number, "files": files, "tensors": tensors})
        except ValidationError as error:
            raise CheckpointError(
                f"the written files are not a valid checkpoint: {first_problem(error)}"
            ) from None
        self._publish(text)
        self.is_complete = True

    def _publish(self, manifest: str) -> None:
        """Complete the step and update `latest`."""
        write_file(self.temporary / MANIFEST, manifest)
        sync_folder(self.temporary)
        replaced = self.final.with_name(f"{self.final.name}.replaced")
        if (old := replace_folder(self.temporary, self.final, replaced)) is not None:
            _remove(old)
        latest = self.checkpoints / LATEST
        if latest.is_symlink():  # created by the user; keep its target
            latest.unlink()
        replace_file(latest, self.final.name + "\n")

    def abandon(self) -> None:
        """Remove the files written so far. Anything that cannot be removed is left for the next save."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def delete_old_steps(self, keep_last: int | None, keep_every: int | None) -> None:
        """Delete all steps except the `keep_last` most recent, this one, and those divisible by `keep_every`.

        Without `keep_last`, keep all. A step with a damaged manifest counts as the oldest. A step whose manifest cannot
        be read at present may be intact and new: it is kept and not counted. Failed deletions are tried again after the
        next save.
        """
        if keep_last is None:
            return
        with contextlib.suppress(OSError):
            steps = list_steps(self.checkpoints)
            save_numbers = {}
            for step, folder in steps.items():
                with contextlib.suppress(OSError):
                    save_numbers[step] = save_number(folder) or 0
            for step in sorted(save_numbers, key=lambda step: (save_numbers[step], step))[:-keep_last]:
                if steps[step] != self.final and not (keep_every and step % keep_every == 0):
                    self._delete(steps[step])

    def _check_files_visible(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        sizes = self._sizes(files)
        for name, record in files.items():
            if sizes.get(name) != record["bytes"]:
                raise CheckpointError(
                    f"{self.final / name} was written by another process, but this process does not see it; "
                    f"{self.shared}"
                )

    def _sizes(self, names: Iterable[str]) -> dict[str, int]:
        paths = {name: self.temporary / name for name in names}
        return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}

    def _write_tokenizer(self, write_tokenizer: Callable[[Path], None] | None) -> dict[str, Any]:
        if write_tokenizer is None:
            return {}
        folder = self.temporary / TOKENIZER
        folder.mkdir()
        write_tokenizer(folder)
        records = {}
        for path in sorted(folder.rglob("*")):
            if path.is_dir():
                sync_folder(path)
            else:
                sync_path(path)
                records[path.relative_to(self.temporary).as_posix()] = file_record(path).model_dump()
        sync_folder(folder)
        return records

    def _write_task_file(self, name: str, content: bytes) -> None:
        path = self.temporary / name
        path.parent.mkdir(exist_ok=True)
        write_file(path, content)
        sync_folder(path.parent)

    def _delete(self, step: Path) -> None:
        """Delete a step. It is renamed before its first file is deleted. A later save removes what remains."""
        trash = step.with_name(f"{step.name}.deleted.tmp")
        with contextlib.suppress(OSError):
            os.replace(step, trash)
            _remove(trash)


class StoredStep(StepFolder):
    """A step in an object store."""

    shared = "checkpoint.save must be a store that all processes share; memory:// is not"
    is_published = False  # True once a manifest was sent: the store may have it although its reply was lost

    def begin(self) -> str:
        for folder in self.checkpoints.iterdir():
            if STEP.fullmatch(folder.name) and not (folder / MANIFEST).exists():
                folder.remove()
        self.use_folder(secrets.token_hex(4))
        return self.temporary.name

    def use_folder(self, name: str) -> None:
        self.temporary, self.prefix = self.final / name, f"{name}/"

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            if not self.is_published:
                self.temporary.remove()

    def _publish(self, manifest: str) -> None:
        self.is_published = True
        (self.final / MANIFEST).write(manifest)
        (self.checkpoints / LATEST).write(self.final.name + "\n")
        # Remove an earlier save of this step. What cannot be removed is deleted with the step.
        with contextlib.suppress(OSError):
            for old in self.final.iterdir():
                if old.name not in (MANIFEST, self.temporary.name):
                    old.remove()

    def _sizes(self, names: Iterable[str]) -> dict[str, int]:
        return self.final.sizes()

    def _write_tokenizer(self, write_tokenizer: Callable[[Path], None] | None) -> dict[str, Any]:
        records = {}
        with tempfile.TemporaryDirectory() as folder:
            if write_tokenizer is not None:
                write_tokenizer(Path(folder))
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    name = f"{TOKENIZER}/{path.relative_to(folder).as_posix()}"
                    (self.temporary / name).send(path)
                    records[self.prefix + name] = file_record(path).model_dump()
        return records

    def _write_task_file(self, name: str, content: bytes) -> None:
        (self.temporary / name).write(content)

    def _delete(self, step: StorePath) -> None:
        with contextlib.suppress(OSError):
            (step / MANIFEST).unlink()
            step.remove()


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, ignoring errors."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _clear_remains(checkpoints: Path) -> None:
    """Remove remains of killed saves and deletions, and restore a step that was being replaced.

    What cannot be removed stays: on NFS, a folder in which another process has a file open.
    """
    for folder in list(checkpoints.iterdir()):
        if folder.name.startswith(("step_", f".{LATEST}.")) and folder.name.endswith(".tmp"):
            _remove(folder)
        elif REPLACED.fullmatch(folder.name):
            final = folder.with_name(folder.name.removesuffix(".replaced"))
            if final.exists():
                _remove(folder)
            else:
                os.replace(folder, final)
