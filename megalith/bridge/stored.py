"""Tensors where they are stored: listed with type and shape, and read one at a time.

A tensor of a safetensors file is mapped by itself: what is not used is not read, and what is done with is given back.
The safetensors library checks the header; the mapping of the whole file that it makes would count as memory until the
last of its tensors is done. A `.bin` file is read by torch.load(weights_only=True), which builds tensors alone.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalith.checkpoint.files import DTYPE_CODES, DTYPES
from megalith.errors import CheckpointError


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file: its type code, its shape, and its first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self) -> Tensor:
        """The tensor, its bytes read as they are used. It is released with its last view."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.file} has a tensor of type {self.dtype}, known here are {', '.join(DTYPES)}; take the original"
            )
        dtype, shape = DTYPES[self.dtype], torch.Size(self.shape)
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        page = self.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = self.start - page + shape.numel() * dtype.itemsize
        with open(self.file, "rb") as file:
            mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
        return torch.frombuffer(mapping, dtype=dtype, count=shape.numel(), offset=self.start - page).view(
            shape
        )


@dataclass(frozen=True)
class Pickled:
    """A tensor of a `.bin` file under its name there."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    key: str

    def read(self) -> Tensor:
        """The tensor; where torch can map the file, its bytes are read as they are used."""
        return _load(self.file)[self.key]


def list_tensors(file: Path) -> dict[str, Stored | Pickled]:
    """Every tensor of a file by name. Raises CheckpointError when it is missing, damaged or holds something else."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; fetch the whole folder again")
    if file.suffix == ".safetensors":
        return _list_safetensors(file)
    return {
        name: Pickled(file, DTYPE_CODES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), name)
        for name, tensor in _load(file).items()
    }


def _list_safetensors(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="pt") as checked:
            names = list(checked.keys())
        with open(file, "rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            header = json.loads(raw.read(length), object_pairs_hook=_without_repetition)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}; fetch it again") from None
    return {
        name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name in names
        for entry in [header[name]]
    }


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two entries with one name the library may have checked the other."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("its header has a name twice")
    return entries


@lru_cache(maxsize=1)  # files of an older form are read whole, so only one is kept
def _load(file: Path) -> dict[str, Tensor]:
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # torch can map the zip files alone that it has written since 1.6
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler's own, or whatever it runs into in a damaged file
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{file} cannot be read as tensors alone ({reason}); nothing else in it is run: fetch it again, or take "
            "the model in safetensors"
        ) from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{file} holds something other than named tensors; take the model's weights in safetensors"
        )
    return content
