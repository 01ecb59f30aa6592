"""The `torch_dist` form: a torch.distributed.checkpoint directory, its global tensors put together from their pieces.

`.metadata` says for each tensor which box of it stands where in which `.distcp` file; each piece is a tensor that
torch.save wrote. Layers that are alike are one tensor, with the layers as its first dimension.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalith.bridge.kinds import MOST_LAYERS
from megalith.bridge.megatron.unpickle import load_pickle
from megalith.checkpoint.extent import Extent, fills
from megalith.checkpoint.files import DTYPE_CODES
from megalith.errors import CheckpointError

METADATA = ".metadata"
STACKED = "decoder.layers."


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the bytes of a file that hold it."""

    extent: Extent
    file: Path
    start: int
    length: int

    def read(self) -> Tensor:
        try:
            with open(self.file, "rb") as file:
                file.seek(self.start)
                data = io.BytesIO(file.read(self.length))
            values = torch.load(data, map_location="cpu", weights_only=True)
            return values.view(self.extent.shape)
        except Exception as error:  # the unpickler's own, or whatever it runs into in a damaged file
            reason = str(error).strip().split("\n")[0]
            raise CheckpointError(
                f"{self.file} has no tensor {list(self.extent.shape)} at byte {self.start} ({reason}); copy the "
                "checkpoint again"
            ) from None


@dataclass(frozen=True)
class Distributed:
    """A tensor in pieces; with `layer`, that layer's part of a stack."""

    whole: tuple[int, ...]
    dtype: str
    pieces: list[Piece]
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole if self.layer is None else self.whole[1:]

    def read(self) -> Tensor:
        """The tensor, from the pieces that have a part of it."""
        wanted = Extent.whole(self.whole)
        if self.layer is not None:
            wanted = Extent((self.layer, *wanted.offset[1:]), (1, *self.whole[1:]))
        out: Tensor | None = None
        for piece in self.pieces:
            both = piece.extent.meet(wanted)
            if both is not None:
                values = piece.read()
                out = torch.empty(wanted.shape, dtype=values.dtype) if out is None else out
                out[both.slices(wanted)] = values[both.slices(piece.extent)]
        return torch.empty(self.shape) if out is None else out.view(self.shape)


def list_torch_dist(folder: Path) -> dict[str, Distributed]:
    """Every tensor by its name, layers apart. Raises CheckpointError for missing files and pieces."""
    metadata = load_pickle(folder / METADATA)
    try:
        entries = {
            name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")
        }
        where = {
            (index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()
        }
        tensors: dict[str, Distributed] = {}
        for name, entry in entries.items():
            pieces = []
            for chunk in entry.chunks:
                info = where[name, tuple(chunk.offsets)]
                if Path(info.relative_path).name != info.relative_path:
                    raise CheckpointError(
                        f"{folder} names the file {info.relative_path!r}, which is outside it; it is not to be trusted"
                    )
                extent = Extent(tuple(chunk.offsets), tuple(chunk.sizes))
                pieces.append(Piece(extent, folder / info.relative_path, info.offset, info.length))
            code = DTYPE_CODES.get(entry.properties.dtype, str(entry.properties.dtype))
            whole = Distributed(tuple(entry.size), code, pieces)
            _check_pieces(folder, name, whole)
            tensors |= _layers(name, whole)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / METADATA} is damaged ({error!r}); copy the checkpoint again"
        ) from None
    return tensors


def _check_pieces(folder: Path, name: str, tensor: Distributed) -> None:
    for piece in tensor.pieces:
        if not piece.file.is_file():
            raise CheckpointError(f"{piece.file} is missing, which holds {name}; copy the checkpoint again")
        if not 0 <= piece.start <= piece.start + piece.length <= piece.file.stat().st_size:
            raise CheckpointError(f"{piece.file} ends before {name} does; copy the checkpoint again")
    if not fills(tensor.whole, [piece.extent for piece in tensor.pieces]):
        raise CheckpointError(f"{folder}: the pieces of {name} do not cover it; copy the checkpoint again")


def _layers(name: str, tensor: Distributed) -> dict[str, Distributed]:
    """A stack of layers as single ones, under the names that they have otherwise."""
    before, found, rest = name.partition(STACKED)
    if not found or rest.split(".")[0].isdigit():
        return {name: tensor}
    if tensor.whole[0] > MOST_LAYERS:
        raise ValueError(f"{name} has {tensor.whole[0]:,} layers")
    return {
        f"{before}{STACKED}{layer}.{rest}": Distributed(tensor.whole, tensor.dtype, tensor.pieces, layer)
        for layer in range(tensor.whole[0])
    }
