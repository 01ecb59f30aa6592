"""An opened step, and access to any slice of its tensors.

A read intersects the requested slice with the stored pieces. Files are mapped, so only the needed pages of a piece are
read, and a file's content is compared with the manifest when it is first used. Files of a step in an object store are
fetched to this machine first, completely, and verified.
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
    """A step folder whose files match its manifest."""

    folder: Path | StorePath
    manifest: Manifest
    files: Path
    """Folder of the files on this machine: the step folder, or a copy fetched from a store."""

    @property
    def tokenizer_folder(self) -> Path | None:
        """Folder of the run's tokenizer, or None if it was not saved."""
        file = next((name for name in self.manifest.files if is_tokenizer_file(name)), None)
        if file is None:
            return None
        parts = file.split("/")
        return self.files.joinpath(*parts[: parts.index(TOKENIZER) + 1])

    @property
    def task_files(self) -> dict[str, Path]:
        """Files of the task's state, by name."""
        names = filter(is_task_file, self.manifest.files)
        return {name.rpartition("/")[2]: self.files.joinpath(*name.split("/")) for name in names}

    def table(self, part: str) -> dict[str, StoredTensor]:
        """Return the dtype and global shape of each tensor of a checkpoint part (`model`, `optimizer`)."""
        return self.manifest.tensors[part]

    def tensors(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and full value, on the CPU, of each tensor of a checkpoint part."""
        for name in self.table(part):
            yield name, self.read(part, name)

    def read(self, part: str, name: str, extent: Extent | None = None) -> Tensor:
        """Read a tensor, or the slice `extent` of it, to the CPU."""
        stored = self.table(part)[name]
        extent = extent or Extent.full(stored.shape)
        values = torch.empty(extent.shape, dtype=DTYPES[stored.dtype])
        self.fill(part, {name: LocalShard(values, extent.offset, tuple(stored.shape), owned=True)})
        return values

    def fill(self, part: str, shards: Mapping[str, LocalShard], progress: Progress | None = None) -> None:
        """Copy stored values into shards on any device. `progress` counts bytes. Raises CheckpointError."""
        for file, pieces in self._pieces_for(part, shards).items():
            stored = self._tensors_in(file)
            for name, piece, shard in pieces:
                target = _extent(shard)
                both = piece.extent.intersection(target)
                values = stored[piece_key(name, shard.shape, piece.extent)].read()
                destination = shard.values[both.slices(target)]
                destination.copy_(values[both.slices(piece.extent)])
                if progress is not None:
                    progress.add(destination.nbytes)

    def check_contents(self, files: Iterable[str] | None = None) -> None:
        """Raise CheckpointError if the tensors in one of `files` (default: all) are not those listed in the
        manifest."""
        for file in self._contents if files is None else files:
            self._tensors_in(file)

    def _tensors_in(self, file: str) -> dict[str, SafetensorsEntry]:
        """Return a file's tensors by key, compared with the manifest on first use."""
        if file not in self._tables:
            if isinstance(self.folder, StorePath):
                check_file(self.folder, self.files, file, self.manifest.files[file])
            entries, expected = list_safetensors(self.files / file, "use another step"), self._contents[file]
            if entries.keys() != expected.keys():
                raise CheckpointError(
                    f"{self.folder / file} does not contain the tensors listed in its manifest; use another step"
                )
            for name, record in expected.items():
                stored = TensorRecord(dtype=entries[name].dtype, shape=list(entries[name].shape))
                if stored != record:
                    raise CheckpointError(
                        f"{self.folder / file}: {name} is {stored}, but {record} in its manifest; use another step"
                    )
            self._tables[file] = entries
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
        """Tensors of the files compared so far, by file and key."""
        return {}

    @cached_property
    def _contents(self) -> dict[str, dict[str, TensorRecord]]:
        """Expected pieces by file and key."""
        contents: dict[str, dict[str, TensorRecord]] = {}
        for named in self.manifest.tensors.values():
            for name, stored in named.items():
                for piece in stored.pieces:
                    key = piece_key(name, stored.shape, piece.extent)
                    record = TensorRecord(dtype=stored.dtype, shape=piece.shape)
                    contents.setdefault(piece.file, {})[key] = record
        return contents


def is_tokenizer_file(name: str) -> bool:
    """Return True if `name`, a path inside a checkpoint step, is in the tokenizer's folder."""
    return TOKENIZER in name.split("/")[:-1]


def is_task_file(name: str) -> bool:
    """Return True if `name`, a path inside a checkpoint step, is a file of the task's state."""
    return name.split("/")[-2:-1] == [TASK] and not is_tokenizer_file(name)


def files_for(manifest: Manifest, part: str, shards: Mapping[str, LocalShard]) -> set[str]:
    """Return the files with pieces of the shards. Names missing in the manifest are ignored."""
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


def check_file(folder: Path | StorePath, files: Path, name: str, record: FileRecord) -> None:
    """Verify a file against its manifest record.

    A file in a store is fetched into `files` and verified, unless it is already there.

    Raises:
        DamagedCheckpointError: the file does not match.
        CheckpointError: the store failed; the step may be intact.
    """
    path, local = folder / name, files / name
    is_remote = isinstance(folder, StorePath)
    if is_remote and local.exists():
        return
    try:
        if not is_remote:
            _reject_special_file(path, name)
        size = size_of(path)
        if size != record.bytes:
            raise DamagedCheckpointError(
                f"{path} is damaged: it has {size} bytes, but {record.bytes} in its manifest; use another step"
            )
        content = _fetch_copy(path, local) if is_remote else path
        if file_record(content) != record:
            raise DamagedCheckpointError(
                f"{path} is damaged: its content does not match the SHA-256 in its manifest; use another step"
            )
        if is_remote:
            os.replace(content, local)
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path} is missing, but listed in the manifest; use another step"
        ) from None
    except OSError as error:
        if is_remote:
            raise fetch_error(path, error) from error
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}; use another step") from error


def _reject_special_file(path: Path, name: str) -> None:
    if any(parent.is_symlink() for parent in [path, *path.parents[: name.count("/")]]):
        raise DamagedCheckpointError(
            f"{path} is a symbolic link, which checkpoints cannot contain; use another step"
        )
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedCheckpointError(
            f"{path} is not a file, but listed as one in the manifest; use another step"
        )


def _fetch_copy(path: StorePath, target: Path) -> Path:
    """Fetch into a uniquely named file next to `target`, because other ranks may fetch the same file at the
    same time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    path.fetch(copy)
    return copy
