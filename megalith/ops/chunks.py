"""Helpers for chunked recurrences: decays between the tokens of a chunk, and the documents of packed sequences.

A recurrence with a decay α per token is computed in chunks of C tokens, with matmuls inside of a chunk and a scan of
states over the chunks (delta_rule.py, state_space.py). G is the running sum of log α in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def _solve(system: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(system, y, upper=False, unitriangular=True)


class ChunkMath(NamedTuple):
    """The rounding functions that a recurrence uses: PyTorch's, or batch-invariant ones
    (batch_invariant/recurrences.py).
    """

    matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    exp: Callable[[Tensor], Tensor] = torch.exp
    cumsum: Callable[[Tensor, int], Tensor] = torch.cumsum
    sum: Callable[[Tensor], Tensor] = _sum  # over the last dimension
    solve: Callable[[Tensor, Tensor], Tensor] = _solve
    """Function that returns the solution of (I + the strict lower triangle of system [..., n, n]) · solution = y [...,
    n, columns]."""


ORDINARY = ChunkMath()


def in_chunks(x: Tensor, chunks: int) -> Tensor:
    """Reshape [batch, seq, heads, ...] to [batch, heads, chunks, C, ...], padded with zeros.

    Zeros leave states unchanged.
    """
    x = x.transpose(1, 2)
    missing = chunks * CHUNK - x.shape[2]
    x = pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
    return x.unflatten(2, (chunks, CHUNK))


def pair_decays(
    decay: Tensor, same: Tensor | None = None, math: ChunkMath = ORDINARY
) -> tuple[Tensor, Tensor]:
    """Return the decays between the tokens of each chunk.

    Args:
        decay: log α, float32 [batch, heads, chunks, C].
        same: pairs of tokens of the same document, from `document_masks`; None means all pairs.
        math: functions to compute with.

    Returns:
        Γ_ij = exp(G_i − G_j) [batch, heads, chunks, C, C], 0 for later tokens j and for other documents.
        exp(G_C − G_j) [batch, heads, chunks, C, 1], from each token to the chunk's end.
    """
    visible = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).tril()
    # Sums of the values in between: differences of G would lose the most digits for the nearest tokens.
    within = decay[..., None].expand(*decay.shape, CHUNK).masked_fill(~visible.tril(-1), 0)
    within = math.cumsum(within, -2)
    if same is not None:
        visible = visible & same
    pairs = math.exp(within.masked_fill(~visible, float("-inf")))
    return pairs, math.exp(within[..., -1, :, None])


def document_masks(
    documents: Tensor, chunks: int, state_documents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return masks of the documents in each chunk.

    Args:
        documents: int [batch, seq], document number of each token.
        chunks: number of chunks.
        state_documents: int [batch], document that the initial state belongs to; None: the first token's document.

    Returns:
        Pairs of tokens of the same document, bool [batch, 1, chunks, C, C].
        1 for tokens in the document of the state before the chunk, else 0, float32 [batch, 1, chunks, C, 1].
        1 for tokens in the document of the state after the chunk, else 0, float32 [batch, 1, chunks, C, 1].
        1 for chunks where both documents are the same, else 0, float32 [batch, 1, chunks, 1, 1].
    """
    missing = chunks * CHUNK - documents.shape[1]
    chunk_documents = pad(documents[:, None], (0, missing), mode="replicate")[:, 0] if missing else documents
    chunk_documents = chunk_documents.unflatten(1, (chunks, CHUNK))  # [batch, chunks, C]
    last = chunk_documents[..., -1:]
    first = chunk_documents[:, :1, :1] if state_documents is None else state_documents[:, None, None]
    before = torch.cat([first, last[:, :-1]], dim=1)
    same = chunk_documents[..., :, None] == chunk_documents[..., None, :]
    masks = [
        (chunk_documents == before)[..., None],
        (chunk_documents == last)[..., None],
        (last == before)[..., None],
    ]
    return same[:, None], *(mask[:, None].float() for mask in masks)
