"""Checkpoint files as in Accelerate's Megatron guide: one for weights and one for optimizer state per (tensor,
pipeline) rank.

Their content depends on neither ZeRO nor expert parallelism: `pytorch_model_tp_T_pp_P.bin` contains what tensor rank T
of pipeline stage P would hold with both turned off. Experts that tensor parallelism does not shard are divided among
the stage's files: file T has the T-th block of them. Within a stage, all ranks send their pieces to the first rank with
tensor rank T, one tensor at a time. It assembles them in a memory-mapped scratch file and writes the result from there,
so that it needs memory for only one assembled tensor in addition to its own shards.

The files are written by torch.save, contain only tensors, and can be read by torch.load with `weights_only`. A manifest
is stored with them, so that any layout can load them.
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
    """Write the run's state into an existing folder and replace the files in it. Collective: all ranks must call it.

    `rows` is the result of `vocabulary_rows`. Raises CheckpointError, identically on every rank, if the files cannot be
    written.
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
        targets = {name: extents.get(name) or Extent.full(shard.shape) for name, shard in shards.items()}
        file = f"{FILES[part]}_tp_{mesh.tp.rank}_pp_{mesh.pp.rank}.bin"
        written.append(_write_part(folder / file, shards, targets, mesh))
    pieces = None
    if mesh.dp_cp.rank == 0:
        pieces = {part: {name: _piece(shard, extents.get(name), stored[part][name]) for name, shard in shards.items()}
               for part, shards in parts.items()}  # fmt: skip
    shares = gather_json([pieces, written], mesh.world)
    collectively(
        mesh.world, lambda: _write_manifest(folder, record, shares) if mesh.world.rank == 0 else None
    )


def open_shard_files(folder: str | Path, parts: Sequence[str], world: Axis = ALONE) -> Checkpoint | None:
    """Open the files as a checkpoint and verify the checksums of `parts`. Returns None if there are no files."""
    if not (Path(folder) / MANIFEST).exists():
        return None
    opened = open_checkpoint(folder, parts, world=world)
    return _ShardFiles(opened.folder, opened.manifest, opened.files)


class _ShardFiles(Checkpoint):
    """A checkpoint in torch.save files. Its matrices include the vocabulary's padding rows."""

    def _tensors_in(self, file: str) -> dict[str, Any]:
        if file not in self._tables:
            loaded, table = _load(self.files / file), {}
            for stored in self.manifest.tensors.values():
                for name, tensor in stored.items():
                    for piece in (piece for piece in tensor.pieces if piece.file == file):
                        values = loaded.get(name)
                        if not _fits(values, tensor.dtype, piece):
                            raise CheckpointError(
                                f"{self.folder / file} does not contain {name} as {tensor.dtype} {piece.shape}, as "
                                "listed in its manifest; use another checkpoint"
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
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # from torch, zipfile or pickle
        raise CheckpointError(
            f"{file} cannot be read by torch.load with weights_only: {str(error).partition(chr(10))[0]}; use another "
            "checkpoint"
        ) from None
    return content if isinstance(content, dict) else {}


def _fits(values: Any, dtype: str, piece: PieceRecord) -> bool:
    if not isinstance(values, Tensor) or values.dtype != DTYPES[dtype]:
        return False
    shape = list(values.shape)
    return len(shape) == len(piece.shape) and shape[1:] == piece.shape[1:] and shape[:1] >= piece.shape[:1]


def _clear(folder: Path) -> None:
    """Remove old files, beginning with the manifest, without which the others are not a checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.iterdir():
        if NAME.fullmatch(path.name):
            path.unlink()


def _file_extents(model: ParallelModel) -> dict[str, Extent]:
    """Return, by name, the slice of each parameter and buffer in the file of this rank's tensor-parallel rank."""
    mesh, extents = model.mesh, {}
    for chunk in model.chunks:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            dtensor = dtensor_of(tensor)
            if EXPERTS not in name:
                shape, offset = local_shape_and_offset(dtensor, ("tp",))
            elif mesh.etp.size == mesh.tp.size:
                shape, offset = local_shape_and_offset(dtensor, ("etp",))
            else:  # [experts, …]: a share of complete experts
                share = -(-dtensor.shape[0] // mesh.tp.size)
                first = min(mesh.tp.rank * share, dtensor.shape[0])
                shape = (min(share, dtensor.shape[0] - first), *dtensor.shape[1:])
                offset = (first, *[0] * (dtensor.ndim - 1))
            extents[name] = Extent(tuple(offset), tuple(shape))
    return extents


def _piece(shard: LocalShard, extent: Extent | None, shape: Sequence[int]) -> list:
    """Return dtype, shape and extent of the slice of a stored tensor that a file contains, without padding."""
    unpadded = Extent.full(shape)
    stored = (extent or unpadded).intersection(unpadded)
    box = None if stored is None else [list(stored.offset), list(stored.shape)]
    return [DTYPE_CODES[shard.values.dtype], list(shape), box]


def _write_part(
    file: Path, shards: Mapping[str, LocalShard], targets: Mapping[str, Extent], mesh: Mesh
) -> list | None:
    """Send this rank's pieces to the writing ranks. Returns the file's name, size and checksum on a writing rank."""
    writes = mesh.dp_cp.rank == 0
    empty = {name: (targets[name].shape, shard.values.dtype) for name, shard in shards.items()}
    with _mapped(file, empty if writes else {}, mesh.world) as tensors:
        _exchange(shards, targets, tensors, mesh)
        return collectively(mesh.world, lambda: _write(file, tensors) if writes else None)[mesh.world.rank]


def _write(file: Path, tensors: Mapping[str, Tensor]) -> list:
    try:
        # A file object, because torch.save would store the name of a path.
        with atomic_path(file) as temporary, open(temporary, "wb") as opened:
            torch.save(dict(tensors), opened)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{file} could not be written: {reason}; free disk space, or choose another folder"
        ) from error
    return [file.name, file_record(file).model_dump()]


@contextmanager
def _mapped(file: Path, kinds: Mapping[str, tuple], world: Axis) -> Iterator[dict[str, Tensor]]:
    """Yield uninitialized tensors of these shapes and dtypes, mapped to a scratch file that is deleted at the end.

    Raises CheckpointError, identically on every rank, if there is no space.
    """

    def make() -> None:
        offsets, size = {}, 0
        for name, (shape, dtype) in kinds.items():
            offsets[name] = size
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
            tensors[name] = (
                torch.frombuffer(mapping, dtype=dtype, count=count, offset=offsets[name]).view(shape)
                if count
                else torch.empty(shape, dtype=dtype)
            )

    tensors: dict[str, Tensor] = {}
    collectively(world, make)
    yield tensors


@torch.no_grad()
def _exchange(
    shards: Mapping[str, LocalShard], targets: Mapping[str, Extent], tensors: Mapping[str, Tensor], mesh: Mesh
) -> None:
    """Fill `tensors` on writing ranks with the pieces of all ranks of the stage, one tensor at a time."""
    local = {}
    for name, shard in shards.items():
        values, target = shard.values, targets[name]
        local[name] = [shard.offset, values.shape, values.device.type, target.offset, target.shape]
    by_rank = dict(enumerate(gather_json(local, mesh.world)))
    coordinates = {rank: mesh.describe(rank) for rank in by_rank}
    stage = [rank for rank in by_rank if coordinates[rank].pp == mesh.pp.rank]
    writers = [rank for rank in stage if coordinates[rank].dp == coordinates[rank].cp == 0]
    for name, shard in shards.items():
        local_extent = Extent(shard.offset, tuple(shard.values.shape))
        for writer in writers:
            *_, offset, shape = by_rank[writer][name]
            target, done = Extent(tuple(offset), tuple(shape)), set()
            for rank in (writer, *stage):
                source = Extent(tuple(by_rank[rank][name][0]), tuple(by_rank[rank][name][1]))
                both = source.intersection(target)
                if both is None or source in done:
                    continue
                done.add(source)
                if rank == mesh.world.rank:
                    values = shard.values[both.slices(local_extent)]
                    if rank == writer:
                        tensors[name][both.slices(target)] = values
                    else:
                        dist.send(values.contiguous(), dst=writer, group=mesh.world.group)
                elif writer == mesh.world.rank:
                    values = torch.empty(both.shape, dtype=shard.values.dtype, device=by_rank[rank][name][2])
                    dist.recv(values, src=rank, group=mesh.world.group)
                    tensors[name][both.slices(target)] = values


def _write_manifest(folder: Path, record: RunRecord, shares: Sequence[list]) -> None:
    """Write the manifest, last. Tensors in several files, such as norms and tied embeddings, are read from the
    first."""
    files: dict[str, Any] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for parts, written in shares:
        for (part, pieces), (file, checksum) in zip(parts.items() if parts else (), written):
            files[file] = checksum
            for name, (dtype, shape, box) in pieces.items():
                stored = tensors.setdefault(part, {}).setdefault(
                    name, {"dtype": dtype, "shape": shape, "pieces": []}
                )
                if box is not None and box not in [[p["offset"], p["shape"]] for p in stored["pieces"]]:
                    stored["pieces"].append({"file": file, "offset": box[0], "shape": box[1]})
    content = {**record.model_dump(mode="json"), "save_number": 1, "files": files, "tensors": tensors}
    replace_file(folder / MANIFEST, manifest_text(content))
