"""A Hugging Face folder, written a tensor at a time: whole, or not there.

The names, types and shapes are known before the first tensor, so each shard's header is written first and tensors go
to their places in any order. Everything is written into `NAME.partial` beside the output, synced, and renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.partial import PartialFolder
from megalith.checkpoint.files import byte_count, safetensors_head
from megalith.errors import CheckpointError
from megalith.io import sync_folder

SHARD_BYTES = 5 * 10**9  # as transformers cuts them
# A write of several MB has the kernel look for as large blocks of free memory, which a virtual machine may have given
# back to its host: nine times the processor time of the same bytes in smaller writes, where that is so.
WRITE_BYTES = 2**20


class FolderWriter:
    """The folder at `path`, as a context manager: it takes its name at the end of the block, and only without an error.

    `tensors` gives each tensor's type and shape, in the order in which they are spread over shards.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        shard_bytes: int = SHARD_BYTES,
        replace: bool = False,
    ):
        """Raises CheckpointError when something is at `path`, unless it is to be replaced."""
        self.path = Path(path)
        self._place = PartialFolder(self.path)
        self.partial = self._place.path
        self._tensors = dict(tensors)
        self._shards = _cut(self._tensors, shard_bytes)
        self._files: dict[str, int] = {}  # open, by name
        self._places: dict[str, tuple[str, int]] = {}
        if self.path.exists() and not replace:
            raise CheckpointError(f"{self.path} is already there; remove it, or choose another place")

    def __enter__(self) -> FolderWriter:
        try:
            self._place.begin()
            for file, names in self._shards.items():
                self._begin(file, names)
        except OSError as error:
            self._abandon()
            raise self._refused(error) from error
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Puts a tensor into its place."""
        dtype, shape = self._tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
        file, start = self._places.pop(name)
        data = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
        try:
            while data:
                written = os.pwrite(self._files[file], data[:WRITE_BYTES], start)
                data, start = data[written:], start + written
        except OSError as error:
            raise self._refused(error) from error

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file."""
        self._small(name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

    def copy(self, file: Path) -> None:
        """Copies a small file."""
        self._small(file.name, file.read_bytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            assert not self._places, f"not written: {list(self._places)}"
            try:
                self._finish()
                return
            except BaseException as refused:
                self._abandon()
                if isinstance(refused, OSError):
                    raise self._refused(refused) from refused
                raise
        self._abandon()

    def _begin(self, file: str, names: list[str]) -> None:
        head, starts = safetensors_head({name: self._tensors[name] for name in names})
        self._places |= {name: (file, start) for name, start in starts.items()}
        with open(self.partial / file, "wb") as begun:
            begun.write(head)
        self._files[file] = os.open(self.partial / file, os.O_WRONLY)

    def _finish(self) -> None:
        if len(self._shards) > 1:
            total = sum(byte_count(shape, dtype) for dtype, shape in self._tensors.values())
            where = {name: file for file, names in self._shards.items() for name in names}
            self.write_json(
                "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where}
            )
        for descriptor in self._files.values():
            os.fsync(descriptor)
        self._close()
        sync_folder(self.partial)
        self._place.commit()

    def _small(self, name: str, content: bytes) -> None:
        try:
            with open(self.partial / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._refused(error) from error

    def _abandon(self) -> None:
        self._close()
        self._place.abandon()

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} could not be written: {error.strerror or error}; nothing of it is left: make room, or choose "
            "another place"
        )


def _cut(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
) -> dict[str, list[str]]:
    """File names with the tensors in them: one file, or several of at most `shard_bytes` (but for one large tensor)."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, (dtype, shape) in tensors.items():
        size = byte_count(shape, dtype)
        if held and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(shards, 1)}
