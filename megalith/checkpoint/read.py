"""A whole step, and its tensors: any slice of any of them, wherever its pieces stand.

A reader takes the intersections of the slice that it wants with the pieces that are stored. Files are mapped, so of a
piece only the pages that are wanted are read; and a file is compared with the manifest when it is first opened. Of a
step in an object store the files that are read are fetched into a folder of this machine first, whole and checked.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.extent import Extent
from megalith.checkpoint.files import DTYPES, SafetensorsEntry, file_record, list_safetensors
from megalith.checkpoint.manifest import (
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    PieceRecord,
    StoredTensor,
    TensorRecord,
    fetch_error,
    piece_key,
)
from megalith.checkpoint.steps import TASK, TOKENIZER
from megalith.errors import CheckpointError
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import StorePath, size_of


@dataclass(frozen=True)
class Checkpoint:
    """A step folder whose files were found to be what its manifest says."""

    folder: Path | StorePath
    manifest: Manifest
    files: Path
    """Where its files are on this machine: the folder, or that of the files fetched from it."""

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where the run's tokenizer was saved, if it was."""
        found = next((name for name in self.manifest.files if is_tokenizer_file(name)), None)
        if found is None:
            return None
        parts = found.split("/")
        return self.files.joinpath(*parts[: parts.index(TOKENIZER) + 1])

    @property
    def task_files(self) -> dict[str, Path]:
        """What the run's task goes on with, by the names that it gave."""
        found = filter(is_task_file, self.manifest.files)
        return {name.rpartition("/")[2]: self.files.joinpath(*name.split("/")) for name in found}

    def table(self, part: str) -> dict[str, StoredTensor]:
        """Type and global shape of each tensor of a part (`model`, `optimizer`)."""
        return self.manifest.tensors[part]

    def tensors(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of a part with its name, whole, on the CPU."""
        for name in self.table(part):
            yield name, self.read(part, name)

    def read(self, part: str, name: str, extent: Extent | None = None) -> Tensor:
        """A tensor on the CPU, or the slice `extent` of it."""
        stored = self.table(part)[name]
        extent = extent or Extent.whole(stored.shape)
        values = torch.empty(extent.shape, dtype=DTYPES[stored.dtype])
        self.fill(part, {name: LocalShard(values, extent.offset, tuple(stored.shape), owned=True)})
        return values

    def fill(self, part: str, shards: Mapping[str, LocalShard], progress: Progress | None = None) -> None:
        """Copies into the values of the shards, of any device, what is stored. Raises CheckpointError. `progress`
        counts the bytes."""
        for file, wanted in self._pieces_for(part, shards).items():
            stored = self._tensors_in(file)
            for name, piece, shard in wanted:
                there = _extent(shard)
                both = piece.extent.intersection(there)
                values = stored[piece_key(name, shard.shape, piece.extent)].read()
                taken = shard.values[both.slices(there)]
                taken.copy_(values[both.slices(piece.extent)])
                if progress is not None:
                    progress.add(taken.nbytes)

    def check_contents(self, files: Iterable[str] | None = None) -> None:
        """Raises CheckpointError where the tensors in a file (default: any) are not those that the manifest lists."""
        for file in self._contents if files is None else files:
            self._tensors_in(file)

    def _tensors_in(self, file: str) -> dict[str, SafetensorsEntry]:
        """A file's tensors by their keys; it is compared with the manifest the first time."""
        if file not in self._tables:
            if isinstance(self.folder, StorePath):
                check_file(self.folder, self.files, file, self.manifest.files[file])
            found, wanted = list_safetensors(self.files / file, "use another step"), self._contents[file]
            if found.keys() != wanted.keys():
                raise CheckpointError(
                    f"{self.folder / file} does not hold the tensors that its manifest lists; use another step"
                )
            for name, record in wanted.items():
                there = TensorRecord(dtype=found[name].dtype, shape=list(found[name].shape))
                if there != record:
                    raise CheckpointError(
                        f"{self.folder / file}: {name} is {there}, its manifest says {record}; use another step"
                    )
            self._tables[file] = found
        return self._tables[file]

    def _pieces_for(
        self, part: str, shards: Mapping[str, LocalShard]
    ) -> dict[str, list[tuple[str, PieceRecord, LocalShard]]]:
        files: dict[str, list[tuple[str, PieceRecord, LocalShard]]] = {}
        for name, shard in shards.items():
            for piece in self.table(part)[name].pieces:
                if piece.extent.intersection(_extent(shard)):
                    files.setdefault(piece.file, []).append((name, piece, shard))
        return files

    @cached_property
    def _tables(self) -> dict[str, dict[str, SafetensorsEntry]]:
        """The tensors of the files that hold what the manifest lists."""
        return {}

    @cached_property
    def _contents(self) -> dict[str, dict[str, TensorRecord]]:
        """The pieces of each file, by their keys."""
        contents: dict[str, dict[str, TensorRecord]] = {}
        for named in self.manifest.tensors.values():
            for name, stored in named.items():
                for piece in stored.pieces:
                    key = piece_key(name, stored.shape, piece.extent)
                    record = TensorRecord(dtype=stored.dtype, shape=piece.shape)
                    contents.setdefault(piece.file, {})[key] = record
        return contents


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of a step, by its name there, is the tokenizer's."""
    return TOKENIZER in name.split("/")[:-1]


def is_task_file(name: str) -> bool:
    """Whether a file of a step, by its name there, is the task's."""
    return name.split("/")[-2:-1] == [TASK] and not is_tokenizer_file(name)


def files_for(manifest: Manifest, part: str, shards: Mapping[str, LocalShard]) -> set[str]:
    """The files that hold pieces of the shards; names that the manifest does not have are passed over."""
    table = manifest.tensors[part]
    return {
        piece.file
        for name, shard in shards.items()
        if name in table and len(table[name].shape) == len(shard.shape)
        for piece in table[name].pieces
        if piece.extent.intersection(_extent(shard))
    }


def _extent(shard: LocalShard) -> Extent:
    return Extent(shard.offset, tuple(shard.values.shape))


def check_file(folder: Path | StorePath, files: Path, name: str, wanted: FileRecord) -> None:
    """Raises DamagedCheckpointError, naming the file, unless it is what the manifest says.

    One in a store is brought into `files` in the same go, whose content is checked already. Where that fails the step
    may be whole, so it is a CheckpointError.
    """
    path, here = folder / name, files / name
    is_remote = isinstance(folder, StorePath)
    if is_remote and here.exists():
        return
    try:
        if not is_remote:
            _refuse_odd(path, name)
        size = size_of(path)
        if size != wanted.bytes:
            raise DamagedCheckpointError(
                f"{path} is damaged: it has {size} bytes, its manifest says {wanted.bytes}; use another step"
            )
        content = _fetched(path, here) if is_remote else path
        if file_record(content) != wanted:
            raise DamagedCheckpointError(
                f"{path} is damaged: its content does not have the SHA-256 that its manifest says; "
                "use another step"
            )
        if is_remote:
            os.replace(content, here)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing, its manifest lists it; use another step") from None
    except OSError as error:
        if is_remote:
            raise fetch_error(path, error) from error
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}; use another step") from error


def _refuse_odd(path: Path, name: str) -> None:
    if any(parent.is_symlink() for parent in [path, *path.parents[: name.count("/")]]):
        raise DamagedCheckpointError(
            f"{path} is a symbolic link, and a checkpoint has none; use another step"
        )
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedCheckpointError(f"{path} is not a file, its manifest lists it as one; use another step")


def _fetched(path: StorePath, target: Path) -> Path:
    """A copy beside `target` under a name of this call's own: another rank may be at the same file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    path.fetch(copy)
    return copy
