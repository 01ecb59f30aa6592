"""State space model of Mamba-2 (SSD, Dao and Gu 2024): a recurrence with one state matrix per head.

A token with input x [head size], step size Δ and vectors b and c [state size] updates the state S [state size, head
size]. S decays by α = e^{−AΔ}; then Δ b ⊗ x is written, and c reads the result:

     S_t = α_t S_{t-1} + Δ_t b_t ⊗ x_t,        y_t = S_tᵀ c_t + D x_t

Heads of a group share b and c. Unrolled, y_i = Σ_{j ≤ i} (Π_{j < k ≤ i} α_k) (c_i · b_j) Δ_j x_j: attention without a
softmax, whose mask is a product of decays. In chunks of C tokens this becomes matmuls (Dao and Gu, section 6). Let G be
the running sum of log α in a chunk, Γ_ij = exp(G_i − G_j) for j ≤ i and 0 otherwise, and X the rows Δ x. With S the
state before the chunk

     Y = (C Bᵀ ⊙ Γ) X + e^G C S,        S ← e^{G_C} S + Bᵀ (e^{G_C − G} X)

The first term of Y and what a chunk writes do not depend on S, so only the states are computed one after another. In
packed sequences no document reads the state of another.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from megalith.ops.chunks import CHUNK, ORDINARY, ChunkMath, document_masks, in_chunks, pair_decays


def state_space(
    x: Tensor,  # [batch, seq, heads, head size]
    step: Tensor,  # float32 [batch, seq, heads]: Δ, at least 0
    decay: Tensor,  # float32 [batch, seq, heads]: log α, at most 0
    b: Tensor,  # [batch, seq, groups, state size]; groups divides heads
    c: Tensor,  # [batch, seq, groups, state size]
    skip: Tensor,  # float32 [heads]: D
    documents: Tensor | None = None,  # int [batch, seq], document number of each token; None: a single one
) -> Tensor:
    """Compute the state space recurrence. Returns [batch, seq, heads, head size] in x's dtype, computed in fp32.

    The forward pass saves only the arguments. The backward pass recomputes everything else.
    """
    args = x, step, decay, b, c, skip, documents
    if not torch.is_grad_enabled():
        return with_last_state(*args)[0]
    return checkpoint(with_last_state, *args, use_reentrant=False, preserve_rng_state=False)[0]


def with_last_state(
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    state_documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `state_space` and the final state, float32 [batch, heads, state size, head size].

    See `with_states` for the arguments.
    """
    out, states = with_states(x, step, decay, b, c, skip, documents, state, state_documents)
    return out, states[:, :, -1]


def with_states(
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    state_documents: Tensor | None = None,
    math: ChunkMath = ORDINARY,
) -> tuple[Tensor, Tensor]:
    """Return the result of `state_space` and the states before each chunk and at the end, float32 [batch, heads,
    chunks + 1, state size, head size].

    Tokens with step and decay 0 leave the state unchanged.

    Args:
        state: the initial state; None means zeros.
        state_documents: int [batch], document that the initial state belongs to; None: the first token's document.
        math: functions to compute with.
    """
    seq, groups = x.shape[1], b.shape[2]
    chunks = -(-seq // CHUNK)
    wide = x.float()
    inputs, g, b, c = (
        in_chunks(y.float(), chunks) for y in (wide * step[..., None], decay, b, c)
    )  # [batch, heads or groups, chunks, C, ...]
    same = reads = writes = keeps = None
    if documents is not None:
        same, reads, writes, keeps = document_masks(documents, chunks, state_documents)
    pairs, after = pair_decays(g, same, math)  # Γ, e^{G_C − G}
    total = math.cumsum(g, -1)  # G
    before, chunk_decay = math.exp(total)[..., None], math.exp(total[..., -1])[..., None, None]
    if documents is not None:
        before, after, chunk_decay = before * reads, after * writes, chunk_decay * keeps

    def by_group(y: Tensor) -> Tensor:  # [batch, groups, heads of a group, chunks, ...]
        return y.unflatten(1, (groups, -1))

    b, c = b[:, :, None], c[:, :, None]
    written = math.matmul(b.mT, by_group(after * inputs))
    written = written.flatten(1, 2)  # [batch, heads, chunks, state size, head size]
    if state is None:
        state = torch.zeros_like(written[:, :, 0])
    scan = scan_states if math is ORDINARY else _scan
    states = scan(written, chunk_decay, state)
    inside = math.matmul(math.matmul(c, b.mT) * by_group(pairs), by_group(inputs))
    out = inside + by_group(before) * math.matmul(c, by_group(states[:, :, :-1]))
    out = out.flatten(1, 2).flatten(2, 3)[:, :, :seq].transpose(1, 2)
    return (out + skip[:, None] * wide).to(x.dtype), states


def _scan(written: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """Compute `scan_states` with a multiplication and an addition that are rounded separately."""
    states = [state]
    for i in range(written.shape[2]):
        states.append(decay[:, :, i] * states[-1] + written[:, :, i])
    return torch.stack(states, 2)


def transition(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the linear map from the state before these tokens to the state after them.

    Returns:
        The state after these tokens if the state before them is 0, float32 [batch, heads, state size, head size]. The
        factor that multiplies a state before them, if that belongs to the first token's document, float32 [batch,
        heads, 1, 1].
    """
    chunks, groups = -(-x.shape[1] // CHUNK), b.shape[2]
    inputs, g, b = (in_chunks(y.float(), chunks) for y in (x.float() * step[..., None], decay, b))
    after = pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1).exp()[..., None]  # e^{G_C − G}
    chunk_decay, total = g.sum(-1).exp()[..., None, None], decay.sum(1).exp()[..., None, None]
    if documents is not None:
        _, _, writes, keeps = document_masks(documents, chunks)
        after, chunk_decay = after * writes, chunk_decay * keeps
        total = total * (documents[:, :1] == documents[:, -1:])[..., None, None]
    written = b.mT[:, :, None] @ (after * inputs).unflatten(1, (groups, -1))
    written = written.flatten(1, 2)
    return scan_states(written, chunk_decay, torch.zeros_like(written[:, :, 0]))[:, :, -1], total


@torch.library.custom_op("megalith::scan_states", mutates_args=())
def scan_states(written: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """Return the states S_0 = state, S_{i+1} = decay_i · S_i + written_i. One operator, because compilers would unroll
    the loop over chunks.

    Args:
        written: float32 [batch, heads, chunks, key size, value size].
        decay: float32 [batch, heads, chunks, 1, 1].
        state: float32 [batch, heads, ·, ·].

    Returns:
        float32 [batch, heads, chunks + 1, ·, ·].
    """
    batch, heads, chunks, *size = written.shape
    states = written.new_empty(batch, heads, chunks + 1, *size)
    states[:, :, 0] = state
    for i in range(chunks):
        torch.addcmul(written[:, :, i], decay[:, :, i], states[:, :, i], out=states[:, :, i + 1])
    return states


@scan_states.register_fake
def _(written: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    batch, heads, chunks, *size = written.shape
    return written.new_empty(batch, heads, chunks + 1, *size)


@torch.library.custom_op("megalith::scan_states_backward", mutates_args=())
def scan_states_backward(grad: Tensor, decay: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of written, decay and state from `grad`, the gradient of the returned states."""
    grad_written = torch.empty_like(states[:, :, 1:])
    carried = grad[:, :, -1]
    for i in reversed(range(decay.shape[2])):
        grad_written[:, :, i] = carried
        carried = torch.addcmul(grad[:, :, i], decay[:, :, i], carried)
    grad_decay = (grad_written * states[:, :, :-1]).sum((-2, -1), keepdim=True)
    return grad_written, grad_decay, carried.clone()


@scan_states_backward.register_fake
def _(grad: Tensor, decay: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(states[:, :, 1:]),
        decay.new_empty(decay.shape),
        states.new_empty(states[:, :, 0].shape),
    )


def _keep(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], output)


def _gradients(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    return scan_states_backward(grad, *ctx.saved_tensors)


scan_states.register_autograd(_gradients, setup_context=_keep)


def next_token(
    state: Tensor, x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token, [batch, 1, heads, head size], from `state`.

    Returns the result and the new state (see `with_last_state`).
    """
    sharing = x.shape[2] // b.shape[2]
    b, c = (y[:, 0].float().repeat_interleave(sharing, dim=1) for y in (b, c))  # [batch, heads, state size]
    wide = x[:, 0].float()
    written = b[..., None] * (wide * step[:, 0, :, None])[..., None, :]
    state = state * decay[:, 0, :, None, None].exp() + written
    out = (state * c[..., None]).sum(-2) + skip[:, None] * wide
    return out[:, None].to(x.dtype), state
