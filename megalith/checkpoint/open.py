"""Opening a checkpoint: which step it is, and that its files are what was saved.

Every file that is going to be used is checked against the manifest before a tensor is touched. A folder of
several steps gives the one saved last that is whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megalith.checkpoint.files import file_record, read_safetensors
from megalith.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    TensorRecord,
    read_manifest,
)
from megalith.checkpoint.steps import CHECKPOINTS, STEP, TOKENIZER, filename, list_steps, save_order
from megalith.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A step folder whose files were found to be what its manifest says."""

    folder: Path
    manifest: Manifest

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where the run's tokenizer was saved, if it was."""
        folder = self.folder / TOKENIZER
        return folder if folder.is_dir() else None

    def table(self, part: str) -> dict[str, TensorRecord]:
        """Type and shape of each tensor of a part (`model`, `optimizer`)."""
        return self.manifest.tensors[filename(part)]

    def tensors(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of a part with its name, on the CPU."""
        return read_safetensors(self.folder / filename(part), self.table(part))


def open_checkpoint(path: str | Path, what: Collection[str] = ("model", "optimizer")) -> Checkpoint | None:
    """Finds a whole checkpoint and checks its manifest and the files of `what`; its tensors are read later.

    `path` is a run's output folder, its `checkpoints`, or one step folder. Of several steps the one saved
    last is taken; when it is damaged, a warning names it and the one before is tried. None when there is no
    such folder or no step in it yet, as at the first start of a run that loads from where it saves.

    Raises CheckpointError when a step that was named is absent or damaged, when no step is whole, or when the
    folder holds something else.
    """
    path = Path(path)
    if STEP.fullmatch(path.name) or (path / MANIFEST).exists():
        return _open_step(path, what)
    if not path.exists():
        return None
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a run's folder or one of its step folders")
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = list_steps(folder)
    if not steps:
        _refuse_other_weights(folder)
        return None
    refused: list[str] = []
    for candidate in sorted(steps.values(), key=lambda step: save_order(step, unreadable=1), reverse=True):
        try:
            checkpoint = _open_step(candidate, what)
        except DamagedCheckpointError as error:
            refused.append(str(error))
            continue
        if refused:
            warnings.warn(
                f"going back to {candidate}, the newest whole checkpoint; skipped: {'; '.join(refused)}",
                stacklevel=2,
            )
        return checkpoint
    raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(refused)}")


def _open_step(folder: Path, what: Collection[str]) -> Checkpoint:
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}; {_known_steps(folder.parent)}")
    manifest = read_manifest(folder)
    needed = [filename(part) for part in what]
    for name in needed:
        if name not in manifest.tensors:
            raise CheckpointError(
                f"{folder} has no {name}: it was saved without; to start the optimizer afresh, set "
                "checkpoint.load_optim to false"
            )
    for name, wanted in manifest.files.items():
        if name in needed or name.startswith(f"{TOKENIZER}/"):
            _check_file(folder, name, wanted)
    return Checkpoint(folder, manifest)


def _check_file(folder: Path, name: str, wanted: FileRecord) -> None:
    path = folder / name
    if any(parent.is_symlink() for parent in [path, *path.parents[: name.count("/")]]):
        raise DamagedCheckpointError(
            f"{path} is a symbolic link, and a checkpoint has none; use another step"
        )
    try:
        found_bytes = path.stat().st_size
        if found_bytes != wanted.bytes:
            raise DamagedCheckpointError(
                f"{path} is damaged: it has {found_bytes} bytes, its manifest says {wanted.bytes}; use another step"
            )
        if file_record(path) != wanted:
            raise DamagedCheckpointError(
                f"{path} is damaged: its content does not have the SHA-256 that its manifest says; "
                "use another step"
            )
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing, its manifest lists it; use another step") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}; use another step") from error


def _known_steps(folder: Path) -> str:
    steps = list_steps(folder) if folder.is_dir() else {}
    return f"{folder} has the steps {', '.join(map(str, steps))}" if steps else f"{folder} has no steps"


def _refuse_other_weights(folder: Path) -> None:
    found = next(
        (item.name for item in folder.iterdir() if item.suffix in (".safetensors", ".distcp", ".pt")), None
    )
    if found:
        raise CheckpointError(
            f"{folder} holds {found} but no step_NNNNNNNN folder, so it is no Megalith run; give a run's folder "
            "or one of its step folders"
        )
