"""Scaled dot-product attention: PyTorch's kernels, chosen by what is asked for.

On a GPU the causal case runs on cuDNN's kernel where it can, about twice as fast as torch's flash kernel on training
shapes; a mask (documents) takes the memory-efficient kernel, since cuDNN's has given NaN gradients with one. On a CPU
attention dropout takes a plain path whose mask is keyed by position; on a GPU the fused kernel draws its own, the one
dropout that depends on the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
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
    dropout: float = 0.0,
    dropout_rows: Tensor | None = None,  # int32 [batch, queries]
    first_head: int = 0,  # the number of the first of these heads among all of the layer's: a key of dropout
) -> Tensor:
    """softmax(query · keyᵀ / √head_dim) · value → [batch, queries, heads, head_dim], softmax in fp32."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [batch, heads, seq, head_dim]
    causal = causal and mask is None
    if query.is_cuda:
        with sdpa_kernel(_CAUSAL if mask is None else _MASKED, set_priority=True):
            out = _fused(query, key, value, causal, mask, dropout)
    elif dropout:
        out = _plain(query, key, value, causal, mask, dropout, dropout_rows, first_head)
    else:
        out = _fused(query, key, value, causal, mask, 0.0)
    return out.transpose(1, 2)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, dropout: float
) -> Tensor:
    return scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, enable_gqa=query.shape[1] != key.shape[1]
    )


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    dropout: float,
    dropout_rows: Tensor,
    first_head: int,
) -> Tensor:
    """The formula, with dropout of the probabilities keyed by position."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    scores = (query @ key.mT).float() * query.shape[-1] ** -0.5  # [batch, heads, queries, keys]
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = scores.softmax(-1)
    places = torch.arange(scores.shape[3], device=scores.device)
    kept = attention_keep_mask(dropout_rows, scores.shape[1], places, dropout, first_head)
    probabilities = torch.where(kept, probabilities / (1.0 - dropout), 0.0)
    return probabilities.to(value.dtype) @ value


def document_mask(document_ids: Tensor) -> Tensor:
    """Causal attention inside each document: bool [batch, 1, seq, seq] from document_ids int [batch, seq]."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]
