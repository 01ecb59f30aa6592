"""Reading and writing of safetensors files.

A safetensors file contains the length of a JSON header (uint64, little-endian), the header with dtype, shape and byte
range of each tensor, and the bytes. Files are written some megabytes at a time and hashed while writing, so saving
needs no second copy of the model in memory, and the checksum is computed from the intended bytes rather than from the
disk's content.

Tensors are memory-mapped one by one, so unused ones are never read and used ones can be released. The safetensors
library is used only to validate the header, because its reader keeps the complete file mapped until the last tensor
is released.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalith.checkpoint.manifest import FileRecord, TensorRecord
from megalith.errors import CheckpointError
from megalith.io import sync_file
from megalith.remote import StorePath

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
    torch.float8_e4m3fn: "F8_E4M3",
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
CHUNK = 2**26  # bytes copied from a device at once
# Bytes hashed and written at once; they stay in the CPU's cache. Writes of several MB would also make the kernel search
# for equally large blocks of free memory, which a virtual machine may have returned to its host.
PIECE = 2**20

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape by name


class TensorSource(Protocol):
    """A tensor that can be written: its dtype, shape, and bytes in chunks. The bytes are requested once."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def byte_chunks(self) -> Iterable[Tensor]:
        """Return the bytes in row-major order: one-dimensional uint8 tensors on any device."""


@dataclass(frozen=True)
class HostBytes:
    """A tensor's bytes in host memory. Implements TensorSource."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Tensor]  # uint8, one-dimensional

    def byte_chunks(self) -> list[Tensor]:
        return self.parts


def byte_view(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes in row-major order, uint8 [bytes]. Copies only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def byte_count(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(shape) * dtype.itemsize


def stored_bytes(record: TensorRecord) -> int:
    """Return the size in bytes of a tensor listed in a manifest."""
    return byte_count(record.shape, DTYPES[record.dtype])


def tensor_record(tensor: Tensor | TensorSource) -> TensorRecord:
    """Return dtype and shape as in the manifest and the safetensors header."""
    return TensorRecord(dtype=DTYPE_CODES[tensor.dtype], shape=list(tensor.shape))


def write_safetensors(path: Path | StorePath, tensors: Mapping[str, Tensor | TensorSource]) -> FileRecord:
    """Write tensors from any device. A local file is synced before the function returns. Raises OSError."""
    # Wide dtypes first, then by name, as in the safetensors library, which aligns every tensor.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    head, _ = _head({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names})
    size = sum(byte_count(tensor.shape, tensor.dtype) for tensor in tensors.values())
    digest, count = hashlib.sha256(), 0
    with path.create(size) if isinstance(path, StorePath) else open(path, "wb") as file:
        for data in chain([head], *(_chunks(tensors[name]) for name in names)):
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                file.write(piece)
                digest.update(piece)
                count += len(piece)
        if not isinstance(path, StorePath):
            sync_file(file)
    return FileRecord(bytes=count, sha256=digest.hexdigest())


class RandomAccessWriter:
    """Writes a safetensors file: the header first, then the tensors in any order."""

    def __init__(self, path: Path, tensors: Layout):
        """Create the file and write its header. All methods raise OSError."""
        head, self._starts = _head(tensors)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write(head, 0)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor. Each must be written exactly once."""
        self._write(byte_view(tensor).numpy(), self._starts.pop(name))

    def sync(self) -> None:
        """Sync the file to disk. All tensors must have been written."""
        assert not self._starts, f"not written: {list(self._starts)}"
        sync_file(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, content: Any, start: int) -> None:
        data = memoryview(content)
        while data:
            written = os.pwrite(self._file, data[:PIECE], start)
            data, start = data[written:], start + written


def _head(tensors: Layout) -> tuple[bytes, dict[str, int]]:
    """Return the header's bytes for tensors in this order, and each tensor's offset in the file."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + byte_count(shape, dtype)
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + header[name]["data_offsets"][0] for name in tensors}


def _chunks(values: Tensor | TensorSource) -> Iterator[memoryview]:
    for chunk in [byte_view(values)] if isinstance(values, Tensor) else values.byte_chunks():
        for part in chunk.split(CHUNK):
            yield memoryview(part.cpu().numpy())


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor in a safetensors file: dtype code, shape, and offset of its first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self) -> Tensor:
        """Map the tensor; its bytes are read when used. The mapping is released with the last view of the tensor."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.file} has a tensor of dtype {self.dtype}, which is not one of {', '.join(DTYPES)}; use the "
                "original weights"
            )
        dtype, shape = DTYPES[self.dtype], torch.Size(self.shape)
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        page = self.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = self.start - page + shape.numel() * dtype.itemsize
        try:
            with open(self.file, "rb") as file:
                mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
        except (OSError, ValueError) as error:  # deleted or truncated since
            raise CheckpointError(
                f"{self.file} cannot be read: {error}; fetch the file again, or use another one"
            ) from None
        return torch.frombuffer(mapping, dtype=dtype, count=shape.numel(), offset=self.start - page).view(
            shape
        )


def list_safetensors(file: Path, way_out: str) -> dict[str, SafetensorsEntry]:
    """Return the tensors of a file by name. Raises CheckpointError, whose message ends with `way_out`, if it is not a
    safetensors file.
    """
    try:
        with safe_open(file, framework="pt") as checked:
            names = list(checked.keys())
        with open(file, "rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            header = json.loads(raw.read(length), object_pairs_hook=_without_repetition)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}; {way_out}") from None
    return {
        name: SafetensorsEntry(
            file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name in names
        for entry in [header[name]]
    }


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate names in a header: the library validates only one of the entries."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("its header contains a name twice")
    return entries


def file_record(path: Path) -> FileRecord:
    """Return size and checksum of a file. Raises OSError."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(bytes=path.stat().st_size, sha256=digest)


def bytes_record(content: bytes) -> FileRecord:
    """Return size and checksum of a file with this content."""
    return FileRecord(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
