"""Files that are on the disk when we say so: safetensors and text, flushed, synced and hashed.

A safetensors file is the length of a JSON header (uint64, little-endian), the header with the type, shape and
byte range of each tensor, then the bytes. It is written here some megabytes at a time and hashed on the way, so
saving needs no second copy of the model in memory, and the checksum is that of the bytes meant, not of what
the disk made of them. It is read by the safetensors library, which checks the header and maps the file: only the
pages that are used are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalith.checkpoint.manifest import FileRecord, TensorRecord
from megalith.errors import CheckpointError
from megalith.io import replace_file

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
CHUNK = 2**26  # bytes that are copied from a device at once
PIECE = 2**20  # bytes that are hashed and written at once: they stay in the processor's cache


class Values(Protocol):
    """What can be written as a tensor: its type and shape, and its bytes in stretches, asked for once at its turn."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def stretches(self) -> Iterable[Tensor]:
        """The bytes in row-major order: uint8, one-dimensional, of any device."""


@dataclass(frozen=True)
class HostBytes:
    """A tensor's bytes in host memory. A Values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Tensor]  # uint8, one-dimensional

    def stretches(self) -> list[Tensor]:
        return self.parts


def byte_view(tensor: Tensor) -> Tensor:
    """The tensor's bytes in row-major order, uint8 [bytes]; without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def byte_count(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def tensor_record(tensor: Tensor | Values) -> TensorRecord:
    """Type and shape, as the manifest and the safetensors header write them."""
    return TensorRecord(dtype=DTYPE_CODES[tensor.dtype], shape=list(tensor.shape))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor | Values]) -> FileRecord:
    """Writes named tensors of any device, and syncs the file. Raises OSError."""
    # Wide types first, then by name, as the safetensors library orders them: every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    head, _ = safetensors_head({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names})
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for data in chain([head], *(_chunks(tensors[name]) for name in names)):
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                file.write(piece)
                digest.update(piece)
        _sync(file)
        return FileRecord(bytes=file.tell(), sha256=digest.hexdigest())


def safetensors_head(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, int]]:
    """What stands before the tensors in a file of these, by type and shape, in this order; and where each begins."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + byte_count(shape, dtype)
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + header[name]["data_offsets"][0] for name in tensors}


def _chunks(values: Tensor | Values) -> Iterator[memoryview]:
    for stretch in [byte_view(values)] if isinstance(values, Tensor) else values.stretches():
        for part in stretch.split(CHUNK):
            yield memoryview(part.cpu().numpy())


@contextmanager
def open_safetensors(
    path: Path, table: Mapping[str, TensorRecord] | None
) -> Iterator[Callable[[str], Tensor]]:
    """Gives a function from a name to its tensor, mapped from the file.

    Raises CheckpointError when the file is no safetensors file or holds other tensors than `table` says; with None,
    they are known.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if table is not None:
                _compare(path, file, table)
            yield file.get_tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}; use another step") from error


def _compare(path: Path, file: safe_open, table: Mapping[str, TensorRecord]) -> None:
    if set(file.keys()) != set(table):
        raise CheckpointError(f"{path} does not hold the tensors that its manifest lists; use another step")
    for name, wanted in table.items():
        view = file.get_slice(name)
        found = TensorRecord(dtype=view.get_dtype(), shape=view.get_shape())
        if found != wanted:
            raise CheckpointError(f"{path}: {name} is {found}, its manifest says {wanted}; use another step")


def write_text(path: Path, text: str) -> None:
    """Writes and syncs a text file. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        _sync(file)


def replace_text(path: Path, text: str) -> None:
    """Gives a text file new content at once: a reader sees the old or the new, never a part. Raises OSError."""
    replace_file(path, text)


def record_and_sync(path: Path) -> FileRecord:
    """Size and checksum of a file that someone else has written, once it is on the disk. Raises OSError."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return file_record(path)


def file_record(path: Path) -> FileRecord:
    """Size and checksum of a file. Raises OSError."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(bytes=path.stat().st_size, sha256=digest)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
