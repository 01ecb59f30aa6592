"""Scaled dot-product attention: PyTorch's kernels, chosen by what is asked for.

On a GPU the causal case runs on cuDNN's kernel where it can, about twice as fast as torch's flash kernel on training
shapes; a mask (documents) takes the memory-efficient kernel, since cuDNN's has given NaN gradients with one. On a CPU
attention dropout takes a plain path whose mask is keyed by position; on a GPU the fused kernel draws its own, the one
dropout that depends on the layout.

A sliding window is a mask, but where all keys are inside of it. Soft-capped scores have no fused kernel: they take the
plain path, or in compiled code on a GPU flex_attention, which makes a kernel of the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from megalith.ops.dropout import attention_keep_mask

_CAUSAL = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(
    query: Tensor,  # [batch, queries, heads, head_dim]
    key: Tensor,  # [batch, keys, groups, head_dim]
    value: Tensor,  # [batch, keys, groups, head_dim]
    *,
    causal: bool = True,
    mask: Tensor
    | None = None,  # bool [batch, 1, queries, keys], True where a query may look; replaces causal
    window: int
    | None = None,  # the keys that a query sees at most, its own included; the queries are the last tokens
    softcap: float | None = None,  # scores become softcap · tanh(score / softcap)
    scale: float | None = None,  # of query · keyᵀ; None: 1 / √head_dim
    dropout: float = 0.0,
    dropout_rows: Tensor | None = None,  # int32 [batch, queries]
    first_head: int = 0,  # the number of the first of these heads among all of the layer's: a key of dropout
) -> Tensor:
    """softmax(scale · query · keyᵀ) · value → [batch, queries, heads, head_dim], softmax in fp32."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [batch, heads, seq, head_dim]
    if window is not None and window < key.shape[2]:
        key, value, mask = _in_window(query, key, value, mask, window)
    causal = causal and mask is None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None and query.is_cuda and torch.compiler.is_compiling() and not dropout:
        out = _flex(query, key, value, causal, mask, softcap, scale)
    elif softcap is not None or (dropout and not query.is_cuda):
        out = _plain(query, key, value, causal, mask, softcap, scale, dropout, dropout_rows, first_head)
    elif query.is_cuda:
        with sdpa_kernel(_CAUSAL if mask is None else _MASKED, set_priority=True):
            out = _fused(query, key, value, causal, mask, scale, dropout)
    else:
        out = _fused(query, key, value, causal, mask, scale, 0.0)
    return out.transpose(1, 2)


def _in_window(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The keys and values that some query's window holds, and a mask of which: None for a query that sees them all."""
    queries, keys = query.shape[2], min(key.shape[2], query.shape[2] + window - 1)
    key, value = key[:, :, -keys:], value[:, :, -keys:]
    inside = None
    if queries > 1:
        inside = window_mask(queries, keys, window, query.device)
    if mask is None:
        return key, value, inside
    mask = mask[..., -keys:]
    return key, value, mask if inside is None else mask & inside


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Causal attention over the last `window` keys, the queries being the last tokens: bool [1, 1, queries, keys]."""
    places = torch.arange(keys, device=device)
    distance = places[keys - queries :, None] - places
    return ((distance >= 0) & (distance < window))[None, None]


def _fused(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )


def _flex(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, softcap: float, scale: float
) -> Tensor:
    def bounded(score, batch, head, row, column):
        score = softcap * torch.tanh(score / softcap)
        if mask is not None:
            seen = mask[batch % mask.shape[0], 0, row, column]
        elif causal:
            seen = row >= column
        else:
            return score
        return torch.where(seen, score, float("-inf"))

    return flex_attention(query, key, value, bounded, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    softcap: float | None,
    scale: float,
    dropout: float,
    dropout_rows: Tensor | None,
    first_head: int,
) -> Tensor:
    """The formula, with dropout of the probabilities keyed by position."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    scores = (query @ key.mT).float() * scale  # [batch, heads, queries, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = scores.softmax(-1)
    if dropout:
        places = torch.arange(scores.shape[3], device=scores.device)
        kept = attention_keep_mask(dropout_rows, scores.shape[1], places, dropout, first_head)
        probabilities = torch.where(kept, probabilities / (1.0 - dropout), 0.0)
    return probabilities.to(value.dtype) @ value


def document_mask(document_ids: Tensor) -> Tensor:
    """Causal attention inside each document: bool [batch, 1, seq, seq] from document_ids int [batch, seq]."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]
