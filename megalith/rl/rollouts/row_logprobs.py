"""Log-probabilities of a rollout batch under the old policy, as a checkpoint stores them, row by row.

A checkpoint inside a rollout batch needs them, because later weights cannot recompute them. Rows are the same in every
layout, so a run can resume in another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import zstandard
from torch import Tensor

from megalith.comm.collectives import gather_json
from megalith.errors import DataError
from megalith.parallel.mesh import Mesh
from megalith.rl.rollouts.rollouts import decompress_zstd

RowKey = tuple[int, int, int]
"""A row of a rollout batch: mini-batch, row number within it, number of tokens."""
RowLogprobs = dict[tuple[int, int], list[float]]
"""Log-probabilities by mini-batch and row number."""


def encode_row_logprobs(
    mesh: Mesh, number: int, row_keys: Sequence[Sequence[RowKey]], logprobs: Sequence[Tensor]
) -> bytes:
    """Return the file content with all ranks' log-probabilities, complete on rank 0. Collective over all ranks.

    Args:
        mesh: the run's mesh.
        number: number of the rollout batch.
        row_keys: rows of each of this rank's micro-batches.
        logprobs: float32 [batch, seq] of each of these micro-batches.
    """
    local = []
    if mesh.tp.rank == mesh.cp.rank == mesh.pp.rank == 0:
        for rows, values in zip(row_keys, logprobs, strict=True):
            for index, (mini_batch, row, tokens) in enumerate(rows):
                local.append([mini_batch, row, values[index, :tokens].tolist()])
    ranks = gather_json(local, mesh.world, to_first=True)
    return zstandard.compress(json.dumps([number, [row for rank in ranks for row in rank]]).encode())


def decode_row_logprobs(path: Path) -> tuple[int, RowLogprobs]:
    """Return the number of the rollout batch and its log-probabilities."""
    number, rows = json.loads(decompress_zstd(path.read_bytes()))
    return number, {(mini_batch, row): values for mini_batch, row, values in rows}


def restore_row_logprobs(saved: RowLogprobs, rows: Sequence[RowKey], like: Tensor) -> Tensor:
    """Return the saved log-probabilities of a micro-batch's rows, float32, shaped like `like` [batch, seq].

    Raises:
        DataError: if the rows differ from the saved ones.
    """
    logprobs = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for index, (mini_batch, row, tokens) in enumerate(rows):
        values = saved.get((mini_batch, row), [])
        if len(values) != tokens:
            raise DataError(
                f"the checkpoint is inside a rollout batch, and row {row} of its mini-batch "
                f"{mini_batch} had {len(values)} tokens then but has {tokens} now; keep "
                "rl.packing, data.seq_length, train.global_batch_size and rl.mini_batches, or "
                "resume from a checkpoint between rollout batches"
            )
        logprobs[index, :tokens] = torch.tensor(values)
    return logprobs
