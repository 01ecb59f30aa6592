"""Files that are on the disk when we say so: safetensors and text, flushed, synced and hashed.

A safetensors file is the length of a JSON header (uint64, little-endian), the header with the type, shape and
byte range of each tensor, then the bytes. It is written here one tensor at a time and hashed on the way, so
saving needs no second copy of the model in memory, and the checksum is that of the bytes meant, not of what
the disk made of them. It is read by the safetensors library, which checks the header.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalith.checkpoint.manifest import FileRecord, TensorRecord
from megalith.errors import CheckpointError
from megalith.parallel.gather import GlobalTensor

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


class _HashedFile:
    """Counts and hashes what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def record(self) -> FileRecord:
        return FileRecord(bytes=self._bytes, sha256=self._hash.hexdigest())


def tensor_record(tensor: Tensor | GlobalTensor) -> TensorRecord:
    """Type and shape, as the manifest and the safetensors header write them."""
    return TensorRecord(dtype=DTYPE_CODES[tensor.dtype], shape=list(tensor.shape))


def write_order(tensors: Mapping[str, Tensor | GlobalTensor]) -> list[str]:
    """Wide types first, then by name, as the safetensors library orders them: every tensor is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor | GlobalTensor]) -> FileRecord:
    """Writes named tensors of any device, and syncs the file. Raises OSError.

    Tensors that are spread over ranks are put together one at a time, in `write_order`.
    """
    names = write_order(tensors)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + math.prod(tensors[name].shape) * tensors[name].dtype.itemsize
        header[name] = {**tensor_record(tensors[name]).model_dump(), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        hashed = _HashedFile(file)
        hashed.write(struct.pack("<Q", len(text)))
        hashed.write(text)
        for name in names:
            hashed.write(_bytes(tensors[name]))
        _sync(file)
    return hashed.record()


def _bytes(tensor: Tensor | GlobalTensor) -> memoryview:
    whole = tensor.whole() if isinstance(tensor, GlobalTensor) else tensor
    return memoryview(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def read_safetensors(path: Path, table: Mapping[str, TensorRecord]) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor with its name, mapped from the file.

    Raises CheckpointError when the file is no safetensors file or holds other tensors than `table` says.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(table):
                raise CheckpointError(
                    f"{path} does not hold the tensors that its manifest lists; use another step"
                )
            for name, wanted in table.items():
                tensor = file.get_tensor(name)
                if tensor_record(tensor) != wanted:
                    raise CheckpointError(
                        f"{path}: {name} is {tensor_record(tensor)}, its manifest says {wanted}; use another step"
                    )
                yield name, tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}; use another step") from error


def write_text(path: Path, text: str) -> None:
    """Writes and syncs a text file. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        _sync(file)


def replace_text(path: Path, text: str) -> None:
    """Gives a text file new content at once: a reader sees the old or the new, never a part. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    write_text(temporary, text)
    os.replace(temporary, path)
    sync_folder(path.parent)


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


def sync_folder(folder: Path) -> None:
    """Puts a folder's entries (new files, renames) on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
