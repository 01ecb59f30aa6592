"""Blockwise attention: a block of queries attends to a block of keys, and the log-sum-exp merges the blocks.

A query's softmax over many keys can be computed one block of keys at a time (Dao et al. 2022; Liu et al. 2023). A block
returns its own output o and, for each query, the log l of the sum of its exponentials. Two blocks merge into

    l = log(exp(l₁) + exp(l₂))        o = o₁ · exp(l₁ − l) + o₂ · exp(l₂ − l)

The backward pass through a block needs nothing of the other blocks except the merged o and l: the probabilities are
exp(scores − l), and the softmax's own term is the sum of o · grad over head_dim. So each of PyTorch's attention kernels
also works for blocks if its backward gets the merged o and l.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from megalith.ops.attention_kernels import KERNELS, Block, Gradients, Result, _Kernel
from megalith.ops.documents import dense_mask


def block_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    """Compute attention for one block.

    Returns the output o, the log-sum-exp l, and the kernel's random state, int64 [2], or None if it uses none.
    """
    kernel, block = _chosen(query, key, value, block)
    return kernel.forward(query, key, value, block)


def block_backward(
    grad: Tensor,  # gradient of the merged o
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,  # merged o, in the dtype of query
    lse: Tensor,  # merged l
    random: Tensor,  # int64 [2] from block_forward; ignored if that returned None
    block: Block,
) -> Gradients:
    """Return the gradients of query, key and value through this block."""
    lse = lse.contiguous()
    kernel, block = _chosen(query, key, value, block)
    return kernel.backward(grad, query, key, value, out, lse, random, block)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the results of another block into the running float32 `out` and `lse`, in place. Every query must have seen
    a key already.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None])
    torch.logaddexp(lse, block_lse, out=lse)


def _chosen(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[_Kernel, Block]:
    """Return the fastest kernel that supports the block. Also return the block, in which a mask replaces documents and
    windows that the kernel does not support.
    """
    if not block.changes_scores:
        for name in ("cudnn", "flash"):
            if KERNELS[name].suits(query, key, value, block):
                return KERNELS[name], block
    block = _masked(query, key, block)
    kernel = KERNELS["plain"]
    if not block.changes_scores:
        kernel = next(kernel for kernel in KERNELS.values() if kernel.suits(query, key, value, block))
    if kernel is KERNELS["plain"] and query.is_cuda:
        warn_of_plain_attention(
            block.softcap, block.slopes is not None, block.dropout, query.dtype, query.shape[3]
        )
    return kernel, block


def _masked(query: Tensor, key: Tensor, block: Block) -> Block:
    mask = dense_mask(query, key, block.mask, block.documents, block.causal, block.window, block.ahead)
    return replace(
        block, causal=block.causal and mask is None, mask=mask, documents=None, window=None, ahead=0
    )


@cache  # once for a process
def warn_of_plain_attention(
    softcap: float | None, alibi: bool, dropout: float, dtype: torch.dtype, head_dim: int
) -> None:
    """Warn once that no fused GPU kernel supports this attention."""
    warnings.warn(
        "attention runs without a fused kernel, with all scores in memory: no fused kernel supports softcap "
        f"{softcap}, {'ALiBi, ' * alibi}dropout {dropout}, {dtype} and head_dim {head_dim} together; a compiled model "
        "without dropout in bf16 is faster",
        stacklevel=2,
    )
