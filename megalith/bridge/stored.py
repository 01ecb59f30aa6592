"""Tensors where they are stored: listed with type and shape, and read one at a time.

Safetensors are read as those of a checkpoint are (checkpoint/files.py), a `.bin` file by
torch.load(weights_only=True), which builds tensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.files import DTYPE_CODES, Stored, list_safetensors
from megalith.errors import CheckpointError


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
        return list_safetensors(file, "fetch it again")
    return {
        name: Pickled(file, DTYPE_CODES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), name)
        for name, tensor in _load(file).items()
    }


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
