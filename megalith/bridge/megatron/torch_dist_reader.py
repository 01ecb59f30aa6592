"""Reads Megatron-LM's `torch_dist` checkpoints, which torch.distributed.checkpoint wrote.

`.metadata` lists the shards of each tensor with their position in the `.distcp` files; each shard is a tensor written
by torch.save. Identical layers are stacked in one tensor with the layers as first dimension.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.family import MOST_LAYERS
from megalith.bridge.megatron.legacy_reader import METADATA, arguments_in
from megalith.bridge.megatron.unpickle import load_pickle, load_torch
from megalith.checkpoint.extent import Extent, covers_exactly
from megalith.checkpoint.files import DTYPE_CODES
from megalith.errors import CheckpointError

COMMON, COMMON_STATE = "common.pt", "common_state/shard_0_1"
STACKED = re.compile(r"(decoder|encoder)\.layers\.")
EXPERTS = ".experts.experts."


@dataclass(frozen=True)
class StoredShard:
    """A stored shard of a tensor: its box and the bytes of a file."""

    extent: Extent
    file: Path
    start: int
    length: int

    def bytes(self) -> bytes:
        """Return the shard's bytes in the file."""
        with open(self.file, "rb") as file:
            file.seek(self.start)
            return file.read(self.length)

    def read(self) -> Tensor:
        """Return the shard's values."""
        try:
            values = torch.load(io.BytesIO(self.bytes()), map_location="cpu", weights_only=True)
            return values.view(self.extent.shape)
        except Exception as error:  # damaged files raise any exception
            reason = str(error).strip().split("\n")[0]
            raise CheckpointError(
                f"{self.file} has no tensor {list(self.extent.shape)} at byte {self.start} ({reason}); copy the "
                "checkpoint again"
            ) from None


@dataclass(frozen=True)
class DistributedTensor:
    """A sharded tensor, or one layer or expert of a stacked tensor, at index `at`."""

    stored_shape: tuple[int, ...]
    dtype: str
    shards: list[StoredShard]
    at: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored_shape[len(self.at) :]

    def read(self) -> Tensor:
        """Return the tensor from the shards that overlap it."""
        box = Extent(self.at + (0,) * len(self.shape), (1,) * len(self.at) + self.shape)
        out: Tensor | None = None
        for shard in self.shards:
            both = shard.extent.intersection(box)
            if both is not None:
                values = shard.read()
                out = torch.empty(box.shape, dtype=values.dtype) if out is None else out
                out[both.slices(box)] = values[both.slices(shard.extent)]
        return torch.empty(self.shape) if out is None else out.view(self.shape)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed from stored tensors when it is first read."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def gate_and_up(gate: DistributedTensor, up: DistributedTensor) -> LazyTensor:
    """Return a gated matrix whose halves are stored as `NAME_w` and `NAME_v`."""
    shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
    return LazyTensor(gate.dtype, shape, lambda: torch.cat([gate.read(), up.read()]))


def read_torch_dist(
    folder: Path, trust: bool
) -> tuple[dict[str, DistributedTensor | LazyTensor], dict[str, Any]]:
    """Return all tensors by name, with one entry per layer and expert, and the arguments. Raises CheckpointError."""
    metadata = load_pickle(folder / METADATA, folder, trust)
    try:
        entries = {
            name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")
        }
        where = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): info
            for index, info in metadata.storage_data.items()
        }
        args = arguments_in(_common_state(folder, where, trust))
        tensors: dict[str, DistributedTensor] = {}
        for name, entry in entries.items():
            shards = []
            for chunk in entry.chunks:
                extent = Extent(tuple(chunk.offsets), tuple(chunk.sizes))
                shards.append(_stored(folder, extent, where[name, extent.offset]))
            dtype = entry.properties.state[0]  # (dtype, layout, requires_grad, memory_format, pin_memory)
            code = DTYPE_CODES.get(dtype, str(dtype))
            tensor = DistributedTensor(tuple(entry.size), code, shards)
            _check_shards(folder, name, tensor)
            tensors |= _split_stacks(name, tensor)
        return _join_gates(tensors), args
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / METADATA} is damaged ({error!r}); copy the checkpoint again"
        ) from None


def _stored(folder: Path, extent: Extent, info: Any) -> StoredShard:
    if Path(info.relative_path).name != info.relative_path:
        raise CheckpointError(
            f"{folder} names the file {info.relative_path!r}, which is outside it; do not trust "
            "this checkpoint"
        )
    return StoredShard(extent, folder / info.relative_path, info.offset, info.length)


def _common_state(folder: Path, where: Mapping[tuple[str, tuple[int, ...]], Any], trust: bool) -> Any:
    """Return the state besides the tensors: a separate file, or from core 0.19 on an object among the shards."""
    if (COMMON_STATE, ()) not in where or os.path.lexists(folder / COMMON):
        return load_torch(folder / COMMON, folder, trust)
    stored = _stored(folder, Extent((), ()), where[COMMON_STATE, ()])
    _check_stored(stored, COMMON_STATE)
    [state] = load_torch(stored.file, folder, trust, stored.bytes())
    return state


def _check_stored(shard: StoredShard, name: str) -> None:
    if not shard.file.is_file():
        raise CheckpointError(f"{shard.file}, which contains {name}, is missing; copy the checkpoint again")
    if not 0 <= shard.start <= shard.start + shard.length <= shard.file.stat().st_size:
        raise CheckpointError(f"{shard.file} ends before {name} does; copy the checkpoint again")


def _check_shards(folder: Path, name: str, tensor: DistributedTensor) -> None:
    for shard in tensor.shards:
        _check_stored(shard, name)
    if not covers_exactly(tensor.stored_shape, [shard.extent for shard in tensor.shards]):
        raise CheckpointError(
            f"{folder}: the shards of {name} do not cover it exactly once; copy the checkpoint again"
        )


def _split_stacks(name: str, tensor: DistributedTensor) -> dict[str, DistributedTensor]:
    """Return the entries of a stack of layers, experts or both, under their unstacked names."""
    stack, names = STACKED.search(name), {(): name}
    if stack and not name[stack.end() :].split(".")[0].isdigit():
        before, rest = name[: stack.end()], name[stack.end() :]
        names = {(layer,): f"{before}{layer}.{rest}" for layer in range(_count(name, tensor, 0))}
    if EXPERTS in name and not name.partition(EXPERTS)[2].split(".")[0].isdigit():
        names = {
            (*at, expert): one.replace(EXPERTS, f"{EXPERTS}{expert}.")
            for at, one in names.items()
            for expert in range(_count(name, tensor, len(at)))
        }
    return {
        one.replace(EXPERTS, ".experts.local_experts."): DistributedTensor(
            tensor.stored_shape, tensor.dtype, tensor.shards, at
        )
        for at, one in names.items()
    }


def _count(name: str, tensor: DistributedTensor, dimension: int) -> int:
    if tensor.stored_shape[dimension] > MOST_LAYERS:
        raise ValueError(
            f"{name} has {tensor.stored_shape[dimension]:,} layers or experts, more than the maximum of {MOST_LAYERS:,}"
        )
    return tensor.stored_shape[dimension]


def _join_gates(tensors: dict[str, DistributedTensor]) -> dict[str, DistributedTensor | LazyTensor]:
    halves = {name[:-2] for name in tensors if name.endswith("_w") and f"{name[:-2]}_v" in tensors}
    joined = {name: gate_and_up(tensors.pop(f"{name}_w"), tensors.pop(f"{name}_v")) for name in halves}
    return {**tensors, **joined}
