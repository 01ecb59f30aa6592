"""Writes tensors into a step, piece by piece.

`StepWriter` is for programs that build a checkpoint from something else (another format, another number of files). It
receives one tensor or slice at a time and holds at most a few shards of `shard_bytes`. It uses `ShardWriter`, which
writes one process's files; each rank of a job has one (saver.py).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from megalith.checkpoint.extent import Extent
from megalith.checkpoint.files import TensorSource, byte_count, tensor_record, write_safetensors
from megalith.checkpoint.manifest import FileRecord, RunRecord, TensorRecord, piece_key
from megalith.checkpoint.store import StepFolder, step_folder
from megalith.errors import CheckpointError
from megalith.io import sync_folder
from megalith.remote import StorePath, open_location

THREADS = 4  # concurrently written files; hashing and writing release the GIL
SMALLEST_SHARD, LARGEST_SHARD = 2**26, 2**31
STREAMED_SHARD = 2**28


@dataclass(frozen=True)
class WriteItem:
    """The slice `extent` of a tensor, to be written."""

    part: str
    name: str
    values: Tensor | TensorSource
    extent: Extent
    shape: tuple[int, ...]  # of the global tensor

    @property
    def bytes(self) -> int:
        return byte_count(self.extent.shape, self.values.dtype)


def shard_bytes_for(total: int) -> int:
    """Return the file size for `total` bytes: at least two files per thread, within SMALLEST_SHARD and
    LARGEST_SHARD."""
    return min(max(total // (2 * THREADS), SMALLEST_SHARD), LARGEST_SHARD)


class ShardWriter:
    """Writes one process's safetensors files into a folder. `model-00003-000.safetensors` is the first file of rank
    3."""

    def __init__(self, folder: Path | StorePath, rank: int = 0, *, shard_bytes: int):
        """Write a file whenever its items reach `shard_bytes`. `finish` writes the rest."""
        self._folder, self._rank, self._shard_bytes = folder, rank, shard_bytes
        self._pending: dict[str, list[WriteItem]] = {}
        self._sizes: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._pieces: list[list[Any]] = []
        self._files: dict[str, Future[FileRecord]] = {}
        self._threads = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for files that are being written, and start no others."""
        self._threads.shutdown(cancel_futures=True)

    def add(self, item: WriteItem) -> None:
        """Add an item, whose values must not change until `finish`. Raises OSError."""
        if item.extent.volume == 0:
            return
        self._pending.setdefault(item.part, []).append(item)
        self._sizes[item.part] = self._sizes.get(item.part, 0) + item.bytes
        if self._sizes[item.part] >= self._shard_bytes:
            self._begin_file(item.part)

    def finish(self) -> dict[str, Any]:
        """Write the rest and sync. Returns JSON: the records of `files` and their `pieces`. Raises OSError."""
        for part in list(self._pending):
            self._begin_file(part)
        records = {name: future.result().model_dump() for name, future in self._files.items()}
        if isinstance(self._folder, Path):
            sync_folder(self._folder)
        return {"files": records, "pieces": self._pieces}

    def _begin_file(self, part: str) -> None:
        items = self._pending.pop(part)
        self._sizes[part] = 0
        number = self._counts[part] = self._counts.get(part, -1) + 1
        file = f"{part}-{self._rank:05d}-{number:03d}.safetensors"
        if len(self._files) >= THREADS:  # bounds the shards waiting in memory
            list(self._files.values())[-THREADS].result()
        self._pieces += [
            [
                part,
                item.name,
                {"file": file, "offset": list(item.extent.offset), "shape": list(item.extent.shape)},
            ]
            for item in items
        ]
        tensors = {piece_key(item.name, item.shape, item.extent): item.values for item in items}
        self._files[file] = self._threads.submit(write_safetensors, self._folder / file, tensors)


class StepWriter:
    """Writes a step from one process, tensor by tensor.

         with StepWriter(checkpoints, record) as writer:
             writer.add("model", name, tensor)                          # a complete tensor
             writer.add("optimizer", name, rows, (128, 0), (512, 64))   # a slice: rows from 128 on
         writer.folder                                                  # the completed step

    An error in the block removes everything. The slices of a tensor must cover it exactly.
    """

    def __init__(
        self,
        checkpoints: str | Path | StorePath,
        record: RunRecord,
        *,
        parts: Collection[str] = ("model",),
        write_tokenizer: Callable[[Path], None] | None = None,
        shard_bytes: int = STREAMED_SHARD,
    ):
        """Prepare a step.

        `parts` exist in the step even if no tensor is added to them. `write_tokenizer` is a function that writes the
        tokenizer into the folder passed to it.
        """
        self._step = step_folder(open_location(checkpoints), record.step)
        self._record, self._write_tokenizer, self._shard_bytes = record, write_tokenizer, shard_bytes
        self._table: dict[str, dict[str, TensorRecord]] = {part: {} for part in parts}
        self.folder = self._step.final

    def __enter__(self) -> StepWriter:
        with cleanup_on_error(self._step):
            self._step.begin()
        self._shards = ShardWriter(self._step.temporary, shard_bytes=self._shard_bytes)
        return self

    def add(
        self,
        part: str,
        name: str,
        values: Tensor | TensorSource,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Add a tensor, or the slice at `offset` of a tensor with `shape`. The values must not change afterwards.

        Raises CheckpointError if the disk write fails, or if slices of a tensor disagree in dtype or shape.
        """
        global_shape = tuple(values.shape) if shape is None else tuple(shape)
        extent = Extent((0,) * len(values.shape) if offset is None else tuple(offset), tuple(values.shape))
        record = TensorRecord(dtype=tensor_record(values).dtype, shape=list(global_shape))
        if self._table.setdefault(part, {}).setdefault(name, record) != record:
            raise CheckpointError(
                f"{name} was added as {self._table[part][name]} and as {record}; use the same "
                "dtype and shape for all slices"
            )
        with cleanup_on_error(self._step):
            self._shards.add(WriteItem(part, name, values, extent, global_shape))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with cleanup_on_error(self._step), self._shards:
            if error is None:
                written = self._shards.finish()
                self._step.commit(self._record, self._table, [written], self._write_tokenizer)
        if error is not None:
            self._step.abandon()


@contextmanager
def cleanup_on_error(step: StepFolder) -> Iterator[None]:
    """Remove the step's remains on an error. OSError becomes CheckpointError."""
    try:
        yield
    except BaseException as error:
        step.abandon()
        if isinstance(error, OSError):
            raise save_error(step, f"{error.strerror or error}") from error
        raise


def save_error(step: StepFolder, reason: str, needed: int = 0) -> CheckpointError:
    """Return the error for a failed save. `needed` is the size of its tensors in bytes, if known."""
    if isinstance(step.final, StorePath):
        return CheckpointError(
            f"the checkpoint {step.final} could not be saved: {reason}; earlier steps are intact. Check the bucket, "
            "its credentials and the network"
        )
    room = ""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(step.checkpoints).free / 1e9
        room = f" ({f'it takes {needed / 1e9:.3g} GB, ' if needed else ''}{free:.3g} GB are free without it)"
    return CheckpointError(
        f"the checkpoint {step.final} could not be saved: {reason}{room}; earlier steps are intact. Free some space or "
        "repair the disk"
    )
