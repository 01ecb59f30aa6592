"""Reader of the files that audit_hook.py writes. A dump may come from someone else, so nothing in it is trusted.

Each file is a safetensors file, validated by the library, whose header describes the rank and the layout of each of its
parameters. Tensors are mapped, and weights are read one at a time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import safe_open
from torch import Tensor

from megalith.audit_hook import BUCKETS
from megalith.checkpoint.files import SafetensorsEntry, list_safetensors
from megalith.errors import CheckpointError, shorten
from megalith.small_files import resolve_regular
from megalith.tables import counted

FILE = re.compile(r"step_(\d{5})_rank_(\d{5})\.safetensors")
MOST = 2**31
Count = Annotated[int, Field(ge=0, le=MOST)]
SAME_SIZE = ("labels", "loss_mask", "attention_mask", "position_ids")
WAY_OUT = "record the job again"


class Strict(BaseModel):
    """A JSON object without unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ParameterLayout(Strict):
    """Shape of a whole parameter, and its sharding along each dimension of a device mesh."""

    shape: list[Count]
    shards: list[tuple[Count, Count, Count | None, Count]]
    """For each dimension of the device mesh: its size, this rank's index, the sharded tensor dimension or None, and the
    split factor.
    """
    trained: bool
    copy_of_another: bool = Field(False, alias="copy")


class RankHeader(Strict):
    """Contents of a file's metadata."""

    rank: Count
    ranks: Count
    step: Count
    mesh: dict[str, Count]
    precision: str | None
    max_norm: float
    dropout: list[str]
    padding_idx: list[Count]
    """The token whose row of the embedding gets no gradient from the lookup (nn.Embedding's argument), if any."""
    parameters: dict[str, ParameterLayout]


@dataclass(frozen=True)
class RankDump:
    """One step of one rank."""

    path: Path
    header: RankHeader
    tensors: dict[str, SafetensorsEntry]
    batches: list[dict[str, Tensor]]
    """Micro-batches: input_ids, int64 [batch, seq], and whichever of labels, masks, position_ids and loss were
    recorded.
    """

    def vectors(self, kind: str) -> dict[str, Tensor]:
        """Return a sketch per parameter, float32 [257]: of its gradient if `kind` is "gradient", of its weights if
        "sketch".
        """
        names = [name for name in self.header.parameters if f"{kind}.{name}" in self.tensors]
        return {name: self.tensors[f"{kind}.{name}"].read() for name in names}

    def at(self, axis: str) -> int:
        """Return the rank's index along an axis of parallelism, 0 if the job does not have it."""
        return self.header.mesh.get(axis, 0)


def read_dump(folder: Path) -> list[list[RankDump]]:
    """Return the dumps of all ranks, by step and rank.

    Raises:
        CheckpointError: files are missing, damaged or contradict each other.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; pass the folder that audit_hook.py has written")
    steps: dict[int, dict[int, RankDump]] = {}
    for path in sorted(folder.iterdir()):
        if match := FILE.fullmatch(path.name):
            step, rank = int(match[1]), int(match[2])
            steps.setdefault(step, {})[rank] = _read_rank(path, folder, step, rank)
    if not steps:
        raise CheckpointError(
            f"{folder} has no step_NNNNN_rank_NNNNN.safetensors; pass the folder that audit_hook.py has "
            "written"
        )
    for step, ranks in steps.items():
        sizes = {dump.header.ranks for dump in ranks.values()}
        if len(sizes) > 1 or sorted(ranks) != list(range(min(sizes))):
            raise CheckpointError(
                f"{folder} has {len(ranks)} of {'/'.join(map(str, sorted(sizes)))} ranks of step {step}; copy the "
                "files of all ranks, or delete those of an earlier job"
            )
    return [[ranks[rank] for rank in sorted(ranks)] for _, ranks in sorted(steps.items())]


def _read_rank(path: Path, folder: Path, step: int, rank: int) -> RankDump:
    try:
        real = resolve_regular(path, folder)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {WAY_OUT}") from None
    tensors = list_safetensors(real, WAY_OUT)
    try:
        with safe_open(real, framework="pt") as file:
            header = RankHeader.model_validate_json((file.metadata() or {}).get("audit", "null"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path} is not a file of audit_hook.py (header{' ' * bool(where)}{where}: {first['msg']}); {WAY_OUT}"
        ) from None
    if any(at >= header.ranks for at in header.mesh.values()):
        raise CheckpointError(
            f"{path} has mesh {header.mesh}, but the job has {counted(header.ranks, 'rank')}; {WAY_OUT}"
        )
    if (header.rank, header.step) != (rank, step) or header.ranks <= rank:
        raise CheckpointError(
            f"{path} has rank {header.rank} of {header.ranks} and step {header.step} in its header, but others in its "
            f"name; {WAY_OUT}"
        )
    for name, layout in header.parameters.items():
        if any(at >= size or factor < 1 for size, at, _, factor in layout.shards) or any(
            dim is not None and dim >= len(layout.shape) for _, _, dim, _ in layout.shards
        ):
            raise CheckpointError(
                f"{path} has shards of {name} that do not fit its shape {layout.shape}: {layout.shards}; {WAY_OUT}"
            )
    sketches = [name for name in tensors if name.startswith(("gradient.", "sketch."))]
    wrong = [n for n in sketches if (tensors[n].dtype, tensors[n].shape) != ("F32", (BUCKETS + 1,))]
    if wrong:
        raise CheckpointError(
            f"{path} has sketches that are not float32 [{BUCKETS + 1}]: {shorten(wrong)}; {WAY_OUT}"
        )
    return RankDump(path, header, tensors, _read_batches(path, tensors))


def _read_batches(path: Path, tensors: dict[str, SafetensorsEntry]) -> list[dict[str, Tensor]]:
    batches: list[dict[str, Tensor]] = []
    while any(name.startswith(f"batch.{len(batches)}.") for name in tensors):
        prefix = f"batch.{len(batches)}."
        fields = {name.removeprefix(prefix): e for name, e in tensors.items() if name.startswith(prefix)}
        ids = fields.get("input_ids")
        if ids is None or ids.dtype not in ("I64", "I32") or len(ids.shape) not in (1, 2) or 0 in ids.shape:
            raise CheckpointError(
                f"{path} has no integer input_ids [batch, seq] of micro-batch {len(batches)}; {WAY_OUT}"
            )
        shape = (1, *ids.shape)[-2:]
        batch = {"input_ids": ids.read().long().view(shape)}
        if "loss" in fields:
            batch["loss"] = fields["loss"].read().float()
        for name in SAME_SIZE:
            if name in fields and torch.Size(fields[name].shape).numel() in (shape[1], shape[0] * shape[1]):
                batch[name] = fields[name].read().view(-1, shape[1]).expand(shape)
        batches.append(batch)
    return batches
