"""Gated delta rule (Yang, Kautz and Hatamizadeh 2024): linear attention with one state matrix per head.

A token with key k and value v updates the state S, [key, value]. S decays by α; then a fraction β of what k reads from
it is replaced by v. The query q reads the result:

     S_t = α_t S_{t-1} + k_t ⊗ β_t (v_t − α_t S_{t-1}ᵀ k_t),        o_t = S_tᵀ q_t

Token by token this is a chain of small products. In chunks of C tokens (Yang et al. 2024, the WY form) it becomes
matmuls. Let G be the running sum of log α in a chunk and Γ_ij = exp(G_i − G_j). From a zero initial state, the chunk
writes U = (I + tril(β K Kᵀ ⊙ Γ, −1))⁻¹ β V. For an initial state S, W S is subtracted, where W = (I + tril(β K Kᵀ ⊙ Γ,
−1))⁻¹ β e^G K. Then

     V' = U − W S,      O = e^G Q S + tril(Q Kᵀ ⊙ Γ) V',      S ← e^{G_C} S + (e^{G_C − G} K)ᵀ V'

In packed sequences no document reads the state of another.

With a decay per channel of the key (Kimi Delta Attention, Kimi Team 2025) α is a vector that multiplies the rows of S,
e^G and e^{G_C − G} multiply Q and K elementwise, and β K Kᵀ ⊙ Γ becomes β Σ_d K_id K_jd Γ_ijd (`decayed_products`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from megalith.ops.chunks import CHUNK, ORDINARY, ChunkMath, document_masks, in_chunks, pair_decays

BLOCK = 16  # tokens between which decays per channel are computed one pair at a time; a divisor of CHUNK


def gated_delta_rule(
    query: Tensor,  # [batch, seq, key heads, key size]
    key: Tensor,
    value: Tensor,  # [batch, seq, value heads, value size]; value heads is a multiple of key heads
    decay: Tensor,  # float32 [batch, seq, value heads], or [..., key size] per channel: log α, at most 0
    share: Tensor,  # [batch, seq, value heads]: β, 0 to 2
    documents: Tensor | None = None,  # int [batch, seq], document number of each token; None: a single one
) -> Tensor:
    """Return the outputs [batch, seq, value heads, value size] in value's dtype, computed in fp32.

    Queries are normalized to length 1 / √size, keys to length 1. Only the arguments are saved; the backward pass
    recomputes everything else.
    """
    args = query, key, value, decay, share, documents
    if not torch.is_grad_enabled():
        return with_last_state(*args)[0]
    return checkpoint(with_last_state, *args, use_reentrant=False, preserve_rng_state=False)[0]


def with_last_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    share: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    state_documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `gated_delta_rule` and the final state, float32 [batch, value heads, key size, value size].

    See `with_states` for the arguments.
    """
    out, states = with_states(query, key, value, decay, share, documents, state, state_documents)
    return out, states[:, :, -1]


def with_states(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    share: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    state_documents: Tensor | None = None,
    math: ChunkMath = ORDINARY,
) -> tuple[Tensor, Tensor]:
    """Return the result of `gated_delta_rule` and the states before each chunk and at the end, float32 [batch, value
    heads, chunks + 1, key size, value size].

    Tokens with decay and share 0 leave the state unchanged.

    Args:
        state: the initial state. It may have columns beyond the value size, which are not written to. None: zeros.
        state_documents: int [batch], document that the initial state belongs to; None: the first token's document.
        math: functions to compute with.
    """
    seq, heads, size = value.shape[1:]
    sharing = heads // key.shape[2]
    query, key = (_unit(x, math).repeat_interleave(sharing, dim=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    chunks = -(-seq // CHUNK)
    q, k, v, g, beta = (in_chunks(x.float(), chunks) for x in (query, key, value, decay, share))
    beta = beta[..., None]  # [batch, heads, chunks, C, 1]
    per_channel = g.dim() == 5
    total = math.cumsum(g, 3)  # G
    same = reads = writes = keeps = None
    if documents is not None:
        same, reads, writes, keeps = document_masks(documents, chunks, state_documents)
    if per_channel:
        after, before = math.exp(_sums_after(g, math)), math.exp(total)  # e^{G_C − G}, e^G
        chunk_decay = math.exp(total[:, :, :, -1])[..., None]
    else:
        pairs, after = pair_decays(g, same, math)  # Γ, e^{G_C − G}
        before = math.exp(total)[..., None]
        chunk_decay = math.exp(total[..., -1])[..., None, None]
    if documents is not None:
        before, after, chunk_decay = before * reads, after * writes, chunk_decay * keeps
    if per_channel:
        system, inside = (decayed_products(x, k, g, same, math) for x in (k, q))
        system = beta * system
    else:
        system, inside = beta * math.matmul(k, k.mT) * pairs, math.matmul(q, k.mT) * pairs
    written = math.solve(system, torch.cat([beta * v, beta * before * k], dim=-1))
    u, w = written.split([size, k.shape[-1]], dim=-1)
    q, k = q * before, k * after
    if state is None:
        state = torch.zeros_like(u[:, :, 0, 0, None] * k[:, :, 0, 0, :, None])
    u = pad(u, (0, state.shape[-1] - size))
    scan = scan_chunks if math is ORDINARY else partial(_scan, math.matmul)
    out, states = scan(u, w, q, k, inside, chunk_decay, state)
    out = out[..., :size]
    return out.flatten(2, 3)[:, :, :seq].transpose(1, 2).to(value.dtype), states


def decayed_products(
    x: Tensor, k: Tensor, decay: Tensor, same: Tensor | None = None, math: ChunkMath = ORDINARY
) -> Tensor:
    """Return Σ_d x_id k_jd exp(G_id − G_jd) for the token pairs j ≤ i of each chunk, 0 for other pairs.

    No exponent is above 0. If k is in an earlier block than x, the exponent is split at the start of the block of x: x
    e^{G−G_start} times k e^{G_start−G}. Within a block the decay of every pair is computed separately.

    Args:
        x, k: float32 [batch, heads, chunks, C, size].
        decay: log α, of the same shape.
        same: pairs of tokens of the same document, bool [batch, 1, chunks, C, C]; None means all pairs.
        math: functions to compute with.

    Returns:
        float32 [batch, heads, chunks, C, C].
    """
    blocks = range(0, CHUNK, BLOCK)
    rows = []
    for start in blocks:
        block = slice(start, start + BLOCK)
        x_i, k_i, g_i = (y[:, :, :, block] for y in (x, k, decay))
        within = g_i[..., None, :, :].expand(
            *g_i.shape[:3], BLOCK, BLOCK, -1
        )  # [..., j, i, d], summed over i > j
        later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=x.device).triu(1)[..., None]
        within = math.cumsum(within.masked_fill(~later, 0), -2).transpose(-2, -3)
        products = math.sum(x_i[..., :, None, :] * k_i[..., None, :, :] * math.exp(within)).tril()
        parts = [products]
        if start:
            before = decay[:, :, :, :start]
            at_start = k[:, :, :, :start] * math.exp(_sums_after(before, math))
            from_start = x_i * math.exp(math.cumsum(g_i, 3))
            parts.insert(0, math.matmul(from_start, at_start.mT))
        if start + BLOCK < CHUNK:
            parts.append(products.new_zeros(*products.shape[:4], CHUNK - start - BLOCK))
        rows.append(torch.cat(parts, -1))
    pairs = torch.cat(rows, 3)
    return pairs if same is None else pairs * same


def _sums_after(decay: Tensor, math: ChunkMath) -> Tensor:
    """Return, for each token along dimension 3, the sum of the decays of the later tokens."""
    return math.cumsum(pad(decay[:, :, :, 1:], (0, 0, 0, 1)).flip(3), 3).flip(3)


def transition(
    key: Tensor, value: Tensor, decay: Tensor, share: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Return the linear map from the state before these tokens to the state after them.

    Returns:
        float32 [batch, value heads, key size, value size + key size]: two matrices side by side. The first is the state
        after these tokens if the state before them is 0. The second multiplies a state before them that belongs to the
        first token's document.
    """
    size, width = value.shape[-1], key.shape[-1]
    state = pad(torch.eye(width, device=key.device), (size, 0))
    state = state.expand(value.shape[0], value.shape[2], -1, -1)
    return with_last_state(key, key, value, decay, share, documents, state)[1]


@torch.library.custom_op("megalith::delta_chunks", mutates_args=())
def scan_chunks(
    u: Tensor,  # float32 [batch, heads, chunks, C, value size], as above
    w: Tensor,  # [batch, heads, chunks, C, key size]
    q: Tensor,  # likewise, e^G Q
    k: Tensor,  # likewise, e^{G_C − G} K
    inside: Tensor,  # [batch, heads, chunks, C, C]: tril(Q Kᵀ ⊙ Γ)
    chunk_decay: Tensor,  # [batch, heads, chunks, 1 or key size, 1]: e^{G_C}
    state: Tensor,  # [batch, heads, key size, value size]: S before the first chunk
) -> tuple[Tensor, Tensor]:
    """Scan the chunks in order. One operator, because compilers would unroll the loop over chunks.

    Returns:
        O [batch, heads, chunks, C, value size].
        S before each chunk and at the end, [batch, heads, chunks + 1, key size, value size].
    """
    return _scan(torch.matmul, u, w, q, k, inside, chunk_decay, state)


def _scan(
    matmul: Callable[[Tensor, Tensor], Tensor],
    u: Tensor,
    w: Tensor,
    q: Tensor,
    k: Tensor,
    inside: Tensor,
    chunk_decay: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    states, out = [state], []
    for i in range(u.shape[2]):
        new = u[:, :, i] - matmul(w[:, :, i], state)
        out.append(matmul(q[:, :, i], state) + matmul(inside[:, :, i], new))
        state = chunk_decay[:, :, i] * state + matmul(k[:, :, i].mT, new)
        states.append(state)
    return torch.stack(out, 2), torch.stack(states, 2)


@scan_chunks.register_fake
def _(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, inside: Tensor, chunk_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    batch, heads, chunks, _, size = u.shape
    return u.new_empty(u.shape), u.new_empty(batch, heads, chunks + 1, k.shape[-1], size)


@torch.library.custom_op("megalith::delta_chunks_backward", mutates_args=())
def scan_chunks_backward(
    grad_out: Tensor,
    u: Tensor,
    w: Tensor,
    q: Tensor,
    k: Tensor,
    inside: Tensor,
    chunk_decay: Tensor,
    states: Tensor,
    grad_states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of all inputs of `scan_chunks`."""
    grads: list[list[Tensor]] = [[] for _ in range(6)]
    grad_state = grad_states[:, :, -1]
    for i in reversed(range(u.shape[2])):
        g, state, w_i, inside_i, q_i, k_i = (x[:, :, i] for x in (grad_out, states, w, inside, q, k))
        new = u[:, :, i] - w_i @ state
        grad_new = inside_i.mT @ g + k_i @ grad_state
        chunk_grads = (
            grad_new,
            -grad_new @ state.mT,
            g @ state.mT,
            new @ grad_state.mT,
            g @ new.mT,
            (state * grad_state).sum(-1, keepdim=True).sum_to_size(chunk_decay[:, :, i].shape),
        )
        for grad, one in zip(grads, chunk_grads, strict=True):
            grad.append(one)
        grad_state = q_i.mT @ g - w_i.mT @ grad_new + chunk_decay[:, :, i] * grad_state
        grad_state = grad_state + grad_states[:, :, i]
    return *(torch.stack(grad[::-1], 2) for grad in grads), grad_state


@scan_chunks_backward.register_fake
def _(grad_out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return *(x.new_empty(x.shape) for x in inputs[:6]), inputs[6].new_empty(inputs[6][:, :, 0].shape)


def _keep(ctx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])


def _gradients(ctx, grad_out: Tensor, grad_states: Tensor | None) -> tuple[Tensor, ...]:
    saved = ctx.saved_tensors
    if grad_states is None:
        grad_states = torch.zeros((), device=saved[0].device).expand_as(saved[-1])
    if grad_out is None:
        grad_out = torch.zeros_like(saved[0])
    return scan_chunks_backward(grad_out, *saved, grad_states)


scan_chunks.register_autograd(_gradients, setup_context=_keep)


def next_token(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token from `state`. query and key are [batch, 1, heads, key size], value is [batch, 1, heads, value
    size].

    Returns the result and the new state (see `with_last_state`).
    """
    sharing = value.shape[2] // key.shape[2]
    q, k = (_unit(x[:, 0], ORDINARY).repeat_interleave(sharing, dim=1) for x in (query, key))
    decay = decay[:, 0].exp()
    state = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
    read = (state * k[..., None]).sum(-2)
    written = (value[:, 0].float() - read) * share[:, 0, :, None].float()
    state = state + k[..., None] * written[..., None, :]
    out = (state * q[..., None]).sum(-2) * q.shape[-1] ** -0.5
    return out[:, None].to(value.dtype), state


def _unit(x: Tensor, math: ChunkMath) -> Tensor:
    """Normalize x [..., size] to length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt(math.sum(x.square())[..., None] + 1e-6)
