"""Scaled dot-product attention with PyTorch's kernels.

On a GPU, causal attention uses cuDNN's kernel if possible, about twice as fast as torch's flash kernel on training
shapes. Documents and windows in fp16 and bf16 use flash's kernel, which skips what they mask. Other masks, and fp32,
use the memory-efficient kernel with a dense mask, because cuDNN's kernel has given NaN gradients with such a mask. The
memory-efficient kernel has no grouped heads, so block_attention.py repeats keys and values inside an operator.
Attention dropout on a GPU uses the fused kernel's random numbers and so depends on the layout, unlike all other
dropout; on a CPU it uses `plain_attention`, which materializes the scores, with masks keyed by position.

Soft-capped scores and ALiBi use `plain_attention` or, in compiled code on a GPU, flex_attention, which skips masked
blocks. A trained bias is added to the mask and passed to the memory-efficient kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from megalith.compat.dynamo import mark_constant
from megalith.ops.attention_blocks import warn_of_plain_attention
from megalith.ops.attention_kernels import for_each_head
from megalith.ops.attention_sink import SinkAttention
from megalith.ops.block_attention import block_attention
from megalith.ops.documents import (
    alibi_bias,
    alibi_slopes,
    dense_mask,
    document_ids,
    query_and_key_ends,
    visible_blocks,
)
from megalith.ops.dropout import attention_keep_mask

# One of the first three supports every shape that _on_gpu passes. MATH is for devices without them.
_CAUSAL = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_FLEX_BLOCK = 128  # queries and keys per block that flex_attention computes or skips
_MULTIPLE = 8  # head_dim must be a multiple, for all fused kernels and dtypes


def attention(
    query: Tensor,  # [batch, queries, heads, head_dim]
    key: Tensor,  # [batch, keys, groups, head_dim]
    value: Tensor,  # [batch, keys, groups, head_dim]
    *,
    causal: bool = True,
    # bool [batch, 1, queries, keys], True where a query sees a key; replaces causal
    mask: Tensor | None = None,
    # int32 [batch, documents], ends of documents (ops/documents.py), between which there is no attention; if queries
    # and keys are different tokens, [2, batch, documents]: the queries', and the keys'
    documents: Tensor | None = None,
    # maximum number of keys that a query sees, including its own; the queries are the last tokens
    window: int | None = None,
    softcap: float | None = None,  # scores become softcap · tanh(score / softcap)
    scale: float | None = None,  # of query · keyᵀ; None: 1 / √head_dim
    dropout: float = 0.0,
    dropout_rows: Tensor | None = None,  # int32 [batch, queries]
    first_head: int = 0,  # index of the first of these heads in the layer, for dropout and ALiBi
    alibi: int | None = None,  # number of heads of the layer, to bias scores with ALiBi (documents.py)
    # save results for recomputation (saved_attention_contexts); not with dropout, softcap or alibi
    saved: bool = False,
    bias: Tensor | None = None,  # [1, heads, queries, keys], added to the scores; not with softcap or alibi
    # float32 [heads], score of an attention sink per head; not with bias, softcap, alibi or dropout
    sink: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale · query · keyᵀ) · value, [batch, queries, heads, head_dim]. The softmax is in fp32."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [batch, heads, seq, head_dim]
    key, value, mask, window = _in_window(query, key, value, mask, window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    visibility = Visibility(causal and mask is None, mask, documents, window)
    if sink is not None:
        return _beside_sink(query, key, value, visibility, scale, sink).transpose(1, 2)
    if bias is not None:
        drops = dropout, dropout_rows, first_head
        return _biased(query, key, value, visibility, bias, scale, *drops).transpose(1, 2)
    changed = softcap is not None or alibi is not None
    if query.is_cuda and not changed:
        return _on_gpu(query, key, value, visibility, scale, dropout, saved).transpose(1, 2)
    slopes = None if alibi is None else alibi_slopes(alibi, first_head, query.shape[1], query.device)
    if changed and query.is_cuda and torch.compiler.is_compiling() and not dropout:
        return _flex(query, key, value, visibility, softcap, scale, slopes).transpose(1, 2)
    if saved and not changed and not dropout:
        return _as_block(query, key, value, visibility, scale).transpose(1, 2)
    causal, mask = visibility.dense(query, key)
    if changed or dropout:
        if query.is_cuda and not torch.compiler.is_compiling():
            warn_of_plain_attention(softcap, alibi is not None, dropout, query.dtype, query.shape[3])
        drops = dropout, dropout_rows, first_head
        out = plain_attention(query, key, value, causal, mask, softcap, scale, *drops, slopes)
    else:
        out = _fused(query, key, value, causal, mask, scale, 0.0)
    return out.transpose(1, 2)


class Visibility(NamedTuple):
    """The arguments of `attention` that determine which keys each query sees."""

    causal: bool
    mask: Tensor | None = None
    documents: Tensor | None = None
    window: int | None = None

    @property
    def is_full(self) -> bool:
        """True if only causality restricts attention."""
        return self.mask is None and self.documents is None and self.window is None

    def dense(self, query: Tensor, key: Tensor) -> tuple[bool, Tensor | None]:
        """Return (causal, mask) with the same effect, where the mask is dense. At most one of the two is set.

        query and key are [batch, heads or groups, seq, head_dim].
        """
        both = query_and_key_ends(self.documents)
        mask = dense_mask(query, key, self.mask, both, self.causal, self.window)
        return self.causal and mask is None, mask


def _in_window(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor, Tensor | None, int | None]:
    """Return the keys and values that at least one query can see in its window, their mask, and the window.

    The returned window is None if the mask suffices.
    """
    if window is None or window >= key.shape[2]:
        return key, value, mask, None
    queries, keys = query.shape[2], min(key.shape[2], query.shape[2] + window - 1)
    mask = None if mask is None else mask[..., -keys:]
    return key[:, :, -keys:], value[:, :, -keys:], mask, window if queries > 1 else None


def _as_block(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float) -> Tensor:
    causal, mask, documents, window = visibility
    return block_attention(query, key, value, mask, documents, causal, window, scale)[0]


def _beside_sink(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float, sink: Tensor
) -> Tensor:
    head_dim = query.shape[3]
    if query.is_cuda and head_dim % _MULTIPLE:
        query, key, value = (pad(x, (0, -head_dim % _MULTIPLE)) for x in (query, key, value))
    causal, mask, documents, window = visibility
    out = SinkAttention.apply(sink, query, key, value, mask, documents, causal, window, scale)
    return out[..., :head_dim]


def _on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    dropout: float,
    saved: bool = False,
) -> Tensor:
    """Compute attention with a fused kernel."""
    head_dim = query.shape[3]
    if head_dim % _MULTIPLE:  # padding with zeros does not change scores
        query, key, value = (pad(x, (0, -head_dim % _MULTIPLE)) for x in (query, key, value))
    if visibility.is_full and supports_heads(query, key) and (dropout or not saved):
        with sdpa_kernel(_CAUSAL, set_priority=True):
            out = _fused(query, key, value, visibility.causal, None, scale, dropout)
    elif not dropout:
        out = _as_block(query, key, value, visibility, scale)
    else:  # torch keeps the random numbers of its dropout
        causal, mask = visibility.dense(query, key)
        key, value = (for_each_head(x, query) for x in (key, value))
        with sdpa_kernel(_MASKED, set_priority=True):
            out = _fused(query, key, value, causal, mask, scale, dropout)
    return out[..., :head_dim]


def supports_heads(query: Tensor, key: Tensor) -> bool:
    """Return True if torch has a fused kernel without a mask for these heads [batch, heads, seq, head_dim].

    Only cuDNN's and flash's kernels support grouped heads.
    """
    if query.shape[1] == key.shape[1]:
        return True
    return query.dtype in (torch.float16, torch.bfloat16) and query.shape[3] <= _widest_grouped_head()


@mark_constant
def _widest_grouped_head() -> int:
    """Return the largest head_dim for which flash attention has a backward pass on this device."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return 0
    return 256 if capability in ((8, 0), (9, 0), (10, 0)) else 192


def _fused(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    softcap: float | None,
    scale: float,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention with a kernel that is generated from the formula and skips masked blocks.

    It needs memory of [queries, keys] only if a mask is passed.
    """
    causal, mask, documents, window = visibility
    queries, keys = query.shape[2], key.shape[2]
    document_numbers = None if documents is None else document_ids(documents, queries)
    before = keys - queries

    def changed(score, batch, head, row, column):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score + slopes[head] * (column - row - before)

    def allowed(batch, head, row, column):
        one = column >= 0
        if mask is not None:
            one = one & mask[batch % mask.shape[0], 0, row, column]
        if document_numbers is not None:
            one = one & (document_numbers[batch, row] == document_numbers[batch, column])
        if causal or window is not None:
            one = one & (row + before >= column)
        return one if window is None else one & (column > row + before - window)

    any_visible, all_visible = visible_blocks(
        queries, keys, causal, window, document_numbers, _FLEX_BLOCK, query.device
    )
    blocks = BlockMask.from_kv_blocks(
        *_listed(any_visible if mask is not None else any_visible & ~all_visible),
        *(_listed(all_visible) if mask is None else (None, None)),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=allowed,
        seq_lengths=(queries, keys),
    )
    grouped = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, changed, blocks, scale=scale, enable_gqa=grouped)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True columns per row, and the columns' indices, True ones first.

    `blocks` is bool [batch, heads, rows, columns].
    """
    blocks = blocks.int()
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()


def _biased(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    bias: Tensor,
    scale: float,
    dropout: float,
    dropout_rows: Tensor | None,
    first_head: int,
) -> Tensor:
    """Compute attention with `bias` and the mask added to the scores in one addition."""
    causal, mask = visibility.dense(query, key)
    if causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if dropout and not query.is_cuda:
        drops = dropout, dropout_rows, first_head
        return plain_attention(query, key, value, False, mask, None, scale, *drops, bias=bias)
    key, value = (for_each_head(x, query) for x in (key, value))
    added = bias.to(query.dtype)
    if mask is not None:
        added = added.masked_fill(~mask, float("-inf"))
    with sdpa_kernel(_MASKED, set_priority=True):
        return _fused(query, key, value, False, added, scale, dropout)


def plain_attention(
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
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention by the formula, with dropout of the probabilities keyed by position."""
    key, value = (for_each_head(x, query) for x in (key, value))
    scores = (query @ key.mT).float() * scale  # [batch, heads, queries, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        keys = torch.arange(scores.shape[3], device=scores.device)
        scores = scores + alibi_bias(slopes, keys[keys.shape[0] - scores.shape[2] :], keys)
    if bias is not None:
        scores = scores + bias
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = scores.softmax(-1)
    if dropout:
        positions = torch.arange(scores.shape[3], device=scores.device)
        keep = attention_keep_mask(dropout_rows, scores.shape[1], positions, dropout, first_head)
        probabilities = torch.where(keep, probabilities / (1.0 - dropout), 0.0)
    return probabilities.to(value.dtype) @ value
