"""The files of Accelerate's guide, one of weights and one of optimizer state for each tensor- and pipeline-rank.

What stands in them depends on neither ZeRO nor expert parallelism: `pytorch_model_tp_T_pp_P.bin` has what tensor rank T
of pipeline stage P would hold without both, and of experts that tensor parallelism does not shard the T-th share. The
ranks of a stage send the first of its ranks T, which writes, what of each tensor they hold, one tensor after the other;
it puts them together in a file that is mapped, so that no rank has more than one of them in memory.

The files are torch.save's, of tensors alone, and are read by torch.load with `weights_only`, in any layout: beside them
stands our manifest.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.agree import collectively
from megalith.checkpoint.extent import Extent
from megalith.checkpoint.files import DTYPE_CODES, DTYPES, file_record
from megalith.checkpoint.manifest import MANIFEST, PieceRecord, RunRecord, manifest_text, piece_key
from megalith.checkpoint.open import open_checkpoint
from megalith.checkpoint.read import Checkpoint
from megalith.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    STATE_WITH_ROWS,
    model_shards,
    optimizer_shards,
    state_shards,
)
from megalith.comm.collectives import Axis, gather_json
from megalith.errors import CheckpointError
from megalith.io import atomic_path, replace_file
from megalith.local_shards import local_shape_and_offset
from megalith.parallel.data.replicas import EXPERTS
from megalith.parallel.gather import ALONE
from megalith.parallel.mesh import Mesh
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.shards import LocalShard, dtensor_of

FILES = {MODEL: "pytorch_model", OPTIMIZER: "optimizer"}
NAME = re.compile(rf"({'|'.join(FILES.values())})_tp_\d+_pp_\d+\.bin")
ALIGNMENT = 64  # bytes


def save_shard_files(
    folder: Path,
    record: RunRecord,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer | None,
    rows: Mapping[str, int],
) -> None:
    """Writes the files into a folder that is there, in the place of those that it has. Every rank calls it.

    `rows` are those of vocabulary_rows. Raises CheckpointError, the same on every rank, where the disk refuses.
    """
    mesh, chunks = model.mesh, model.chunks
    collectively(mesh.world, lambda: _clear(folder) if mesh.world.rank == 0 else None)
    stored = {part: {name: shard.shape for name, shard in shards.items()}
              for part, shards in state_shards(chunks, optimizer, rows).items()}  # fmt: skip
    extents, written = _file_extents(model), []
    parts = {MODEL: model_shards(chunks)}
    if optimizer is not None:
        parts[OPTIMIZER] = optimizer_shards(optimizer, chunks)
        extents |= {
            f"optim.{name}.{key}": extent for name, extent in extents.items() for key in STATE_WITH_ROWS
        }
    for part, shards in parts.items():
        targets = {name: extents.get(name) or Extent.whole(shard.shape) for name, shard in shards.items()}
        file = f"{FILES[part]}_tp_{mesh.tp.rank}_pp_{mesh.pp.rank}.bin"
        written.append(_write_part(folder / file, shards, targets, mesh))
    own = None
    if mesh.dp_cp.rank == 0:
        own = {part: {name: _piece(shard, extents.get(name), stored[part][name]) for name, shard in shards.items()}
               for part, shards in parts.items()}  # fmt: skip
    shares = gather_json([own, written], mesh.world)
    collectively(
        mesh.world, lambda: _write_manifest(folder, record, shares) if mesh.world.rank == 0 else None
    )


def open_shard_files(folder: str | Path, parts: Sequence[str], world: Axis = ALONE) -> Checkpoint | None:
    """Open the files as a checkpoint and verify the checksums of `parts`. None if there is none."""
    if not (Path(folder) / MANIFEST).exists():
        return None
    opened = open_checkpoint(folder, parts, world=world)
    return _ShardFiles(opened.folder, opened.manifest, opened.files)


class _ShardFiles(Checkpoint):
    """A checkpoint in files of torch.save. They have a tensor's rows that only pad the vocabulary too."""

    def _tensors_in(self, file: str) -> dict[str, Any]:
        if file not in self._tables:
            found, table = _load(self.files / file), {}
            for stored in self.manifest.tensors.values():
                for name, tensor in stored.items():
                    for piece in (piece for piece in tensor.pieces if piece.file == file):
                        values = found.get(name)
                        if not _fits(values, tensor.dtype, piece):
                            raise CheckpointError(
                                f"{self.folder / file} does not hold {name} as {tensor.dtype} {piece.shape}, which its "
                                "manifest lists; use another checkpoint"
                            )
                        table[piece_key(name, tensor.shape, piece.extent)] = _Loaded(values)
            self._tables[file] = table
        return self._tables[file]


@dataclass(frozen=True)
class _Loaded:
    values: Tensor

    def read(self) -> Tensor:
        return self.values


def _load(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of torch's own, of zip, of pickle
        raise CheckpointError(
            f"{file} cannot be read by torch.load with weights_only: {str(error).partition(chr(10))[0]}; use another "
            "checkpoint"
        ) from None
    return found if isinstance(found, dict) else {}


def _fits(values: Any, dtype: str, piece: PieceRecord) -> bool:
    if not isinstance(values, Tensor) or values.dtype != DTYPES[dtype]:
        return False
    shape = list(values.shape)
    return len(shape) == len(piece.shape) and shape[1:] == piece.shape[1:] and shape[:1] >= piece.shape[:1]


def _clear(folder: Path) -> None:
    """The manifest first: without it the others are no checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.iterdir():
        if NAME.fullmatch(path.name):
            path.unlink()


def _file_extents(model: ParallelModel) -> dict[str, Extent]:
    """By name what this rank's tensor rank has of each parameter and buffer in its file."""
    mesh, found = model.mesh, {}
    for chunk in model.chunks:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            own = dtensor_of(tensor)
            if EXPERTS not in name:
                shape, offset = local_shape_and_offset(own, ("tp",))
            elif mesh.etp.size == mesh.tp.size:
                shape, offset = local_shape_and_offset(own, ("etp",))
            else:  # [experts, …], a share of them whole
                share = -(-own.shape[0] // mesh.tp.size)
                first = min(mesh.tp.rank * share, own.shape[0])
                shape = (min(share, own.shape[0] - first), *own.shape[1:])
                offset = (first, *[0] * (own.ndim - 1))
            found[name] = Extent(tuple(offset), tuple(shape))
    return found


def _piece(shard: LocalShard, extent: Extent | None, shape: Sequence[int]) -> list:
    """What of a stored tensor of this shape, without padding, a file has: its type, shape, and where it lies."""
    whole = Extent.whole(shape)
    found = (extent or whole).intersection(whole)
    place = None if found is None else [list(found.offset), list(found.shape)]
    return [DTYPE_CODES[shard.values.dtype], list(shape), place]


def _write_part(
    file: Path, shards: Mapping[str, LocalShard], targets: Mapping[str, Extent], mesh: Mesh
) -> list | None:
    """Sends what this rank holds to those that write; where it writes, the file's name, bytes and checksum."""
    writes = mesh.dp_cp.rank == 0
    empty = {name: (targets[name].shape, shard.values.dtype) for name, shard in shards.items()}
    with _mapped(file, empty if writes else {}, mesh.world) as found:
        _exchange(shards, targets, found, mesh)
        return collectively(mesh.world, lambda: _write(file, found) if writes else None)[mesh.world.rank]


def _write(file: Path, tensors: Mapping[str, Tensor]) -> list:
    try:
        with (
            atomic_path(file) as temporary,
            open(temporary, "wb") as opened,
        ):  # of a path the name would stand in it
            torch.save(dict(tensors), opened)
    except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by the latter
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{file} could not be written: {reason}; make room, or choose another folder"
        ) from error
    return [file.name, file_record(file).model_dump()]


@contextmanager
def _mapped(file: Path, kinds: Mapping[str, tuple], world: Axis) -> Iterator[dict[str, Tensor]]:
    """Tensors of these shapes and types, with values that are still to come, in a mapped file beside `file` that is
    gone at the end. Raises CheckpointError, the same on every rank, where there is no room."""

    def make() -> None:
        places, size = {}, 0
        for name, (shape, dtype) in kinds.items():
            places[name] = size
            size += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if not size:
            return
        scratch = file.with_name(f".{file.name}.scratch")
        handle = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            scratch.unlink()
            os.posix_fallocate(handle, 0, size)
            mapping = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        for name, (shape, dtype) in kinds.items():
            count = torch.Size(shape).numel()
            made[name] = (
                torch.frombuffer(mapping, dtype=dtype, count=count, offset=places[name]).view(shape)
                if count
                else torch.empty(shape, dtype=dtype)
            )

    made: dict[str, Tensor] = {}
    collectively(world, make)
    yield made


@torch.no_grad()
def _exchange(
    shards: Mapping[str, LocalShard], targets: Mapping[str, Extent], found: Mapping[str, Tensor], mesh: Mesh
) -> None:
    """Fills `found`, where this rank writes, from what the ranks of its stage hold; one tensor after the other."""
    own = {name: [shard.offset, shard.values.shape, shard.values.device.type, targets[name].offset, targets[name].shape]
           for name, shard in shards.items()}  # fmt: skip
    everyone = dict(enumerate(gather_json(own, mesh.world)))
    places = {rank: mesh.describe(rank) for rank in everyone}
    stage = [rank for rank in everyone if places[rank].pp == mesh.pp.rank]
    writers = [rank for rank in stage if places[rank].dp == places[rank].cp == 0]
    for name, shard in shards.items():
        there = Extent(shard.offset, tuple(shard.values.shape))
        for writer in writers:
            *_, offset, shape = everyone[writer][name]
            target, taken = Extent(tuple(offset), tuple(shape)), set()
            for rank in (writer, *stage):
                held = Extent(tuple(everyone[rank][name][0]), tuple(everyone[rank][name][1]))
                both = held.intersection(target)
                if both is None or held in taken:
                    continue
                taken.add(held)
                if rank == mesh.world.rank:
                    values = shard.values[both.slices(there)]
                    if rank == writer:
                        found[name][both.slices(target)] = values
                    else:
                        dist.send(values.contiguous(), dst=writer, group=mesh.world.group)
                elif writer == mesh.world.rank:
                    values = torch.empty(both.shape, dtype=shard.values.dtype, device=everyone[rank][name][2])
                    dist.recv(values, src=rank, group=mesh.world.group)
                    found[name][both.slices(target)] = values


def _write_manifest(folder: Path, record: RunRecord, shares: Sequence[list]) -> None:
    """Last. What several files have, such as a norm or a tied embedding, is read from the first."""
    files: dict[str, Any] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for own, written in shares:
        for (part, pieces), (file, about) in zip(own.items() if own else (), written):
            files[file] = about
            for name, (dtype, shape, place) in pieces.items():
                stored = tensors.setdefault(part, {}).setdefault(
                    name, {"dtype": dtype, "shape": shape, "pieces": []}
                )
                if place is not None and place not in [[p["offset"], p["shape"]] for p in stored["pieces"]]:
                    stored["pieces"].append({"file": file, "offset": place[0], "shape": place[1]})
    content = {**record.model_dump(mode="json"), "save_number": 1, "files": files, "tensors": tensors}
    replace_file(folder / MANIFEST, manifest_text(content))
