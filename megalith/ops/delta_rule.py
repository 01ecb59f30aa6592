"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024): attention whose memory is one matrix a head.

A token's key k and value v change the state S, [key, value], after all of it has decayed by α: what k reads of it is
replaced by a share β of v. Its query q reads the result.

    S_t = α_t S_{t-1} + k_t ⊗ β_t (v_t − α_t S_{t-1}ᵀ k_t),        o_t = S_tᵀ q_t

Token by token that is a chain of small products. By chunks of C tokens (Yang et al. 2024, the WY form) it is matmuls:
with G the running sum of log α in a chunk and Γ_ij = exp(G_i − G_j), what the tokens of a chunk write, had the state
before it been nothing, are U, the rows of (I + tril(β K Kᵀ ⊙ Γ, −1))⁻¹ β V, and what they take back of that state is W
S with W made in the same way of β e^G K. Then

    V' = U − W S,      O = e^G Q S + tril(Q Kᵀ ⊙ Γ) V',      S ← e^{G_C} S + (e^{G_C − G} K)ᵀ V'

Documents stand one behind the other in a sequence: nothing that stands in a state from another document is read, and
nothing of it is left behind the first token of the next.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad
from torch.utils.checkpoint import checkpoint

CHUNK = 64


def gated_delta_rule(
    query: Tensor,  # [batch, seq, key heads, key size]
    key: Tensor,
    value: Tensor,  # [batch, seq, value heads, value size]; as many share a key head as there are more of them
    decay: Tensor,  # float32 [batch, seq, value heads]: log α, at most 0
    share: Tensor,  # [batch, seq, value heads]: β, 0 to 1
    documents: Tensor | None = None,  # int [batch, seq], the number of each token's; None: one
) -> Tensor:
    """What the queries, of length 1 / √size, read with keys of length 1: [batch, seq, value heads, value size] in
    value's dtype, computed in fp32. The backward pass computes all but the arguments anew."""
    given = query, key, value, decay, share, documents
    if not torch.is_grad_enabled():
        return with_last_state(*given)[0]
    return checkpoint(with_last_state, *given, use_reentrant=False, preserve_rng_state=False)[0]


def with_last_state(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As gated_delta_rule, and the state behind the last token: float32 [batch, value heads, key size, value size]. A
    token of decay and share 0 leaves it as it is."""
    seq, heads, size = value.shape[1:]
    sharing = heads // key.shape[2]
    query, key = (_unit(x).repeat_interleave(sharing, dim=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    chunks = -(-seq // CHUNK)
    q, k, v, g, beta = (_in_chunks(x.float(), chunks) for x in (query, key, value, decay, share))
    beta = beta[..., None]  # [batch, heads, chunks, C, 1]
    total = g.cumsum(-1)  # G
    sees = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # Sums of what lies between, not differences of G, in which the nearest tokens would lose the most digits.
    within = g[..., None].expand(*g.shape, CHUNK).masked_fill(~sees.tril(-1), 0).cumsum(-2)
    reads = writes = keeps = None
    if documents is not None:
        same, reads, writes, keeps = _document_masks(documents, chunks)
        sees = sees & same
    pairs = within.masked_fill(~sees, float("-inf")).exp()  # Γ
    before, after = total.exp()[..., None], within[..., -1, :, None].exp()
    whole = total[..., -1].exp()[..., None, None]
    if documents is not None:
        before, after, whole = before * reads, after * writes, whole * keeps
    system = beta * (k @ k.mT) * pairs
    written = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * before * k], dim=-1), upper=False, unitriangular=True
    )
    u, w = written.split([size, k.shape[-1]], dim=-1)
    inside, q, k = (q @ k.mT) * pairs, q * before, k * after
    out, states = scan_chunks(u, w, q, k, inside, whole)
    return out.flatten(2, 3)[:, :, :seq].transpose(1, 2).to(value.dtype), states[:, :, -1]


@torch.library.custom_op("megalith::delta_chunks", mutates_args=())
def scan_chunks(
    u: Tensor,  # float32 [batch, heads, chunks, C, value size], as above
    w: Tensor,  # [batch, heads, chunks, C, key size]
    q: Tensor,  # likewise, e^G Q
    k: Tensor,  # likewise, e^{G_C − G} K
    inside: Tensor,  # [batch, heads, chunks, C, C]: tril(Q Kᵀ ⊙ Γ)
    whole: Tensor,  # [batch, heads, chunks, 1, 1]: e^{G_C}
) -> tuple[Tensor, Tensor]:
    """O [batch, heads, chunks, C, value size], and S before each chunk and behind the last: [batch, heads, chunks + 1,
    key size, value size]. One operator, for compilers would write the chunks out one after the other."""
    state = u.new_zeros(*u.shape[:2], k.shape[-1], u.shape[-1])
    states, out = [state], []
    for i in range(u.shape[2]):
        new = u[:, :, i] - w[:, :, i] @ state
        out.append(q[:, :, i] @ state + inside[:, :, i] @ new)
        state = whole[:, :, i] * state + k[:, :, i].mT @ new
        states.append(state)
    return torch.stack(out, 2), torch.stack(states, 2)


@scan_chunks.register_fake
def _(u: Tensor, w: Tensor, q: Tensor, k: Tensor, inside: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
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
    whole: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of all but the states, where nothing is made of those."""
    grads: list[list[Tensor]] = [[] for _ in range(6)]
    grad_state = torch.zeros_like(states[:, :, 0])
    for i in reversed(range(u.shape[2])):
        g, state, into, over, of_q, of_k = (x[:, :, i] for x in (grad_out, states, w, inside, q, k))
        new = u[:, :, i] - into @ state
        grad_new = over.mT @ g + of_k @ grad_state
        found = (
            grad_new,
            -grad_new @ state.mT,
            g @ state.mT,
            new @ grad_state.mT,
            g @ new.mT,
            (state * grad_state).sum((-2, -1), keepdim=True),
        )
        for grad, one in zip(grads, found, strict=True):
            grad.append(one)
        grad_state = of_q.mT @ g - into.mT @ grad_new + whole[:, :, i] * grad_state
    return tuple(torch.stack(grad[::-1], 2) for grad in grads)


@scan_chunks_backward.register_fake
def _(grad_out: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[:6])


def _keep(ctx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _gradients(ctx, grad_out: Tensor, grad_states: Tensor | None) -> tuple[Tensor, ...]:
    return scan_chunks_backward(grad_out, *ctx.saved_tensors)


scan_chunks.register_autograd(_gradients, setup_context=_keep)


def next_token(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """As with_last_state, of one token, [batch, 1, heads, ·], behind `state`."""
    sharing = value.shape[2] // key.shape[2]
    q, k = (_unit(x[:, 0]).repeat_interleave(sharing, dim=1) for x in (query, key))
    state = state * decay[:, 0, :, None, None].exp()
    found = (state * k[..., None]).sum(-2)
    written = (value[:, 0].float() - found) * share[:, 0, :, None].float()
    state = state + k[..., None] * written[..., None, :]
    out = (state * q[..., None]).sum(-2) * q.shape[-1] ** -0.5
    return out[:, None].to(value.dtype), state


def _unit(x: Tensor) -> Tensor:
    """x [..., size] of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _in_chunks(x: Tensor, chunks: int) -> Tensor:
    """[batch, seq, heads, ...] -> [batch, heads, chunks, C, ...], filled up with zeros: tokens that write nothing."""
    x = x.transpose(1, 2)
    missing = chunks * CHUNK - x.shape[2]
    x = pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
    return x.unflatten(2, (chunks, CHUNK))


def _document_masks(documents: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Of each chunk: which tokens are of one document, bool [batch, 1, chunks, C, C]; and as float32 which are of the
    one that the state before has, of the one that it has behind, [batch, 1, chunks, C, 1], and whether the two are one,
    [batch, 1, chunks, 1, 1]."""
    missing = chunks * CHUNK - documents.shape[1]
    numbers = pad(documents[:, None], (0, missing), mode="replicate")[:, 0] if missing else documents
    numbers = numbers.unflatten(1, (chunks, CHUNK))  # [batch, chunks, C]
    last = numbers[..., -1:]
    before = torch.cat([numbers[:, :1, :1], last[:, :-1]], dim=1)
    same = numbers[..., :, None] == numbers[..., None, :]
    masks = [(numbers == before)[..., None], (numbers == last)[..., None], (last == before)[..., None]]
    return same[:, None], *(mask[:, None].float() for mask in masks)


def causal_conv(x: Tensor, taps: Tensor, documents: Tensor | None = None) -> Tensor:
    """Each unit's last tokens weighed: x [batch, seq, units], taps [units, 1, tokens] with the present one's last, of
    one document, its numbers int [batch, seq]: [batch, seq, units] in x's dtype."""
    count = taps.shape[-1]
    if documents is None:
        return conv1d(pad(x.mT, (count - 1, 0)), taps.to(x.dtype), groups=len(taps)).mT
    total = torch.zeros_like(x)
    for back in range(count):
        moved, numbers = (
            pad(y, (0, 0) * (y.dim() - 2) + (back, 0), value=-1)[:, : y.shape[1]] for y in (x, documents)
        )
        same = (numbers == documents)[..., None]
        total = total + torch.where(same, moved, 0) * taps[:, 0, count - 1 - back].to(x.dtype)
    return total
