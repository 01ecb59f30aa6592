"""Recurrences and short convolutions whose result for a token does not depend on the other sequences of the batch or on
how many tokens follow.

A recurrence is always computed in chunks of CHUNK tokens that are counted from the document's first token, with the
formulas of delta_rule.py and state_space.py and the functions of INVARIANT. In a chunk, row i of each product depends
on the tokens up to i: later tokens have a factor of 0, whether they are present or not. Decoding therefore repeats the
products of the current chunk for every token, from the state before the chunk. In packed rows, padding is first
inserted so that each document begins a chunk.

Products have one shape for every batch. On a CPU, PyTorch's matmul of this shape computes them; on a GPU, a Triton
kernel. Only the forward pass is batch invariant. The backward pass is the same as the ordinary operator's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.ops import delta_rule, kernels, state_space
from megalith.ops.batch_invariant.elementwise import exp, sum_by_halves
from megalith.ops.batch_invariant.matmul import COLUMNS
from megalith.ops.causal_conv import by_shifts
from megalith.ops.chunks import CHUNK, ChunkMath

if kernels.AVAILABLE:
    from megalith.ops.kernels.batch_invariant_kernels import tiled_batched_matmul

BLOCK = 16  # rows of a triangular system that are eliminated one by one; a divisor of CHUNK


def batched_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y, float32 [..., rows, columns], for x [..., rows, inner] and y [..., inner, columns].

    Leading dimensions are broadcast. A product has the same bits for any size of these dimensions.
    """
    leading, columns = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), y.shape[-1]
    x, y = (z.expand(*leading, *z.shape[-2:]).reshape(-1, *z.shape[-2:]).contiguous() for z in (x, y))
    if x.is_cuda:
        out = tiled_batched_matmul(x, y)
    else:
        out = torch.bmm(x, pad(y, (0, -columns % COLUMNS)))[..., :columns]
    return out.unflatten(0, leading)


def running_sums(x: Tensor, dim: int) -> Tensor:
    """Return the cumulative sums along a dimension, computed in log₂(size) elementwise additions."""
    size, shift = x.shape[dim], 1
    while shift < size:
        rest = size - shift
        x = torch.cat([x.narrow(dim, 0, shift), x.narrow(dim, shift, rest) + x.narrow(dim, 0, rest)], dim)
        shift *= 2
    return x


def solve_unit_lower(system: Tensor, y: Tensor) -> Tensor:
    """Return the solution of (I + the strict lower triangle of system [..., CHUNK, CHUNK]) · solution = y.

    Diagonal blocks are inverted by forward substitution, then the blocks of rows are solved in order by matmuls.
    """
    blocks = range(0, CHUNK, BLOCK)
    diagonal = torch.stack([system[..., at : at + BLOCK, at : at + BLOCK] for at in blocks], -3)
    inverse = torch.eye(BLOCK, device=y.device).expand(diagonal.shape).contiguous()
    for column in range(BLOCK - 1):
        below = diagonal[..., column + 1 :, column, None] * inverse[..., column, None, :]
        inverse[..., column + 1 :, :] -= below
    solution: list[Tensor] = []
    for number, at in enumerate(blocks):
        rest = y[..., at : at + BLOCK, :]
        if solution:
            before = system[..., at : at + BLOCK, :at]
            rest = rest - batched_matmul(before, torch.cat(solution, -2))
        solution.append(batched_matmul(inverse[..., number, :, :], rest))
    return torch.cat(solution, -2)


INVARIANT = ChunkMath(batched_matmul, exp, running_sums, sum_by_halves, solve_unit_lower)


def convolution(
    x: Tensor, taps: Tensor, documents: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute ops.causal_conv.causal_conv in fp32, adding the taps in one order, and round once.

    Taps and bias are rounded to x's dtype first, because an engine stores them in that dtype.
    """
    taps, bias = (None if each is None else each.to(x.dtype).float() for each in (taps, bias))
    return by_shifts(x.float(), taps, documents, bias).to(x.dtype)


@torch.no_grad()
def delta_rule_of_documents(*inputs: Any) -> Tensor:
    """Compute ops.delta_rule.gated_delta_rule without a gradient."""
    *tokens, documents = inputs
    return _of_documents(lambda *each: delta_rule.with_states(*each, math=INVARIANT)[0], tokens, documents)


@torch.no_grad()
def state_space_of_documents(*inputs: Any) -> Tensor:
    """Compute ops.state_space.state_space without a gradient."""
    *tokens, skip, documents = inputs

    def compute(*each: Tensor) -> Tensor:
        *aligned, slot_documents = each
        return state_space.with_states(*aligned, skip, slot_documents, math=INVARIANT)[0]

    return _of_documents(compute, tokens, documents)


def _of_documents(compute: Callable[..., Tensor], tokens: list[Tensor], documents: Tensor | None) -> Tensor:
    """Return compute(*tokens, documents) [batch, seq, ...], with each document moved to the start of a chunk.

    Args:
        compute: recurrence, called with the moved `tokens` and the document number of each of their positions.
        tokens: inputs [batch, seq, ...].
        documents: int [batch, seq], document number of each token; None means a single one.
    """
    if documents is None:
        return compute(*tokens, None)
    slots, slot_documents = chunk_slots(documents)
    row = torch.arange(len(documents), device=documents.device)[:, None]

    def aligned(x: Tensor) -> Tensor:
        moved = x.new_zeros(*slot_documents.shape, *x.shape[2:])
        moved[row, slots] = x
        return moved

    return compute(*map(aligned, tokens), slot_documents)[row, slots]


def chunk_slots(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Insert padding between documents, so that each begins at a multiple of CHUNK.

    Args:
        documents: int [batch, seq], document number of each token, in ascending order.

    Returns:
        The new index of each token, int64 [batch, seq].
        The document of each index, int64 [batch, chunks · CHUNK]; -1 after the row's last chunk.
    """
    batch, seq = documents.shape
    index = torch.arange(seq, device=documents.device).expand(batch, -1)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    offset = index - torch.where(is_first, index, 0).cummax(1).values
    chunk = (offset % CHUNK == 0).cumsum(1) - 1
    slot_documents = documents.new_full((batch, int(chunk.max()) + 1), -1, dtype=torch.int64)
    slot_documents.scatter_(1, chunk, documents.long())
    return chunk * CHUNK + offset % CHUNK, slot_documents.repeat_interleave(CHUNK, 1)


def with_gradient_of(ordinary: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return exact(*inputs). The backward pass recomputes ordinary(*inputs) and uses its gradient."""
    if not torch.is_grad_enabled():
        return exact(*inputs)
    return _WithGradientOf.apply(ordinary, exact, *inputs)


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ordinary: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Any) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)  # tensors, or None
        return exact(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_() if need else x for x, need in zip(ctx.saved_tensors, needed)]
        with torch.enable_grad():
            out = ctx.ordinary(*inputs)
        trained = [x for x, need in zip(inputs, needed) if need]
        gradients = iter(torch.autograd.grad(out, trained, grad))
        return None, None, *(next(gradients) if need else None for need in needed)
