"""Attention as a single block, as operators that torch.compile traces.

The operators apply the kernels of attention_kernels.py where torch's own function would fall back to its slowest
kernel. They save neither repeated heads nor a bias, nor masks of windows and documents for the backward pass.
Recomputation can reuse the results of the first pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import local

import torch
from torch import Tensor

from megalith.ops.attention_blocks import block_backward, block_forward
from megalith.ops.attention_kernels import Block
from megalith.ops.documents import query_and_key_ends


class _Recomputation(local):
    """Per-thread state: a forward pass that saves results of block_attention, or a recomputation that reuses them."""

    saves: deque[tuple[Tensor, Tensor]] | None = None
    takes: deque[tuple[Tensor, Tensor]] | None = None


_recomputation = _Recomputation()


def saved_attention_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the context managers of a forward pass and its recomputation, for torch.utils.checkpoint.

    In the recomputation, block_attention returns the results of the first pass instead of computing them again, even
    inside compiled code.
    """
    results: deque[tuple[Tensor, Tensor]] = deque()
    return _set("saves", results), _set("takes", results)


@contextmanager
def _set(name: str, results: deque) -> Iterator[None]:
    before = getattr(_recomputation, name)
    setattr(_recomputation, name, results)
    try:
        yield
    finally:
        setattr(_recomputation, name, before)


@torch.library.custom_op("megalith::block_attention", mutates_args=())
def block_attention(
    query: Tensor,  # [batch, heads, queries, head_dim]
    key: Tensor,  # [batch, groups, keys, head_dim]
    value: Tensor,  # [batch, groups, keys, head_dim]
    mask: Tensor | None,  # bool [batch or 1, 1, queries, keys], True where a query sees a key
    documents: Tensor | None,  # see ops.documents.query_and_key_ends
    causal: bool,
    window: int | None,  # see attention_core.attention; with or without a mask
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale · query · keyᵀ) · value and its log-sum-exp.

    Returns:
        Attention [batch, heads, queries, head_dim].
        Log-sum-exp of the scores, float32 [batch, heads, queries].
    """
    if _recomputation.takes is not None:
        return _recomputation.takes.popleft()
    out, lse, _ = block_forward(query, key, value, _block(mask, documents, causal, window, scale))
    out, lse = out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()
    if _recomputation.saves is not None:
        _recomputation.saves.append((out, lse))
    return out, lse


@block_attention.register_fake
def _(query, key, value, mask, documents, causal, window, scale):
    batch, heads, queries, head_dim = query.shape
    out = query.new_empty(batch, queries, heads, head_dim).transpose(1, 2)
    return out, query.new_empty(batch, heads, queries, dtype=torch.float32)


@torch.library.custom_op("megalith::block_attention_backward", mutates_args=())
def block_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    block = _block(mask, documents, causal, window, scale)
    no_state = torch.zeros(2, dtype=torch.int64, device=query.device)
    gradients = block_backward(grad, query, key, value, out, lse, no_state, block)
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients)


@block_attention_backward.register_fake
def _(grad, query, key, value, *rest):
    shapes = [x.transpose(1, 2).shape for x in (query, key, value)]
    return tuple(query.new_empty(shape).transpose(1, 2) for shape in shapes)


def _block(
    mask: Tensor | None, documents: Tensor | None, causal: bool, window: int | None, scale: float
) -> Block:
    return Block(causal and mask is None, mask, query_and_key_ends(documents), window, scale=scale)


def _save(ctx, inputs, output) -> None:
    query, key, value, mask, documents, *ctx.plain = inputs
    ctx.save_for_backward(query, key, value, *output, mask, documents)


def _gradients(ctx, grad: Tensor, _lse: None):
    return *block_attention_backward(grad, *ctx.saved_tensors, *ctx.plain), *[None] * 5


block_attention.register_autograd(_gradients, setup_context=_save)
