"""Attention taken in blocks and merged equals attention taken whole, on every kernel that the machine has."""

import pytest
import torch

from megalith.ops import attention_blocks
from megalith.ops.attention_blocks import block_backward, block_forward, merge
from megalith.ops.attention_kernels import KERNELS, Block
from megalith.ops.documents import ends_in_spans
from megalith.parallel.context import ring
from megalith.parallel.context.zigzag import KeyBlock, from_zigzag, spans, zigzag

BATCH, HEADS, SEQ = 2, 4, 96
WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = [("cpu", name) for name in ("cpu", "plain", "chosen")]
PLACES += [
    pytest.param("cuda", name, marks=[pytest.mark.gpu, WITHOUT_GPU])
    for name in (*KERNELS, "chosen")
    if name != "cpu"
]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(groups: int, head_dim: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the result: [batch, ·, seq, head_dim]."""
    random = torch.Generator().manual_seed(5)
    counts = (HEADS, groups, groups, HEADS)
    tensors = [torch.randn(BATCH, SEQ, count, head_dim, generator=random) for count in counts]
    return [x.to(device, dtype).transpose(1, 2) for x in tensors]


def formula(query, key, value, grad, mask):
    """Result and gradients in float64, from the definition."""
    tensors = [x.double().requires_grad_() for x in (query, key, value)]
    query, key, value = tensors
    shared = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(shared, dim=1).mT * query.shape[-1] ** -0.5
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(shared, dim=1)
    return out.detach(), *torch.autograd.grad(out, tensors, grad.double())


def documents(ends, queries: slice, keys: slice):
    if ends is None:
        return None
    return tuple(ends_in_spans(ends, [range(SEQ)[token_index]]) for token_index in (queries, keys))


def in_blocks(query, key, value, grad, ends):
    """The causal square of the first half, then the second half's queries on the first half's keys and on their own."""
    half, square = SEQ // 2, slice(0, SEQ // 2)
    late = slice(half, None)
    parts = [(square, square, True), (late, late, True), (late, square, False)]
    blocks = [Block(c, documents=documents(ends, q, k)) for q, k, c in parts]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse, states = torch.zeros_like(out[..., 0]), []
    for (q, k, _), block in zip(parts, blocks):
        part, part_lse, state = block_forward(query[:, :, q], key[:, :, k], value[:, :, k], block)
        if q is late and k is square:
            merge(out[:, :, q], lse[:, :, q], part, part_lse)
        else:
            out[:, :, q], lse[:, :, q] = part.float(), part_lse
        states.append(torch.zeros(2, dtype=torch.int64, device=out.device) if state is None else state)
    out = out.to(query.dtype)
    d_query, d_key, d_value = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
    for (q, k, _), block, state in zip(parts, blocks, states):
        tensors = query[:, :, q], key[:, :, k], value[:, :, k], out[:, :, q], lse[:, :, q]
        gradients = block_backward(grad[:, :, q], *tensors, state, block)
        d_query[:, :, q] += gradients[0]
        d_key[:, :, k] += gradients[1]
        d_value[:, :, k] += gradients[2]
    return out, d_query, d_key, d_value


@pytest.mark.parametrize("has_documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("groups, head_dim", [(4, 64), (2, 80)], ids=["multi-head", "grouped, head dim 80"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("device, kernel", PLACES)
def test_merged_blocks_equal_the_whole(monkeypatch, device, kernel, dtype, groups, head_dim, has_documents):
    query, key, value, grad = inputs(groups, head_dim, dtype, device)
    visible = torch.ones(SEQ, SEQ, dtype=torch.bool, device=device).tril().expand(BATCH, 1, SEQ, SEQ)
    ends = None
    if has_documents:  # the second begins inside the late half, so some late queries see no early key
        ends = torch.tensor([[SEQ * 2 // 3, SEQ, SEQ]] * BATCH, dtype=torch.int32, device=device)
        ids = torch.arange(SEQ, device=device).ge(SEQ * 2 // 3)
        visible = visible & (ids[:, None] == ids)
    if kernel != "chosen":
        half = slice(0, SEQ // 2)

        def told(query, key, value, block):
            masked = block if kernel in ("cudnn", "flash") else attention_blocks._masked(query, key, block)
            return KERNELS[kernel], masked

        first = [x[:, :, half] for x in (query, key, value)]
        if not KERNELS[kernel].suits(
            *first, told(*first, Block(True, documents=documents(ends, half, half)))[1]
        ):
            pytest.skip(f"{kernel} is not for {dtype} on {device} here")
        monkeypatch.setattr(attention_blocks, "_chosen", told)
    ours = in_blocks(query, key, value, grad, ends)
    for name, mine, exact in zip(("o", "dq", "dk", "dv"), ours, formula(query, key, value, grad, visible)):
        error = (mine.double() - exact).norm() / exact.norm()
        assert error < TOLERANCES[dtype], f"{name}: relative error {error:.1e}"


class SameKeys(ring.KVExchange):
    """A ring in which every other rank has this one's keys and values, all of them before its queries."""

    def shards(self):
        yield self.local_shard
        for _ in range(1, self.size):
            yield KeyBlock(self.pair, self.local_shard.positions)

    def send_gradient(self, shard, grad):
        self.sum = grad + getattr(self, "sum", 0.0)

    def local_gradient(self):
        return self.sum


def test_the_gradients_of_many_bf16_blocks_are_added_up_in_fp32(monkeypatch):
    monkeypatch.setattr(ring, "_Ring", SameKeys)
    query, key, value, grad = inputs(2, 64, torch.bfloat16, "cpu")
    tensors = [x.transpose(1, 2).contiguous().requires_grad_() for x in (query, key, value)]
    size = 17
    out = ring.ring_attention(*tensors, size=size, rank=size - 1, group="", gather=False)
    ours = torch.autograd.grad(out, tensors, grad.transpose(1, 2))
    visible = torch.ones(SEQ, SEQ, dtype=torch.bool)
    visible = torch.cat([visible.tril()] + [visible] * (size - 1), dim=1)
    _, *exact = formula(query, key.repeat(1, 1, size, 1), value.repeat(1, 1, size, 1), grad, visible)
    exact[1:] = [x.unflatten(2, (size, -1)).sum(2) for x in exact[1:]]
    errors = [(a.transpose(1, 2) - b).norm() / b.norm() for a, b in zip(ours, exact)]
    assert max(errors) < 5e-3, errors


@pytest.mark.gpu
@WITHOUT_GPU
def test_dropout_of_the_gpu_kernel_is_the_same_in_backward():
    """Linear in the values: what the values' gradient gives back is what the result took from them."""
    query, key, value, grad = inputs(4, 64, torch.bfloat16, "cuda")
    block = Block(causal=True, dropout=0.25)
    out, lse, state = block_forward(query, key, value, block)
    _, _, d_value = block_backward(grad, query, key, value, out, lse, state, block)
    torch.testing.assert_close(
        (d_value.float() * value.float()).sum(), (grad.float() * out.float()).sum(), rtol=5e-2, atol=2.0
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_places_of_a_rank_are_those_of_its_shard(size):
    token_index = torch.arange(24)
    shards = zigzag(token_index, size, 0)
    for rank in range(size):
        assert [place for span in spans(rank, size, 24 // size) for place in span] == shards[
            rank
        ].flatten().tolist()
    assert torch.equal(from_zigzag(shards, 0), token_index)
