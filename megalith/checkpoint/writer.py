"""Writing tensors into a step, piece by piece.

`StepWriter` is for a program that makes a checkpoint out of something else (another format, another number of files):
it is given one tensor, or one slice of a tensor, at a time, and holds no more than a few shards of `shard_bytes`.
`ShardWriter` beneath it writes one process's files; a job's ranks each have one (saver.py).
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

THREADS = 4  # files written at once: hashing and writing leave Python's lock
SMALLEST_SHARD, LARGEST_SHARD = 2**26, 2**31
STREAMED_SHARD = 2**28


@dataclass(frozen=True)
class WriteItem:
    """The slice `extent` of a tensor of a part, for a file."""

    part: str
    name: str
    values: Tensor | TensorSource
    extent: Extent
    shape: tuple[int, ...]  # of the global tensor

    @property
    def bytes(self) -> int:
        return byte_count(self.extent.shape, self.values.dtype)


def shard_bytes_for(total: int) -> int:
    """Bytes a file where `total` are to be written: each thread gets two files or more, none of them tiny or huge."""
    return min(max(total // (2 * THREADS), SMALLEST_SHARD), LARGEST_SHARD)


class ShardWriter:
    """Safetensors files of one process in a folder: `model-00003-000.safetensors` is rank 3's first."""

    def __init__(self, folder: Path | StorePath, rank: int = 0, *, shard_bytes: int):
        """A file is written when its items have come to `shard_bytes`, the rest at the end."""
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
        """Waits for the files that are being written; begins no others."""
        self._threads.shutdown(cancel_futures=True)

    def add(self, item: WriteItem) -> None:
        """Takes an item, whose values must not change until `finish`. Raises OSError."""
        if item.extent.volume == 0:
            return
        self._pending.setdefault(item.part, []).append(item)
        self._sizes[item.part] = self._sizes.get(item.part, 0) + item.bytes
        if self._sizes[item.part] >= self._shard_bytes:
            self._begin_file(item.part)

    def finish(self) -> dict[str, Any]:
        """Returns, once all is on the disk, plain JSON: the records of `files`, and the `pieces` in them.

        Raises OSError.
        """
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
        if len(self._files) >= THREADS:  # no more shards than that wait in memory
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
    """A step made by one process out of tensors that come one at a time.

        with StepWriter(checkpoints, record) as writer:
            writer.add("model", name, tensor)                          # a whole tensor
            writer.add("optimizer", name, rows, (128, 0), (512, 64))   # a slice of one: rows 128 and on
        writer.folder                                                  # whole from here on

    When the block is left by an error, nothing stays. The slices of a tensor have to cover it, each element once.
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
        """`parts` are in the step even when no tensor is added to them. `write_tokenizer` fills a given folder."""
        self._step = step_folder(open_location(checkpoints), record.step)
        self._record, self._write_tokenizer, self._shard_bytes = record, write_tokenizer, shard_bytes
        self._table: dict[str, dict[str, TensorRecord]] = {part: {} for part in parts}
        self.folder = self._step.final

    def __enter__(self) -> StepWriter:
        with saving(self._step):
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
        """Takes a tensor, or the slice of one of `shape` that begins at `offset`; it must not change afterwards.

        Raises CheckpointError when the disk refuses, or when slices of one tensor disagree in type or shape.
        """
        whole = tuple(values.shape) if shape is None else tuple(shape)
        extent = Extent((0,) * len(values.shape) if offset is None else tuple(offset), tuple(values.shape))
        record = TensorRecord(dtype=tensor_record(values).dtype, shape=list(whole))
        if self._table.setdefault(part, {}).setdefault(name, record) != record:
            raise CheckpointError(
                f"{name} was added as {self._table[part][name]} and as {record}; give it one"
            )
        with saving(self._step):
            self._shards.add(WriteItem(part, name, values, extent, whole))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with saving(self._step), self._shards:
            if error is None:
                written = self._shards.finish()
                self._step.commit(self._record, self._table, [written], self._write_tokenizer)
        if error is not None:
            self._step.abandon()


@contextmanager
def saving(step: StepFolder) -> Iterator[None]:
    """Removes the step's remains on an error; one of the disk becomes a CheckpointError."""
    try:
        yield
    except BaseException as error:
        step.abandon()
        if isinstance(error, OSError):
            raise not_saved(step, f"{error.strerror or error}") from error
        raise


def not_saved(step: StepFolder, reason: str, needed: int = 0) -> CheckpointError:
    """What is said of a save that failed; `needed` bytes are its tensors', where that is known."""
    if isinstance(step.final, StorePath):
        return CheckpointError(
            f"the checkpoint {step.final} could not be saved: {reason}; the steps saved before are whole: look at the "
            "bucket, its credentials and the network"
        )
    room = ""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(step.checkpoints).free / 1e9
        room = f" ({f'it takes {needed / 1e9:.3g} GB, ' if needed else ''}{free:.3g} GB are free without it)"
    return CheckpointError(
        f"the checkpoint {step.final} could not be saved: {reason}{room}; the steps saved before are whole: free "
        "some space or repair the disk"
    )
