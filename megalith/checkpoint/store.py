"""A step folder while it is saved: whole, or not there.

A save writes into `step_00000100.tmp`, syncs every file, writes the manifest last, renames the folder, and only
then moves `latest` and deletes steps that need not be kept. So whenever a save dies, the steps before it are
whole; its remains are cleared by the next save. A step that is saved again stands aside as
`step_00000100.replaced` until the new one has its name, and counts as the step if it never gets it.

An object store renames nothing. There a save writes below a name in `step_00000100/` that no other save has, then the
manifest, which makes the step whole at once (saved again: the new one), then `latest`. A step loses its manifest before
its first file is deleted, and one without a manifest is a killed save's, which the next save clears.

One process of a job does what stands here; the others only write files into the temporary folder.
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
    """A step to be saved, here or in an object store."""
    return (StoredStep if isinstance(checkpoints, StorePath) else StepFolder)(checkpoints, step)


class StepFolder:
    """`step_NNNNNNNN` in a run's `checkpoints`, from `begin` to `commit` or `abandon`. All raise OSError."""

    shared = "train.output_dir must be a folder that all machines share"

    def __init__(self, checkpoints: Path, step: int):
        self.checkpoints = checkpoints
        self.final = checkpoints / f"step_{step:08d}"
        """Where the step stands once it is whole."""
        self.temporary = checkpoints / f"{self.final.name}.tmp"
        """Where its files are written until then."""
        self.prefix = ""
        """What stands before their names in the manifest."""

    def begin(self) -> str:
        """Makes the temporary folder, after clearing what killed saves have left. Returns its name, for `join`."""
        make_folder(self.checkpoints)
        latest = self.checkpoints / LATEST
        if latest.is_dir() and not latest.is_symlink():
            raise CheckpointError(
                f"{latest} is a folder, but a save writes the name of the newest step into a file there; move the "
                "folder away"
            )
        _clear_remains(self.checkpoints)
        if self.temporary.exists():  # what could not be removed; here it is in the way
            shutil.rmtree(self.temporary)
        self.temporary.mkdir()
        return self.temporary.name

    def join(self, name: str) -> None:
        """Has this process write into the folder that another began."""

    def commit(
        self,
        record: RunRecord,
        table: Mapping[str, Mapping[str, TensorRecord]],
        written: Iterable[Mapping[str, Any]],
        write_tokenizer: Callable[[Path], None] | None,
        task_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Makes the step whole, from what each writer's `ShardWriter.finish` gave and the tensors' types and shapes.

        `write_tokenizer` fills the folder that it is given; `task_files` are contents by name. Raises CheckpointError
        when a written file is not here.
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
        self._check_that_files_are_here(files)
        files |= self._write_tokenizer(write_tokenizer)
        for name, content in (task_files or {}).items():
            self._write_task_file(f"{TASK}/{name}", content)
            files[f"{self.prefix}{TASK}/{name}"] = bytes_record(content).model_dump()
        number = max([next_save_number(self.checkpoints), *(end for _, end in record.abandoned)])
        kept = record.model_dump(mode="json")
        try:
            text = manifest_text({**kept, "save_number": number, "files": files, "tensors": tensors})
        except ValidationError as error:
            raise CheckpointError(f"what was written is no checkpoint: {first_problem(error)}") from None
        self._publish(text)

    def _publish(self, manifest: str) -> None:
        """Makes the step whole, and `latest` name it."""
        write_file(self.temporary / MANIFEST, manifest)
        sync_folder(self.temporary)
        aside = self.final.with_name(f"{self.final.name}.replaced")
        if (old := replace_folder(self.temporary, self.final, aside)) is not None:
            _remove(old)
        latest = self.checkpoints / LATEST
        if latest.is_symlink():  # someone's own, whose target is left as it is
            latest.unlink()
        replace_file(latest, self.final.name + "\n")

    def abandon(self) -> None:
        """Removes what was written. What cannot be removed now goes with the next save."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def delete_old_steps(self, keep_last: int | None, keep_every: int | None) -> None:
        """Deletes all but the `keep_last` steps saved last, this one, and those divisible by `keep_every`.

        With None for `keep_last` all stay. A step with a damaged manifest is the oldest; one whose manifest cannot be
        read now may be whole and new, so it stays and is none of the last. What cannot be deleted now is tried again
        after the next save.
        """
        if keep_last is None:
            return
        with contextlib.suppress(OSError):
            steps = list_steps(self.checkpoints)
            numbers = {}
            for step, folder in steps.items():
                with contextlib.suppress(OSError):
                    numbers[step] = save_number(folder) or 0
            for step in sorted(numbers, key=lambda step: (numbers[step], step))[:-keep_last]:
                if steps[step] != self.final and not (keep_every and step % keep_every == 0):
                    self._delete(steps[step])

    def _check_that_files_are_here(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        sizes = self._sizes(files)
        for name, record in files.items():
            if sizes.get(name) != record["bytes"]:
                raise CheckpointError(
                    f"{self.final / name}, which another process has written, is not here; {self.shared}"
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
        """Deletes a step: it has lost its name before its first file goes. What stays goes another time."""
        doomed = step.with_name(f"{step.name}.deleted.tmp")
        with contextlib.suppress(OSError):
            os.replace(step, doomed)
            _remove(doomed)


class StoredStep(StepFolder):
    """The same in an object store."""

    shared = "checkpoint.save must be a store that all processes share, which memory:// is not"
    is_published = False  # or may be: the store may have taken a manifest whose receipt was lost

    def begin(self) -> str:
        for folder in self.checkpoints.iterdir():
            if STEP.fullmatch(folder.name) and not (folder / MANIFEST).exists():
                folder.remove()
        self.join(secrets.token_hex(4))
        return self.temporary.name

    def join(self, name: str) -> None:
        self.temporary, self.prefix = self.final / name, f"{name}/"

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            if not self.is_published:
                self.temporary.remove()

    def _publish(self, manifest: str) -> None:
        self.is_published = True
        (self.final / MANIFEST).write(manifest)
        (self.checkpoints / LATEST).write(self.final.name + "\n")
        # What was saved under this number before; where it cannot be removed now it goes with the step.
        with contextlib.suppress(OSError):
            for old in self.final.iterdir():
                if old.name not in (MANIFEST, self.temporary.name):
                    old.remove()

    def _sizes(self, names: Iterable[str]) -> dict[str, int]:
        return self.final.sizes()

    def _write_tokenizer(self, write_tokenizer: Callable[[Path], None] | None) -> dict[str, Any]:
        records = {}
        with tempfile.TemporaryDirectory() as made:
            if write_tokenizer is not None:
                write_tokenizer(Path(made))
            for path in sorted(Path(made).rglob("*")):
                if path.is_file():
                    name = f"{TOKENIZER}/{path.relative_to(made).as_posix()}"
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
    """Removes a folder or a file, of a link not what it leads to. Raises nothing: what stays goes another time."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _clear_remains(checkpoints: Path) -> None:
    """Removes what killed saves and deletions left, and gives a step that was set aside its name back.

    What cannot be removed stays: on NFS a folder does while another process has a file of it open.
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
