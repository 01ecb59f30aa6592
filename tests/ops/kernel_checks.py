"""Checks of the Triton kernels that Triton's interpreter can run on CPU tensors; see test_interpreted_kernels.py.

Each function compares a kernel with the formula that PyTorch's operators compute, on inputs with unusual strides and
sizes that fill no tile.
"""

import math
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.ops import gumbel, kernels
from megalith.ops.activation import ACTIVATIONS, gelu_tanh
from megalith.ops.batch_invariant.elementwise import sum_by_pairs
from megalith.ops.cached_attention import cached_attention, visible_positions
from megalith.ops.dropout import column_keys, counter_dropout, token_keys
from megalith.ops.fp8 import codes as fp8
from megalith.ops.kernels import (
    batch_invariant_kernels,
    decode_kernel,
    invariant_matmul,
    norm_kernel,
    sampling_kernel,
)
from megalith.ops.rotary import rotate
from megalith.ops.split_qkv import split_qkv
from megalith.optim import moments

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def strided(x: Tensor) -> Tensor:
    """Return the same values as every other column of a wider tensor."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def near(actual: Tensor, expected: Tensor, rounding: float) -> None:
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= rounding * expected.norm(), (actual - expected).abs().max()


def decode_attention(
    window: int | None, softcap: float | None, splits: int, chunk: int | None = None
) -> None:
    """One new token per row over a cache, whose rows are filled to different lengths."""
    decode_kernel.PROGRAMS = splits * 6  # programs for 3 rows of 2 groups
    rows, heads, groups, size, room = 3, 6, 2, 20, 90
    query, qkv = random(rows, 1, heads, size), random(rows, 1, groups, 3, size)
    key, value = qkv[..., 1, :], qkv[..., 2, :]
    cache = random(2, rows, room, groups, size)
    positions = torch.tensor([[0, 7], [41, 7], [89, 7]])[:, 0]
    expected_cache = cache.clone()
    options = dict(window=window, softcap=softcap, scale=None, chunk=chunk)
    visible = visible_positions(positions, room)
    expected = cached_attention(query, key, value, expected_cache, positions, visible, **options)
    one_token = (x[:, 0] for x in (strided(query), strided(key), value))
    actual = decode_kernel.decode_attention(
        *one_token, cache, positions, window or 0, softcap or 0.0, size**-0.5, chunk or 0
    )
    assert torch.equal(cache, expected_cache)
    near(actual[:, None], expected, 1e-5)


def sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """The tokens that the formula samples, with a threshold per row that lies in a column."""
    logits, keys = 3 * random(5, 5000), torch.randint(-(2**31), 2**31 - 1, (5, 2), dtype=torch.int32)[:, 0]
    options = dict(vocab_size=4990, top_k=top_k, top_p=top_p, min_p=min_p)
    expected_ids, expected = gumbel.sample(logits, keys, temperature, **options)
    real, inverse, least = 4990, 1 / temperature if temperature else 1.0, None
    if temperature and (top_k or top_p < 1 or min_p):
        least = gumbel.least_logit(logits[:, :real], inverse, top_k, top_p, min_p)
    blocks = sampling_kernel.sampled_blocks(logits, keys, least, 0, real, temperature, inverse)
    ids, logprobs = gumbel._combine_blocks(blocks, inverse)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-4)


def sampling_by_row(has_filters: bool) -> None:
    """The bits of the kernel for a single temperature, on logits that were divided before. Some rows are greedy."""
    logits = (3 * random(5, 5000)).bfloat16()[:, 3:]
    keys = torch.randint(-(2**31), 2**31 - 1, (5,), dtype=torch.int32)
    temperatures = torch.tensor([[0.7, 1.0, 0.0, 1.3, 0.0], [0] * 5]).T[:, 0]
    is_greedy, least, real = temperatures == 0, None, 4990
    quotients = logits.float() / torch.where(is_greedy, 1.0, temperatures)[:, None]
    if has_filters:
        least = quotients.topk(40).values[:, -1].masked_fill(is_greedy, -torch.inf)
    sampled, greedy = (
        sampling_kernel.sampled_blocks(quotients, keys, bound, 0, real, temperature, 1.0)
        for bound, temperature in ((least, 1.0), (None, 0.0))
    )
    expected = torch.where(is_greedy[:, None, None], greedy, sampled)
    actual = sampling_kernel.sampled_blocks(logits, keys, least, 0, real, 1.0, 1.0, temperatures)
    assert torch.equal(actual, expected)


def norms(dtype: torch.dtype, centred: bool, branch: str) -> None:
    """The sum of a stream and a branch with or without dropout, its norm, and the gradients of all of them."""
    tokens, width, epsilon, probability = 7, 320, 1e-5, 0.25 if branch == "dropped" else 0.0
    x, y = random(tokens, width, dtype=dtype) + 1, random(tokens, width, dtype=dtype)
    weight, bias = random(width), random(width) if centred else None
    rows = columns = None
    if branch == "dropped":
        rows = token_keys(3, torch.arange(1), torch.arange(tokens))[0]
        columns = column_keys(width, "cpu")
    branch_value = y if branch in ("added", "dropped") else None
    stream, normed, stats = norm_kernel.norm_forward(
        strided(x), branch_value, weight, bias, rows, columns, probability, epsilon, False
    )
    total = x if branch_value is None else stream
    grad, stream_grad = random(tokens, width, dtype=dtype), random(tokens, width, dtype=dtype)
    along = None if branch == "only the norm" else strided(stream_grad)
    grad_x, grad_y, grad_affine = norm_kernel.norm_backward(
        grad, total, stats, along, weight, rows, columns, probability, False
    )

    leaves = [t.double().requires_grad_() for t in (x, y, weight, *([bias] if centred else []))]
    wide_x, wide_y, *affine = leaves
    dropped = counter_dropout(wide_y, probability, rows, columns) if branch == "dropped" else wide_y
    expected_stream = wide_x * 1 if branch_value is None else wide_x + dropped
    if centred:
        expected = F.layer_norm(expected_stream, (width,), *affine, epsilon)
    else:
        expected = F.rms_norm(expected_stream, (width,), *affine, epsilon)
    grads = torch.autograd.grad(
        (expected, expected_stream),
        leaves,
        [grad.double(), stream_grad.double() * (along is not None)],
        allow_unused=True,
    )
    near(normed, expected, 2 * ROUNDING[dtype])
    if branch_value is not None:
        near(stream, expected_stream, 2 * ROUNDING[dtype])
    near(grad_x, grads[0], 2 * ROUNDING[dtype])
    if branch == "dropped":
        near(grad_y, grads[1], 2 * ROUNDING[dtype])
    near(grad_affine, torch.stack(grads[2:]), 2 * ROUNDING[dtype])


def gelu_backward(dtype: torch.dtype) -> None:
    x, grad = random(70, 90, dtype=dtype), random(70, 90, dtype=dtype)
    wide = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(gelu_tanh(wide, None), wide, grad.double())
    actual, summed = torch.ops.megalith.gelu_backward(strided(grad), strided(x))
    near(actual, expected, ROUNDING[dtype])
    near(summed, expected.sum(0), ROUNDING[dtype])


def join_qkv(dtype: torch.dtype) -> None:
    """Queries, keys and values as attention's kernels may give them: with heads before tokens."""
    batch, seq, heads, groups, size = 2, 5, 6, 2, 20
    parts = [random(batch, n, seq, size, dtype=dtype).transpose(1, 2) for n in (heads, groups, groups)]
    qkv, summed = torch.ops.megalith.join_qkv(*parts)
    width = (heads + 2 * groups) * size
    again = split_qkv(qkv.view(batch, seq, width), None, batch, heads // groups, size)
    for actual, expected in zip(again, parts, strict=True):
        assert torch.equal(actual, expected)
    near(summed, qkv.double().sum(0), 1e-6)


def sum_rows() -> None:
    rows, out = random(3, 5000, dtype=torch.bfloat16), torch.empty(5000)
    kernels.sum_rows(rows, out)
    expected = rows[0].float()
    for row in rows[1:]:
        expected = expected + row.float()
    assert torch.equal(out, expected)


def loss(dtype: torch.dtype, rows: int, real: int) -> None:
    tokens = 5
    logits, weight = 3 * random(tokens, rows, dtype=dtype), torch.rand(tokens)
    labels = torch.randint(0, real, (tokens,))
    labels[:2] = torch.tensor([0, real - 1])
    wide = logits[:, :real].double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none") * weight
    expected.sum().backward()
    losses = kernels.softmax_loss_(logits, labels, weight, real)
    near(losses, expected, 1e-5)
    near(logits[:, :real], wide.grad, ROUNDING[dtype])
    assert not logits[:, real:].any()


def experts(dtype: torch.dtype) -> None:
    """Rows of tokens for the experts, and their activation, with undefined rows at the end."""
    x, index = random(9, 40, dtype=dtype), torch.tensor([8, 0, 3, 3, 1, 99, 99])
    end = torch.tensor([5], dtype=torch.int32)
    assert torch.equal(kernels.take_rows(x, index, end)[:5], x[index[:5]])
    assert torch.equal(kernels.take_rows(x, 2 * index, end, 2)[:5], x[index[:5]])

    rows, weights, grad = random(7, 80, dtype=dtype), torch.rand(7, 1), random(7, 40, dtype=dtype)
    wide, wide_weights = rows.double().requires_grad_(), weights.double().requires_grad_()
    gate, up = wide.unflatten(-1, (-1, 2)).unbind(-1)
    expected = ACTIVATIONS["silu"](gate) * up * wide_weights
    grads = torch.autograd.grad(expected, (wide, wide_weights), grad.double())
    near(kernels.swiglu(rows, weights, end)[:5], expected[:5], ROUNDING[dtype])
    for actual, exact in zip(kernels.swiglu_backward(grad, rows, weights, end), grads, strict=True):
        near(actual[:5], exact[:5], ROUNDING[dtype])
    expected = ACTIVATIONS["silu"](gate) * up
    near(kernels.swiglu(rows), expected, ROUNDING[dtype])
    of_rows, none = kernels.swiglu_backward(grad, rows)
    assert none is None
    near(of_rows, torch.autograd.grad(expected, wide, grad.double())[0], ROUNDING[dtype])


def rotary(dtype: torch.dtype, interleaved: bool) -> None:
    """Rotations of keys between other columns, of all or of some dimensions, to the bits of PyTorch's operators."""
    batch, seq, heads_, size = 2, 5, 20, 24
    for half, table_rows in product((12, 4), (1, batch)):
        angles = random(table_rows, seq, 1, half)
        cos, sin = angles.cos(), angles.sin()
        wide = random(batch, seq, heads_, 3, size, dtype=dtype)
        x = wide[:, :, :, 1].requires_grad_()
        expected = rotate(x, cos, sin, interleaved)
        grad = random(batch, seq, heads_, size, dtype=dtype)
        assert torch.equal(kernels.rotate_pairs(x.detach(), cos, sin, interleaved), expected)
        grad_x = kernels.rotate_pairs(grad, cos, sin, interleaved, backward=True)
        assert torch.equal(grad_x, torch.autograd.grad(expected, x, grad)[0])


def numbers_of_fp8(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers that FP8 (E4M3) and bf16 have, because the interpreter rounds some others wrongly."""
    return random(*shape).mul(30).to(torch.float8_e4m3fn).to(dtype)


def fp8_casts(dtype: torch.dtype, rows: int, columns: int) -> None:
    """FP8 data by row and by column, and the running amax."""
    x, scale = numbers_of_fp8(rows, columns, dtype=dtype), torch.tensor(0.5)
    x[x.abs() < 1] = 0  # half of them would be rounded
    for by_row, by_column in product((True, False), repeat=2):
        running, expected_running = torch.tensor(1.0), torch.tensor(1.0)
        arguments = torch.float8_e4m3fn, by_row, by_column
        expected = fp8.cast(x, scale, expected_running, *arguments)
        actual = kernels.fp8_kernels.cast(strided(x), scale, running, *arguments)
        assert torch.equal(running, expected_running)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(kernels.fp8_kernels.amax(strided(x)), x.abs().amax().float())
    data = x.to(torch.float8_e4m3fn)
    assert torch.equal(kernels.fp8_kernels.transpose(data).view(torch.uint8), data.view(torch.uint8).t())
    x[1, 2] = float("nan")
    assert kernels.fp8_kernels.amax(x).isnan()


def fp8_blocks(dtype: torch.dtype) -> None:
    x = numbers_of_fp8(256, 128, dtype=dtype)
    x[:, 5] = 0
    for by_row, by_column, tiles in (
        (True, False, False),
        (False, True, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
    ):
        expected = fp8.cast_blocks(x, by_row, by_column, tiles)
        actual = kernels.fp8_kernels.cast_blocks(strided(x), by_row, by_column, tiles)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (by_row, by_column, tiles)


def heads(rank: int, to_heads: bool) -> None:
    """The local part of the exchange of heads by copy engines, of queries, keys and values with gaps between heads."""
    from parallel.copies_by_gloo import share_by_formula

    size, batch, seq, dim, counts = 2, 2, 6, 20, (4, 2, 2)
    if to_heads:
        xs = [random(batch, seq, 2 * n, dim)[:, :, ::2] for n in counts]
        share = sum(counts) // size
        slot_shape, out_shape = (size - 1, batch, seq, share, dim), (batch, size * seq, share, dim)
    else:
        xs = [random(batch, size * seq, n, dim) for n in (2, 1, 1)]
        slot_shape, out_shape = (size - 1, batch, seq, 4, dim), (batch, seq, 8, dim)
    results = []
    for share_heads in (kernels.share_heads, share_by_formula):
        slot, out = torch.zeros(slot_shape), torch.zeros(out_shape)
        share_heads(xs, slot, out, rank, to_heads)
        results.append((slot, out))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def adamw() -> None:
    values = [random(5000) for _ in range(3)]
    value, grad, first = values
    second, step = torch.rand(5000), torch.tensor(3.0)
    expected, moments_ = value.double(), [first.double(), second.double()]
    g = grad.double() / 2
    moments_[0] = 0.9 * moments_[0] + 0.1 * g
    moments_[1] = 0.95 * moments_[1] + 0.05 * g * g
    root = (moments_[1] / (1 - 0.95**3)).sqrt()
    expected = expected * (1 - 0.01 * 0.1) - 0.01 * moments_[0] / (1 - 0.9**3) / (root + 1e-8)
    kernels.adamw_(
        value, grad, first, second, step, torch.tensor(2.0), torch.tensor(0.0), 0.01, (0.9, 0.95), 1e-8, 0.1
    )
    for actual, exact in zip((value, first, second), (expected, *moments_), strict=True):
        near(actual, exact, 2e-6)
    before = value.clone()
    kernels.adamw_(
        value, grad, first, second, step, torch.tensor(2.0), torch.tensor(1.0), 0.01, (0.9, 0.95), 1e-8, 0.1
    )
    assert torch.equal(value, before)


def reduced_moments(kind: str, coupled: bool) -> None:
    """Three steps with moments in bf16 or 8 bits: the stored bytes are those of the formula."""
    shape, block = (12, 64), 64
    value = random(*shape)
    twin = value.clone()
    stored = [
        [moments.Moment.zeros(value, kind, block, signed).in_blocks(block) for signed in (True, False)]
        for _ in range(2)
    ]
    position = torch.tensor([12345, 4, 12, 100, 64, 0])
    settings = torch.tensor([0.01, 0.1, 2.0, 0.0])
    for number in (1, 2, 3):
        grad, step = random(*shape), torch.tensor([float(number)])
        rest = (step, settings, position, (0.9, 0.95), coupled, 1e-8)
        kernels.step_moments_(value, grad, *stored[0], *rest)
        moments._step(twin, grad, *stored[1], *rest)
        near(value, twin, 2e-6)
        for actual, expected in zip(*stored, strict=True):
            assert actual.values.dtype == expected.values.dtype
            differ = (actual.values.float() != expected.values.float()).float().mean()
            assert differ < 0.01, differ  # where a product is rounded another way


def invariant_matmuls(dtype: torch.dtype) -> None:
    """Matmuls, with and without groups and parts, of rows with gaps between their elements."""
    x, weight = random(37, 70, dtype=dtype), random(50, 70, dtype=dtype)
    exact = x.double() @ weight.double().T
    near(invariant_matmul.tiled_matmul(strided(x), strided(weight), dtype), exact, ROUNDING[dtype])
    one = invariant_matmul.tiled_matmul(x[5:6], weight, dtype)
    assert torch.equal(one, invariant_matmul.tiled_matmul(x, weight, dtype)[5:6])
    grouped, ends = random(3, 50, 70, dtype=dtype), torch.tensor([10, 10, 37], dtype=torch.int32)
    exact = torch.cat([x[:10].double() @ grouped[0].double().T, x[10:].double() @ grouped[2].double().T])
    near(invariant_matmul.tiled_matmul(x, grouped, dtype, ends), exact, ROUNDING[dtype])

    x, weight = random(37, 80, dtype=dtype), random(50, 80, dtype=dtype)
    parts = partial(invariant_matmul.matmul_in_parts, dtype=torch.float32)
    every = parts(strided(x), strided(weight), parts=8)
    near(every, x.double() @ weight.double().T, ROUNDING[dtype])
    assert torch.equal(parts(x[5:6], weight, parts=8), every[5:6])
    for ranks in (2, 4, 8):
        shards = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1))
        sums = torch.stack([parts(*shard, parts=8 // ranks) for shard in shards])
        assert torch.equal(sum_by_pairs(sums), every)
    grouped = random(3, 50, 80, dtype=dtype)
    of_groups = parts(strided(x), strided(grouped), parts=8, ends=ends)
    assert torch.equal(of_groups[:10], parts(x[:10], grouped[0], parts=8))
    assert torch.equal(of_groups[10:], parts(x[10:], grouped[2], parts=8))


def tiles_of_a_matmul(dtype: torch.dtype, parts: int) -> None:
    """The result has the same bits with every tile, read by pointers or descriptors, with and without groups."""
    x, weight = random(75, 256, dtype=dtype), random(3, 50, 256, dtype=dtype)
    ends = torch.tensor([40, 40, 75], dtype=torch.int32)
    tiles = [invariant_matmul.Tile(rows, 32, 32, 4, 2) for rows in (16, 64)]
    for matrices, of_group in ((weight[0], None), (weight, ends)):
        every = invariant_matmul.matmul_in_parts(x, matrices, torch.float32, parts, of_group)
        expected = x.double() @ weight[0].double().T
        near(every[:40], expected[:40], ROUNDING[dtype])
        for tile, described, spread in product(tiles, (False, True), (False, True)):
            if not spread or (parts > 1 and of_group is None):
                same = invariant_matmul.multiply(
                    x, matrices, torch.float32, parts, of_group, tile, described, spread
                )
                near(same, every, 1e-6)


def batch_invariant(dtype: torch.dtype) -> None:
    """Norms and softmax statistics of rows with gaps between their elements, and matmuls of many small matrices."""
    left, right = random(5, 70, 50), random(5, 50, 90)
    products = batch_invariant_kernels.tiled_batched_matmul(strided(left), strided(right))
    near(products, left.double() @ right.double(), ROUNDING[torch.float32])
    assert torch.equal(batch_invariant_kernels.tiled_batched_matmul(left[3:4], right[3:4])[0], products[3])

    rows, factor, shift = random(6, 70, dtype=dtype), random(70), random(70)
    for added in (None, shift):
        normed, stats = batch_invariant_kernels.row_norm(strided(rows), factor, added, 1e-5)
        wide, width = rows.double(), (70,)
        if added is None:
            expected, mean = F.rms_norm(wide, width, factor.double(), 1e-5), 0.0
        else:
            expected = F.layer_norm(wide, width, factor.double(), shift.double(), 1e-5)
            mean = wide.mean(1, keepdim=True)
            near(stats[1], mean[:, 0], 1e-5)
        near(normed, expected, ROUNDING[dtype])
        near(stats[0], ((wide - mean).square().mean(1) + 1e-5).rsqrt(), 1e-5)
    logits, temperature = 3 * random(4, 36_000, dtype=dtype), 0.5 + random(4, 1).abs()
    z = logits.double() / temperature.double()
    sums = batch_invariant_kernels.softmax_sums(strided(logits), temperature, 4)
    assert torch.equal(
        batch_invariant_kernels.softmax_sums(logits[2:3], temperature[2:3], 4), sums[:, :, 2:3]
    )
    number = batch_invariant_kernels.softmax_sums(logits, torch.tensor(2.0), 4)
    near(number[0], (logits.double() / 2).unflatten(1, (4, -1)).amax(-1).T, 1e-6)
    pairs = batch_invariant_kernels.add_pairs_of_sums(sums)
    largest, total, product_ = batch_invariant_kernels.add_pairs_of_sums(pairs)[:, 0]
    logs = z.log_softmax(-1)
    near(largest + total.log(), z.logsumexp(-1), 1e-6)
    near(total.log() - product_ / total, -(logs.exp() * logs).sum(-1), 1e-5)


def batch_invariant_attention(dtype: torch.dtype, window: int | None, documents: bool, size: int) -> None:
    """Causal attention of packed documents, keys and values as views of a cache. Strides are multiples of `size`."""
    batch, seq, heads_, groups = 2, 40, 4, 2
    query = random(batch, seq, heads_, size, dtype=dtype)
    cache = random(2, batch, seq + 7, groups, size, dtype=dtype)
    key, value = cache[:, :, :seq]
    positions = torch.arange(seq).expand(batch, -1)
    starts = torch.where(torch.arange(seq) < 13, 0, 13).expand(batch, -1) if documents else None
    actual, lse = batch_invariant_kernels.tiled_attention(
        strided(query), key, value, positions, starts, window, size**-0.5
    )
    at = torch.arange(seq)
    seen = at[None, :] <= at[:, None]
    if window:
        seen = seen & (at[None, :] > at[:, None] - window)
    if documents:
        seen = seen & (at[None, :] >= starts[0][:, None])
    wide = [t.double().transpose(1, 2) for t in (query, key, value)]
    wide[1:] = [t.repeat_interleave(heads_ // groups, 1) for t in wide[1:]]
    scores = (wide[0] @ wide[1].mT) / math.sqrt(size)
    scores = scores.masked_fill(~seen, -math.inf)
    near(actual.transpose(1, 2), scores.softmax(-1) @ wide[2], ROUNDING[dtype])
    near(lse, scores.logsumexp(-1), 1e-5 if dtype == torch.float32 else 1e-2)
    for number in (3, seq - 1):  # as a decode step
        start = None if starts is None else starts[:, number : number + 1]
        one, _ = batch_invariant_kernels.tiled_attention(
            query[:, number : number + 1],
            *cache,
            positions[:, number : number + 1],
            start,
            window,
            size**-0.5,
        )
        near(one[:, 0], actual[:, number], ROUNDING[dtype])
