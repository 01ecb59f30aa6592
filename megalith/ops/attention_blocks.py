"""Attention in blocks: some queries against some keys, with the log-sum-exp that puts the blocks together.

A query's softmax over many keys can be taken a block of keys at a time (Dao et al. 2022; Liu et al. 2023). A block
gives its own result o and, for each query, the log l of the sum of its exponentials. Two blocks merge into

    l = log(exp(l₁) + exp(l₂))        o = o₁ · exp(l₁ − l) + o₂ · exp(l₂ − l)

Backward, the gradient through a block needs nothing of the others but the merged o and l: the probabilities are
exp(scores − l), and the softmax's own term is the sum of o · grad over head_dim. So every kernel here that PyTorch has
for whole attention serves for blocks, when its backward is fed the merged o and l.

A sink (Xiao et al. 2023, as gpt-oss learns it) is a score of each head that every query has beside its keys', of
nothing: a block of one key whose value is 0. So it merges as a block does, with l₂ the sink and o₂ = 0, and backward
the kernels are fed that o and l; of the sink itself the gradient is −exp(sink − l) · o · grad, summed.

Kernels stand in a literal table, the fastest first. Each takes query [batch, heads, queries, head_dim] and key and
value [batch, groups, keys, head_dim], and l is float32 [batch, heads, queries], -inf for a query that sees no key.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from threading import local

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.functional import pad

from megalith.ops.documents import alibi_bias, cumulative_lengths, dense_mask, of_queries_and_keys
from megalith.ops.dropout import attention_keep_mask

_aten = torch.ops.aten

Result = tuple[Tensor, Tensor, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


@dataclass(frozen=True)
class Block:
    """What the queries of a block may see, and what is dropped of it."""

    causal: bool = False  # the keys are the queries' own tokens: each sees those up to itself
    mask: Tensor | None = None  # bool [batch, 1, queries, keys], True where a query may look, causal included
    documents: tuple[Tensor, Tensor] | None = (
        None  # the ends of the queries' and of the keys' (ops/documents.py)
    )
    window: int | None = (
        None  # the keys that a query sees at most, its own included: causal. The last query's place
    )
    ahead: int = 0  # is so many behind the last key's
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    scale: float | None = None  # of query · keyᵀ; None: 1 / √head_dim
    dropout: float = 0.0
    dropout_rows: Tensor | None = None  # int32 [batch, queries]: what the mask of dropout depends on,
    key_positions: Tensor | None = None  # int64 [keys]: the keys' places in the whole sequence,
    first_head: int = 0  # and the number of the first head among all
    slopes: Tensor | None = None  # float32 [heads], of ALiBi, which depends on the keys' places and on
    query_positions: Tensor | None = None  # the queries', int64 [queries]

    @property
    def changes_scores(self) -> bool:
        return self.softcap is not None or self.slopes is not None


def block_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    """(o, l, the state int64 [2] of the kernel's random numbers, or None where it draws none)."""
    kernel, block = _chosen(query, key, value, block)
    return kernel.forward(query, key, value, block)


def block_backward(
    grad: Tensor,  # of the merged o
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,  # merged o, in the dtype of query
    lse: Tensor,  # merged l
    random: Tensor,  # int64 [2], as block_forward gave it; anything where it gave None
    block: Block,
) -> Gradients:
    """Gradients of query, key and value through this block."""
    lse = lse.contiguous()
    kernel, block = _chosen(query, key, value, block)
    return kernel.backward(grad, query, key, value, out, lse, random, block)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges a block into the running float32 `out` and `lse`, in place. Every query has seen a key before."""
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None])
    torch.logaddexp(lse, block_lse, out=lse)


@dataclass(frozen=True)
class _Kernel:
    suits: Callable[[Tensor, Tensor, Tensor, Block], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Block], Result]
    backward: Callable[..., Gradients]


def _chosen(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[_Kernel, Block]:
    """The first kernel that suits, and the block as it takes it: all but two know documents and windows as a mask."""
    if not block.changes_scores:
        for name in ("cudnn", "flash"):
            if KERNELS[name].suits(query, key, value, block):
                return KERNELS[name], block
    block = _masked(query, key, block)
    kernel = KERNELS["plain"]
    if not block.changes_scores:
        kernel = next(kernel for kernel in KERNELS.values() if kernel.suits(query, key, value, block))
    if kernel is KERNELS["plain"] and query.is_cuda:
        asked = block.softcap, block.slopes is not None, block.dropout
        warn_of_plain_attention(*asked, query.dtype, query.shape[3])
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
    """Says that attention on a GPU has no fused kernel for what is asked of it."""
    warnings.warn(
        f"attention runs without a fused kernel, every score in memory: none takes softcap {softcap}, "
        f"{'ALiBi, ' * alibi}dropout {dropout}, {dtype} and head_dim {head_dim} here; a model without dropout, "
        "compiled, in bf16 is faster",
        stacklevel=2,
    )


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
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, block.causal, False, scale=block.scale
    )
    return out, lse.view(out.shape[:3]), None


def _cudnn_backward(grad, query, key, value, out, lse, random, block):
    if _cudnn_keeps_last_dimension(query.device):
        lse = lse[..., None]
    seed, offset = random
    sizes = query.shape[2], key.shape[2]
    saved = (query, key, value, out, lse, seed, offset, None, None, None, *sizes, 0.0, block.causal)
    return _aten._scaled_dot_product_cudnn_attention_backward(grad, *saved, scale=block.scale)


@cache
def _cudnn_keeps_last_dimension(device: torch.device) -> bool:
    """Whether l is [batch, heads, queries, 1], which depends on torch's version."""
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return _aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].dim() == 4


# Flash: GPU, fp16 and bf16, no mask, but documents and windows, of which it skips what is closed; draws its own
# dropout. It takes tokens [batch, seq, heads, head_dim], or in documents [batch · seq, heads, head_dim], where it has
# l [heads, batch · seq].


def _flash_suits(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    if not query.is_cuda or block.mask is not None or query.shape[3] % 8:
        return False
    if block.documents is not None and block.ahead:  # it counts a window from where a document ends in either
        return False
    if block.ahead >= key.shape[2] and query.shape[2] > key.shape[2]:
        return False  # it cuts `ahead` to the number of keys, which then closes some to the first queries
    square = block.causal and block.window is None  # what it asks of all others: as many keys as queries
    return can_use_flash_attention(_parameters(query, key, value, replace(block, causal=square)))


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    tokens = [_tokens(x, block) for x in (query, key, value)]
    lengths, settings = _flash_settings(query, key, block)
    out, lse, random, *_ = _aten._flash_attention_forward(
        *tokens, *lengths, block.dropout, _is_causal(block), False, **settings
    )
    if block.documents is not None:
        out, lse = (
            out.unflatten(0, (query.shape[0], -1)),
            lse.unflatten(1, (query.shape[0], -1)).transpose(0, 1),
        )
        lse = lse.masked_fill(
            lse == float("inf"), float("-inf")
        )  # of a query that sees no key, as it tells it
    return out.transpose(1, 2), lse, random.view(torch.int64) if block.dropout else None


def _flash_backward(grad, query, key, value, out, lse, random, block):
    tokens = [_tokens(x, block) for x in (grad, query, key, value, out)]
    if block.documents is not None:
        lse = lse.transpose(0, 1).flatten(1)
    lengths, settings = _flash_settings(query, key, block)
    random = random.view(torch.uint64)
    saved = (*tokens, lse.contiguous(), *lengths, block.dropout, _is_causal(block), random, random)
    gradients = _aten._flash_attention_backward(*saved, **settings)
    if block.documents is not None:
        gradients = [x.unflatten(0, (query.shape[0], -1)) for x in gradients]
    return tuple(x.transpose(1, 2) for x in gradients)


def _tokens(x: Tensor, block: Block) -> Tensor:
    """[batch, heads, seq, head_dim] as flash takes it."""
    x = x.transpose(1, 2)
    return x if block.documents is None else x.flatten(0, 1)


def _is_causal(block: Block) -> bool:
    return block.causal or (block.window is not None and not block.ahead)


def _flash_settings(query: Tensor, key: Tensor, block: Block) -> tuple[tuple, dict[str, float | int | None]]:
    """Cumulative and longest lengths of the queries and the keys; scale and window."""
    lengths, longest = (None, None), (query.shape[2], key.shape[2])
    if block.documents is not None:
        lengths = tuple(cumulative_lengths(*x) for x in zip(block.documents, longest, strict=True))
    ahead, window = block.ahead, {}
    if block.window is not None:
        window = dict(window_size_left=block.window - 1 - ahead, window_size_right=ahead)
    return (*lengths, *longest), dict(scale=block.scale, **window)


# Memory-efficient: GPU, any dtype, masks. It wants a head of keys for each head of queries, rows of the bias at
# multiples of 16 elements, and l padded to a multiple of 32 queries.


def _efficient_suits(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    if not query.is_cuda or block.dropout:
        return False
    key, value = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))  # the shapes alone
    return can_use_efficient_attention(_parameters(query, key, value, block))


def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    key, value = (for_each_head(x, query) for x in (key, value))
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
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
    # It reads o as [batch, queries, heads, head_dim] whatever its strides say: another order gives wrong gradients.
    grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
    bias, (seed, offset) = _bias(query, block.mask), random
    wanted = [True, True, True, False]
    saved = (query, key, value, bias, out, lse, seed, offset, 0.0, wanted, block.causal)
    d_query, d_key, d_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, *saved, scale=block.scale
    )
    return d_query, _of_groups(d_key, groups), _of_groups(d_value, groups)


def _bias(query: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    batch, _, queries, keys = mask.shape
    bias = query.new_zeros(batch, 1, queries, keys + -keys % 16)[..., :keys]
    return bias.masked_fill_(~mask, float("-inf")).expand(*query.shape[:2], -1, -1)


def _blank_unseeing(out: Tensor, lse: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """o = 0 and l = -inf where a query sees no key of the block, whatever the kernel gave."""
    seeing = mask.any(-1)  # [batch, 1, queries]
    return torch.where(seeing[..., None], out, 0.0), torch.where(seeing, lse, float("-inf"))


# PyTorch's flash kernel for the CPU: no mask, no dropout.


def _cpu_suits(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    return query.device.type == "cpu" and block.mask is None and block.dropout == 0.0


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Result:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, block.causal, scale=block.scale
    )
    return out, lse, None


def _cpu_backward(grad, query, key, value, out, lse, random, block):
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, block.causal, scale=block.scale
    )


# The formula, for whatever the others leave, as soft-capping is. Its dropout is keyed by place, as one process's is.


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
    kept = probabilities
    if block.dropout:
        d_probabilities, kept = _drop(d_probabilities, block), _drop(probabilities, block)
    softmax_term = (grad.float() * out.float()).sum(-1, keepdim=True)  # [batch, heads, queries, 1]
    d_scores = probabilities * (d_probabilities - softmax_term) * _scale(query, block)
    if block.softcap is not None:  # the slope of softcap · tanh(x / softcap); a masked score is -inf
        d_scores = d_scores * (1 - (scores.clamp(min=-block.softcap) / block.softcap).square())
    d_query = d_scores.to(dtype) @ for_each_head(key, query)
    d_key = d_scores.mT.to(dtype) @ query
    d_value = kept.mT.to(dtype) @ grad
    return d_query, _of_groups(d_key, groups), _of_groups(d_value, groups)


def _scores(query: Tensor, key: Tensor, block: Block) -> Tensor:
    """float32 [batch, heads, queries, keys], -inf where a query may not look."""
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
    kept = attention_keep_mask(
        block.dropout_rows, x.shape[1], block.key_positions, block.dropout, block.first_head
    )
    return torch.where(kept, x / (1.0 - block.dropout), 0.0)


def for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values [batch, groups, keys, head_dim] repeated for each head of queries."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) if query.shape[1] != x.shape[1] else x


def _of_groups(grad: Tensor, groups: int) -> Tensor:
    """The gradient of what for_each_head repeated."""
    return grad.unflatten(1, (groups, -1)).sum(2) if grad.shape[1] != groups else grad


KERNELS = {
    "cudnn": _Kernel(_cudnn_suits, _cudnn_forward, _cudnn_backward),
    "flash": _Kernel(_flash_suits, _flash_forward, _flash_backward),
    "efficient": _Kernel(_efficient_suits, _efficient_forward, _efficient_backward),
    "cpu": _Kernel(_cpu_suits, _cpu_forward, _cpu_backward),
    "plain": _Kernel(lambda *_: True, _plain_forward, _plain_backward),
}


# Attention as one block: what the kernels above do that torch's own function gives to none but its slowest. Between
# the passes it keeps neither repeated heads nor a bias, and no mask of a window or of documents. Where a pass is
# recomputed, its results can be those of the first time.


class _Recomputation(local):
    """What this thread is in: a pass that saves what block_attention gives, or the recomputation that takes it."""

    saves: deque[tuple[Tensor, Tensor]] | None = None
    takes: deque[tuple[Tensor, Tensor]] | None = None


_recomputation = _Recomputation()


def attention_saved() -> tuple[AbstractContextManager, AbstractContextManager]:
    """torch.utils.checkpoint's contexts of a pass and of its recomputation, in which every block_attention gives what
    it gave in the pass. Operators inside of compiled code are seen too."""
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
    mask: Tensor | None,  # bool [batch or 1, 1, queries, keys], True where a query may look
    documents: Tensor | None,  # as ops.documents.of_queries_and_keys takes them
    causal: bool,
    window: int | None,  # as ops.attention.attention has it, with or without a mask
    scale: float,
) -> tuple[Tensor, Tensor]:
    """softmax(scale · query · keyᵀ) · value [batch, heads, queries, head_dim], and its log-sum-exp float32 [batch,
    heads, queries]."""
    if _recomputation.takes is not None:
        return _recomputation.takes.popleft()
    out, lse, _ = block_forward(query, key, value, _whole(mask, documents, causal, window, scale))
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
    """Gradients of query, key and value."""
    block = _whole(mask, documents, causal, window, scale)
    no_state = torch.zeros(2, dtype=torch.int64, device=query.device)
    gradients = block_backward(grad, query, key, value, out, lse, no_state, block)
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients)


@block_attention_backward.register_fake
def _(grad, query, key, value, *rest):
    shapes = [x.transpose(1, 2).shape for x in (query, key, value)]
    return tuple(query.new_empty(shape).transpose(1, 2) for shape in shapes)


def _whole(
    mask: Tensor | None, documents: Tensor | None, causal: bool, window: int | None, scale: float
) -> Block:
    return Block(causal and mask is None, mask, of_queries_and_keys(documents), window, scale=scale)


def _save(ctx, inputs, output) -> None:
    query, key, value, mask, documents, *ctx.plain = inputs
    ctx.save_for_backward(query, key, value, *output, mask, documents)


def _gradients(ctx, grad: Tensor, _lse: None):
    return *block_attention_backward(grad, *ctx.saved_tensors, *ctx.plain), *[None] * 5


block_attention.register_autograd(_gradients, setup_context=_save)


def beside_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """o [batch, heads, queries, head_dim] and l merged with the scores sink, float32 [heads] or [heads, queries], of
    nothing."""
    sink = sink[:, None] if sink.dim() == 1 else sink
    return out * torch.sigmoid(lse - sink)[..., None].to(out.dtype), torch.logaddexp(lse, sink)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """That of the sink, float32 [heads], where grad is that of the merged `out`, and `lse` merged as well."""
    share = (sink[:, None] - lse).exp()  # [batch, heads, queries]
    return -(share * (grad.float() * out.float()).sum(-1)).sum((0, 2))


class SinkAttention(torch.autograd.Function):
    """block_attention with a sink float32 [heads]: its result alone."""

    @staticmethod
    def forward(ctx, sink: Tensor, query: Tensor, key: Tensor, value: Tensor, *settings) -> Tensor:
        out, lse = beside_sink(*block_attention(query, key, value, *settings), sink)
        mask, documents, *ctx.plain = settings
        ctx.save_for_backward(sink, query, key, value, out, lse, mask, documents)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        sink, *saved = ctx.saved_tensors
        of_sink = sink_gradient(grad, saved[3], saved[4], sink)
        return of_sink, *block_attention_backward(grad, *saved, *ctx.plain), *[None] * 5
