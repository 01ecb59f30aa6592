"""Writing of a folder with safetensors shards, one tensor at a time.

Names, dtypes and shapes are known in advance, so each shard's header is written first and tensors follow in any order.
The folder is written as `NAME.partial`, synced and renamed, so that it is either complete or absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from megalith.bridge.folder import name_in_folder, path_exists, read_folder_file
from megalith.bridge.partial import partial_folder, write_error
from megalith.checkpoint.files import Layout, RandomAccessWriter, byte_count
from megalith.errors import CheckpointError
from megalith.io import sync_folder, write_file
from megalith.remote import open_location

SHARD_BYTES = 5 * 10**9  # as in transformers


class FolderWriter:
    """Context manager that writes a Hugging Face folder.

    The folder appears at `path` at the end, if there was no error.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Layout,
        shard_bytes: int = SHARD_BYTES,
        replace: bool = False,
    ):
        """Plan the shards.

        Args:
            path: folder or URL to write.
            tensors: dtype and shape of each tensor, in the order of the shards.
            shard_bytes: maximum size of a shard.
            replace: replace an existing folder.

        Raises:
            CheckpointError: `path` exists and `replace` is false.
        """
        self.path = open_location(path)
        self._partial_folder = partial_folder(self.path)
        self.partial = self._partial_folder.path
        self._tensors = dict(tensors)
        self._shards = _plan_shards(self._tensors, shard_bytes)
        self._weight_map = {name: file for file, names in self._shards.items() for name in names}
        self._files: dict[str, RandomAccessWriter] = {}  # open files by name
        if path_exists(self.path) and not replace:
            raise CheckpointError(f"{self.path} already exists; remove it, or choose another path")

    def __enter__(self) -> FolderWriter:
        try:
            self._partial_folder.begin()
            for file, names in self._shards.items():
                self._files[file] = RandomAccessWriter(
                    self.partial / file, {name: self._tensors[name] for name in names}
                )
        except OSError as error:
            self._abandon()
            raise write_error(self.path, error) from error
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor."""
        dtype, shape = self._tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
        try:
            self._files[self._weight_map[name]].put(name, tensor)
        except OSError as error:
            raise write_error(self.path, error) from error

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        self._write_small(name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

    def copy(self, file: Path) -> None:
        """Copy a small file of a Hugging Face folder."""
        self._write_small(name_in_folder(file), read_folder_file(file))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finish()
                return
            except BaseException as failure:
                self._abandon()
                if isinstance(failure, OSError):
                    raise write_error(self.path, failure) from failure
                raise
        self._abandon()

    def _finish(self) -> None:
        if len(self._shards) > 1:
            total = sum(byte_count(shape, dtype) for dtype, shape in self._tensors.values())
            self.write_json(
                "model.safetensors.index.json",
                {"metadata": {"total_size": total}, "weight_map": self._weight_map},
            )
        for file in self._files.values():
            file.sync()
        self._close()
        sync_folder(self.partial)
        self._partial_folder.commit()

    def _write_small(self, name: str, content: bytes) -> None:
        file = self.partial / name
        try:
            if file.parent != self.partial:
                file.parent.mkdir(exist_ok=True)
            write_file(file, content)
            sync_folder(file.parent)
        except OSError as error:
            raise write_error(self.path, error) from error

    def _abandon(self) -> None:
        self._close()
        self._partial_folder.abandon()

    def _close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def _plan_shards(tensors: Layout, shard_bytes: int) -> dict[str, list[str]]:
    """Return file names with their tensors: one file, or several of at most `shard_bytes` (or one large tensor)."""
    shards: list[list[str]] = [[]]
    shard_size = 0
    for name, (dtype, shape) in tensors.items():
        size = byte_count(shape, dtype)
        if shard_size and shard_size + size > shard_bytes:
            shards.append([])
            shard_size = 0
        shards[-1].append(name)
        shard_size += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(shards, 1)}
