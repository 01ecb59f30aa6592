"""Kernels for attention of a block of queries to a block of keys.

KERNELS is ordered by speed. Each kernel takes query [batch, heads, queries, head_dim] and key and value [batch, groups,
keys, head_dim]. It returns the output o and the log-sum-exp l, float32 [batch, heads, queries], -inf for a query that
sees no key. Every backward takes the merged o and l (attention_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.functional import pad

from megalith.compat import torch_operators as operators
from megalith.ops.documents import alibi_bias, cumulative_lengths
from megalith.ops.dropout import attention_keep_mask

Result = tuple[Tensor, Tensor, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


@dataclass(frozen=True)
class Block:
    """Masking, scaling and dropout of one block of attention scores."""

    causal: bool = False  # queries and keys are the same tokens: each sees keys up to itself
    # bool [batch, 1, queries, keys], True where a query sees a key; includes causality
    mask: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None  # ends of the queries' and the keys' (ops/documents.py)
    # maximum number of keys that a query sees, including its own; implies causality
    window: int | None = None
    ahead: int = 0  # with window: position of the last query minus that of the last key
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    scale: float | None = None  # of query · keyᵀ; None: 1 / √head_dim
    dropout: float = 0.0
    dropout_rows: Tensor | None = None  # int32 [batch, queries]: dropout keys of the queries
    key_positions: Tensor | None = None  # int64 [keys] in the full sequence, for dropout and ALiBi
    first_head: int = 0  # index of the first head in the layer, for dropout
    slopes: Tensor | None = None  # float32 [heads], of ALiBi
    query_positions: Tensor | None = None  # int64 [queries], for ALiBi

    @property
    def changes_scores(self) -> bool:
        return self.softcap is not None or self.slopes is not None


@dataclass(frozen=True)
class _Kernel:
    suits: Callable[[Tensor, Tensor, Tensor, Block], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Block], Result]
    backward: Callable[..., Gradients]


def _parameters(query: Tensor, key: Tensor, value: Tensor, block: Block) -> SDPAParams:
    return SDPAParams(
        query, key, value, block.mask, block.dropout, block.causal, query.shape[1] != key.shape[1]
    )


# cuDNN: GPU, fp16 and bf16, no mask; about twice as fast as flash on Hopper.


def _cudnn_suits(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    whole = block.mask is None and block.documents is None and block.window is None
    plain = query.is_cuda and whole and block.dropout == 0.0
    return plain and can_use_cudnn_attention(_parameters(query, key, value, block))


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    out, lse, *_ = operators.cudnn_attention(
        query, key, value, None, True, 0.0, block.causal, False, scale=block.scale
    )
    return out, lse.view(out.shape[:3]), None


def _cudnn_backward(grad, query, key, value, out, lse, random, block):
    if _cudnn_keeps_last_dimension(query.device):
        lse = lse[..., None]
    seed, offset = random
    sizes = query.shape[2], key.shape[2]
    saved = (query, key, value, out, lse, seed, offset, None, None, None, *sizes, 0.0, block.causal)
    return operators.cudnn_attention_backward(grad, *saved, scale=block.scale)


@cache
def _cudnn_keeps_last_dimension(device: torch.device) -> bool:
    """Return True if cuDNN returns l as [batch, heads, queries, 1]. This depends on the torch version."""
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return operators.cudnn_attention(x, x, x, None, True)[1].dim() == 4


# Flash: GPU, fp16 and bf16, no mask, but documents and windows, skipping masked blocks; uses its own random numbers for
# dropout. It takes tokens [batch, seq, heads, head_dim], or with documents [batch · seq, heads, head_dim], and then
# returns l [heads, batch · seq].


def _flash_suits(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    if not query.is_cuda or block.mask is not None or query.shape[3] % 8:
        return False
    if block.documents is not None and block.ahead:  # flash aligns windows with the ends of documents
        return False
    if block.ahead >= key.shape[2] and query.shape[2] > key.shape[2]:
        return (
            False  # flash limits `ahead` to the number of keys, which would hide some from the first queries
        )
    square = block.causal and block.window is None  # flash's check requires equal numbers of queries and keys
    return can_use_flash_attention(_parameters(query, key, value, replace(block, causal=square)))


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    tokens = [_tokens(x, block) for x in (query, key, value)]
    lengths, settings = _flash_settings(query, key, block)
    out, lse, random, *_ = operators.varlen_flash_attention(
        *tokens, *lengths, block.dropout, _is_causal(block), False, **settings
    )
    if block.documents is not None:
        out, lse = (
            out.unflatten(0, (query.shape[0], -1)),
            lse.unflatten(1, (query.shape[0], -1)).transpose(0, 1),
        )
        # Flash returns inf for a query that sees no key.
        lse = lse.masked_fill(lse == float("inf"), float("-inf"))
    return out.transpose(1, 2), lse, random.view(torch.int64) if block.dropout else None


def _flash_backward(grad, query, key, value, out, lse, random, block):
    tokens = [_tokens(x, block) for x in (grad, query, key, value, out)]
    if block.documents is not None:
        lse = lse.transpose(0, 1).flatten(1)
    lengths, settings = _flash_settings(query, key, block)
    random = random.view(torch.uint64)
    saved = (*tokens, lse.contiguous(), *lengths, block.dropout, _is_causal(block), random, random)
    gradients = operators.varlen_flash_attention_backward(*saved, **settings)
    if block.documents is not None:
        gradients = [x.unflatten(0, (query.shape[0], -1)) for x in gradients]
    return tuple(x.transpose(1, 2) for x in gradients)


def _tokens(x: Tensor, block: Block) -> Tensor:
    """Reshape [batch, heads, seq, head_dim] to flash's layout."""
    x = x.transpose(1, 2)
    return x if block.documents is None else x.flatten(0, 1)


def _is_causal(block: Block) -> bool:
    return block.causal or (block.window is not None and not block.ahead)


def _flash_settings(query: Tensor, key: Tensor, block: Block) -> tuple[tuple, dict[str, float | int | None]]:
    """Return cumulative and maximum lengths of queries and keys, and the settings scale and window."""
    lengths, longest = (None, None), (query.shape[2], key.shape[2])
    if block.documents is not None:
        lengths = tuple(cumulative_lengths(*x) for x in zip(block.documents, longest, strict=True))
    ahead, window = block.ahead, {}
    if block.window is not None:
        window = dict(window_size_left=block.window - 1 - ahead, window_size_right=ahead)
    return (*lengths, *longest), dict(scale=block.scale, **window)


# Memory-efficient: GPU, any dtype, masks. It needs a key head per query head, rows of the bias at multiples of 16
# elements, and l padded to a multiple of 32 queries.


def _efficient_suits(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    if not query.is_cuda or block.dropout:
        return False
    key, value = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))  # only shapes matter
    return can_use_efficient_attention(_parameters(query, key, value, block))


def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    key, value = (for_each_head(x, query) for x in (key, value))
    out, lse, *_ = operators.efficient_attention(
        query, key, value, _bias(query, block.mask), True, 0.0, block.causal, scale=block.scale
    )
    lse = lse[..., : query.shape[2]]
    if block.mask is not None:
        out, lse = _blank_unseeing(out, lse, block.mask)
    return out, lse, None


def _efficient_backward(grad, query, key, value, out, lse, random, block):
    groups = key.shape[1]
    key, value = (for_each_head(x, query) for x in (key, value))
    lse = pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    # The kernel reads o as [batch, queries, heads, head_dim] regardless of its strides.
    grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
    bias, (seed, offset) = _bias(query, block.mask), random
    needs_grad = [True, True, True, False]
    saved = (query, key, value, bias, out, lse, seed, offset, 0.0, needs_grad, block.causal)
    d_query, d_key, d_value, _ = operators.efficient_attention_backward(grad, *saved, scale=block.scale)
    return d_query, _sum_over_heads(d_key, groups), _sum_over_heads(d_value, groups)


def _bias(query: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    batch, _, queries, keys = mask.shape
    bias = query.new_zeros(batch, 1, queries, keys + -keys % 16)[..., :keys]
    return bias.masked_fill_(~mask, float("-inf")).expand(*query.shape[:2], -1, -1)


def _blank_unseeing(out: Tensor, lse: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Set o = 0 and l = -inf for queries that see no key of the block."""
    seeing = mask.any(-1)  # [batch, 1, queries]
    return torch.where(seeing[..., None], out, 0.0), torch.where(seeing, lse, float("-inf"))


# PyTorch's flash kernel for the CPU: no mask, no dropout.


def _cpu_suits(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    return query.device.type == "cpu" and block.mask is None and block.dropout == 0.0


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    out, lse = operators.cpu_attention(query, key, value, 0.0, block.causal, scale=block.scale)
    return out, lse, None


def _cpu_backward(grad, query, key, value, out, lse, random, block):
    return operators.cpu_attention_backward(
        grad, query, key, value, out, lse, 0.0, block.causal, scale=block.scale
    )


# The formula, for everything else, such as soft-capping. Its dropout is keyed by position.


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    scores = _scores(query, key, block)
    lse = scores.logsumexp(-1)
    probabilities = _probabilities(scores, lse)
    if block.dropout:
        probabilities = _drop(probabilities, block)
    return probabilities.to(value.dtype) @ for_each_head(value, query), lse, None


def _plain_backward(grad, query, key, value, out, lse, random, block):
    groups, dtype = key.shape[1], query.dtype
    scores = _scores(query, key, block)  # [batch, heads, queries, keys]
    probabilities = _probabilities(scores, lse)
    d_probabilities = (grad @ for_each_head(value, query).mT).float()
    dropped = probabilities
    if block.dropout:
        d_probabilities, dropped = _drop(d_probabilities, block), _drop(probabilities, block)
    softmax_term = (grad.float() * out.float()).sum(-1, keepdim=True)  # [batch, heads, queries, 1]
    d_scores = probabilities * (d_probabilities - softmax_term) * _scale(query, block)
    if block.softcap is not None:  # derivative of softcap · tanh(x / softcap); masked scores are -inf
        d_scores = d_scores * (1 - (scores.clamp(min=-block.softcap) / block.softcap).square())
    d_query = d_scores.to(dtype) @ for_each_head(key, query)
    d_key = d_scores.mT.to(dtype) @ query
    d_value = dropped.mT.to(dtype) @ grad
    return d_query, _sum_over_heads(d_key, groups), _sum_over_heads(d_value, groups)


def _scores(query: Tensor, key: Tensor, block: Block) -> Tensor:
    """Return scores, float32 [batch, heads, queries, keys], -inf where masked."""
    scores = (query @ for_each_head(key, query).mT).float() * _scale(query, block)
    if block.softcap is not None:
        scores = block.softcap * torch.tanh(scores / block.softcap)
    if block.slopes is not None:
        scores = scores + alibi_bias(block.slopes, block.query_positions, block.key_positions)
    mask = block.mask
    if mask is None and block.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask is None else scores.masked_fill_(~mask, float("-inf"))


def _scale(query: Tensor, block: Block) -> float:
    return query.shape[-1] ** -0.5 if block.scale is None else block.scale


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()


def _drop(x: Tensor, block: Block) -> Tensor:
    dropped = attention_keep_mask(
        block.dropout_rows, x.shape[1], block.key_positions, block.dropout, block.first_head
    )
    return torch.where(dropped, x / (1.0 - block.dropout), 0.0)


def for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values [batch, groups, keys, head_dim] for each query head."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) if query.shape[1] != x.shape[1] else x


def _sum_over_heads(grad: Tensor, groups: int) -> Tensor:
    """Sum a gradient over repeated heads, the inverse of `for_each_head`."""
    return grad.unflatten(1, (groups, -1)).sum(2) if grad.shape[1] != groups else grad


KERNELS = {
    "cudnn": _Kernel(_cudnn_suits, _cudnn_forward, _cudnn_backward),
    "flash": _Kernel(_flash_suits, _flash_forward, _flash_backward),
    "efficient": _Kernel(_efficient_suits, _efficient_forward, _efficient_backward),
    "cpu": _Kernel(_cpu_suits, _cpu_forward, _cpu_backward),
    "plain": _Kernel(lambda *_: True, _plain_forward, _plain_backward),
}
