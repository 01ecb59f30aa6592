"""Context parallelism of recurrent mixers: each rank computes the states that precede its chunks.

A recurrence maps the state S before a chunk of tokens to A S + W after it (`transition` of the operator). Every rank
computes A and W of its early and its late chunk (zigzag.py) from the initial state 0, all-gathers A and W of all
chunks, and applies them in order to get the states before its own chunks. Then it computes its tokens. A convolution
needs the last tokens of the preceding chunk.

The all-gathers are small: their size does not depend on the sequence length. A is a matrix per head for a delta rule,
and a number per head for a state space model. The delta rule computes the values that it writes to its state twice.
States and convolutions do not cross the end of a document.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalith.comm.collectives import Axis, all_gather, all_gather_no_grad
from megalith.ops import delta_rule, state_space
from megalith.ops.causal_conv import causal_conv
from megalith.ops.documents import document_ids
from megalith.parallel.context.zigzag import spans

OTHER = -1  # number of no document


def local_document_ids(axis: Axis, ends: Tensor, seq: int) -> Tensor:
    """Return the document numbers of this rank's `seq` tokens, int32 [batch, seq], from those of full sequences."""
    token_documents = document_ids(ends, seq * axis.size)
    return torch.cat(
        [token_documents[:, span.start : span.stop] for span in spans(axis.rank, axis.size, seq)], dim=1
    )


def context_convolution(
    axis: Axis,
    x: Tensor,
    taps: Tensor,
    documents: Tensor | None = None,
    bias: Tensor | None = None,
    convolution: Callable[..., Tensor] = causal_conv,
) -> Tensor:
    """Compute ops.causal_conv.causal_conv of this rank's two chunks. Returns [batch, seq, units].

    `convolution` computes it for full sequences.
    """
    count = taps.shape[-1] - 1
    if not count:
        return convolution(x, taps, documents, bias)
    chunks = _chunks(x)  # [2 · batch, chunk, units]
    before = _before(axis, all_gather(chunks[None, :, -count:], axis), 0)
    token_documents = None
    if documents is not None:
        token_documents = _chunks(documents)
        last = _before(axis, _gathered(axis, token_documents[:, -count:]), OTHER)
        token_documents = torch.cat([last, token_documents], dim=1)
    out = convolution(torch.cat([before, chunks], dim=1), taps, token_documents, bias)[:, count:]
    return _joined(out)


def context_state_space(
    axis: Axis,
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    documents: Tensor | None = None,
) -> Tensor:
    """Compute ops.state_space.state_space of this rank's two chunks. Returns [batch, seq, heads, head size]."""
    x, step, decay, b, c = (_chunks(y) for y in (x, step, decay, b, c))
    documents = None if documents is None else _chunks(documents)
    written, factor = _run(state_space.transition, x, step, decay, b, documents)
    every = all_gather(written[None], axis), all_gather(factor[None], axis)
    state, number = _states_before(axis, *every, torch.mul, documents)
    return _joined(_run(state_space.with_last_state, x, step, decay, b, c, skip, documents, state, number)[0])


def context_delta_rule(
    axis: Axis,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    share: Tensor,
    documents: Tensor | None = None,
) -> Tensor:
    """Compute ops.delta_rule.gated_delta_rule of this rank's two chunks. Returns [batch, seq, heads, value size]."""
    query, key, value, decay, share = (_chunks(y) for y in (query, key, value, decay, share))
    documents = None if documents is None else _chunks(documents)
    maps = all_gather(_run(delta_rule.transition, key, value, decay, share, documents)[None], axis)
    written, matrix = maps.split([value.shape[-1], key.shape[-1]], dim=-1)
    state, number = _states_before(axis, written, matrix, torch.matmul, documents)
    return _joined(
        _run(delta_rule.with_last_state, query, key, value, decay, share, documents, state, number)[0]
    )


def _run(function: Callable, *args):
    """Call a function whose intermediate tensors are recomputed in the backward pass."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _chunks(x: Tensor) -> Tensor:
    """Return the early and the late chunk of x [batch, seq, ...] as sequences: [2 · batch, seq / 2, ...]."""
    return torch.cat(x.chunk(2, dim=1))


def _joined(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2), dim=1)


def _gathered(axis: Axis, x: Tensor) -> Tensor:
    """All-gather x over the axis, without a gradient: [size, ...]."""
    return all_gather_no_grad(x.contiguous(), axis).view(axis.size, *x.shape)


def _in_order(axis: Axis, every: Tensor) -> list[Tensor]:
    """Reorder the gathered chunks [size, 2 · batch, ...] by their position in the sequence: 2 · size tensors [batch,
    ...].
    """
    early, late = every.chunk(2, dim=1)
    return [*early.unbind(), *late.flip(0).unbind()]


def _local_chunks(axis: Axis) -> tuple[int, int]:
    """Return the indices of this rank's two chunks in the sequence."""
    return axis.rank, 2 * axis.size - 1 - axis.rank


def _before(axis: Axis, every: Tensor, first: int) -> Tensor:
    """Return the values of the chunks that precede this rank's two chunks, [2 · batch, ...].

    `first` is used for the chunk at the start of the sequence.
    """
    chunks = _in_order(axis, every)
    chunks = [torch.full_like(chunks[0], first), *chunks]
    return torch.cat([chunks[number] for number in _local_chunks(axis)])


def _states_before(
    axis: Axis,
    written: Tensor,
    transition: Tensor,
    apply: Callable[[Tensor, Tensor], Tensor],
    documents: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the states before this rank's chunks, [2 · batch, heads, key size, value size], and their documents, int
    [2 · batch].

    Args:
        axis: the context axis.
        written: the ranks' states from the initial state 0, [size, 2 · batch, heads, key size, value size].
        transition: the ranks' A, [size, 2 · batch, heads, …].
        apply: multiplies A by a state.
        documents: document numbers of this rank's chunks, int [2 · batch, chunk]; None means a single document.
    """
    writes, maps = _in_order(axis, written), _in_order(axis, transition)
    state, states = torch.zeros_like(writes[0]), [torch.zeros_like(writes[0])]
    firsts = lasts = None
    if documents is not None:
        firsts, lasts = (_in_order(axis, _gathered(axis, documents[:, at])) for at in (0, -1))
    for number in range(2 * axis.size - 1):
        if number:
            state = apply(maps[number], state)
            if firsts is not None:  # A is for a state of the first token's document
                state = state * (firsts[number] == lasts[number - 1])[:, None, None, None]
            state = state + writes[number]
        else:
            state = writes[0]
        states.append(state)
    token_documents = None
    if lasts is not None:
        lasts = [torch.full_like(lasts[0], OTHER), *lasts]
        token_documents = torch.cat([lasts[number] for number in _local_chunks(axis)])
    return torch.cat([states[number] for number in _local_chunks(axis)]), token_documents
