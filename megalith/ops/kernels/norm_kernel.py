"""Norms fused with a residual addition. Forward and backward each take one pass over memory, plus small column sums.

Forward, a program adds y, a branch's output, to the stream x and normalizes the sum. Backward, it reads the gradient of
the normed rows, the rows, and the gradient along the stream, and writes the sum of both gradients, which is the
gradient of x and of y. With dropout of y, the mask is recomputed from its keys, and y's gradient is separate.

Gradients of weight and bias are sums over tokens: each program sums its rows, and the programs' sums are added in a
fixed order, so that results are bitwise repeatable.

Registers hold a row in two pieces, because a piece has a power of two of elements: 1280 = 1024 + 256.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Number of programs, which divide the rows in strides: 8 and 4 per SM of an H200.
FORWARD_PROGRAMS, PROGRAMS = 1056, 528
ELEMENTS = 512  # of the first piece per warp
STAGES, STAGED = 3, 2**14  # rows in flight from memory per program; maximum bytes of such a row


@triton.jit
def _norm_forward(
    x, y, weight, bias, rows, columns, summed, out, stats, tokens, epsilon, factor,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr,
    CENTRED: tl.constexpr, ROUNDED: tl.constexpr, ADDS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    # Compiled code gives a Python number as fp64.
    epsilon, factor = tl.cast(epsilon, tl.float32), tl.cast(factor, tl.float32)
    first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    gain_a, gain_b = _gain(weight, x, first, WIDTH, ROUNDED), _gain(weight, x, rest, WIDTH, ROUNDED)
    shift_a, shift_b = tl.zeros([FIRST], tl.float32), tl.zeros([REST], tl.float32)
    if CENTRED:
        shift_a, shift_b = _gain(bias, x, first, WIDTH, ROUNDED), _gain(bias, x, rest, WIDTH, ROUNDED)
    for row in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(row, tl.int64) * WIDTH
        value_a, value_b = _row(x + start, first, WIDTH), _row(x + start, rest, WIDTH)
        if ADDS:
            more_a, more_b = _row(y + start, first, WIDTH), _row(y + start, rest, WIDTH)
            if DROPS:
                key = tl.load(rows + row)
                more_a = _dropped(more_a, key, columns, first, factor, WIDTH, THRESHOLD)
                more_b = _dropped(more_b, key, columns, rest, factor, WIDTH, THRESHOLD)
            value_a = (value_a + more_a).to(x.dtype.element_ty)
            value_b = (value_b + more_b).to(x.dtype.element_ty)
            _keep(summed + start, first, rest, value_a, value_b, WIDTH)
            value_a, value_b = value_a.to(tl.float32), value_b.to(tl.float32)
        if CENTRED:
            centre = (tl.sum(value_a, 0) + tl.sum(value_b, 0)) / WIDTH
            tl.store(stats + tokens + row, centre)
            value_a -= centre
            value_b = tl.where(rest < WIDTH, value_b - centre, 0.0)
        scale = tl.rsqrt((tl.sum(value_a * value_a, 0) + tl.sum(value_b * value_b, 0)) / WIDTH + epsilon)
        tl.store(stats + row, scale)
        value_a = (value_a * scale * gain_a + shift_a).to(out.dtype.element_ty)
        value_b = (value_b * scale * gain_b + shift_b).to(out.dtype.element_ty)
        _keep(out + start, first, rest, value_a, value_b, WIDTH)


@triton.jit
def _norm_backward(
    grad, x, stats, stream_grad, weight, rows, columns, out, dropped, parts, tokens, factor,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr,
    CENTRED: tl.constexpr, ROUNDED: tl.constexpr, STREAMS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    factor = tl.cast(factor, tl.float32)
    first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    gain_a, gain_b = _gain(weight, x, first, WIDTH, ROUNDED), _gain(weight, x, rest, WIDTH, ROUNDED)
    zeros_a, zeros_b = tl.zeros([FIRST], tl.float32), tl.zeros([REST], tl.float32)
    weights_a, biases_a, weights_b, biases_b = zeros_a, zeros_a, zeros_b, zeros_b
    for row in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(row, tl.int64) * WIDTH
        dy_a, dy_b = _row(grad + start, first, WIDTH), _row(grad + start, rest, WIDTH)
        value_a, value_b = _row(x + start, first, WIDTH), _row(x + start, rest, WIDTH)
        stream_a, stream_b = zeros_a, zeros_b
        if STREAMS:
            stream_a, stream_b = (
                _row(stream_grad + start, first, WIDTH),
                _row(stream_grad + start, rest, WIDTH),
            )
        scale = tl.load(stats + row)
        level = tl.zeros_like(scale)
        if CENTRED:
            centre = tl.load(stats + tokens + row)
            value_a -= centre
            value_b -= centre
            biases_a += dy_a
            biases_b += dy_b
        value_a *= scale
        value_b *= scale
        weights_a += dy_a * value_a
        weights_b += dy_b * value_b
        dy_a *= gain_a
        dy_b *= gain_b
        slope = (tl.sum(dy_a * value_a, 0) + tl.sum(dy_b * value_b, 0)) / WIDTH
        if CENTRED:
            level = (tl.sum(dy_a, 0) + tl.sum(dy_b, 0)) / WIDTH
        dx_a = (dy_a - level - value_a * slope) * scale + stream_a
        dx_b = (dy_b - level - value_b * slope) * scale + stream_b
        _keep(out + start, first, rest, dx_a.to(out.dtype.element_ty), dx_b.to(out.dtype.element_ty), WIDTH)
        if DROPS:
            key = tl.load(rows + row)
            dx_a = _dropped(dx_a, key, columns, first, factor, WIDTH, THRESHOLD)
            dx_b = _dropped(dx_b, key, columns, rest, factor, WIDTH, THRESHOLD)
            _keep(
                dropped + start,
                first,
                rest,
                dx_a.to(out.dtype.element_ty),
                dx_b.to(out.dtype.element_ty),
                WIDTH,
            )
    part = parts + tl.program_id(0) * ((1 + CENTRED) * WIDTH)
    _keep(part, first, rest, weights_a, weights_b, WIDTH)
    if CENTRED:
        _keep(part + WIDTH, first, rest, biases_a, biases_b, WIDTH)


@triton.jit
def _gain(weight, x, columns, WIDTH: tl.constexpr, ROUNDED: tl.constexpr):
    gain = tl.load(weight + columns, mask=columns < WIDTH, other=0.0)
    return gain.to(x.dtype.element_ty).to(tl.float32) if ROUNDED else gain


@triton.jit
def _row(start, columns, WIDTH: tl.constexpr):
    return tl.load(start + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _dropped(value, row, columns, offsets, factor, WIDTH: tl.constexpr, THRESHOLD: tl.constexpr):
    h = row ^ tl.load(columns + offsets, mask=offsets < WIDTH, other=0)  # then as in ops.dropout.mix
    h = (h ^ ((h >> 16) & 0xFFFF)) * -2048144789
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -1028477387
    h = h ^ ((h >> 16) & 0xFFFF)
    return tl.where((h & 0x7FFFFFFF) >= THRESHOLD, value * factor, 0.0)


@triton.jit
def _keep(start, first, rest, values_a, values_b, WIDTH: tl.constexpr):
    tl.store(start + first, values_a, mask=first < WIDTH)
    tl.store(start + rest, values_b, mask=rest < WIDTH)


def _pieces(x: Tensor) -> dict[str, int]:
    width = x.shape[1]
    first = triton.next_power_of_2(width) // 2
    rest = triton.next_power_of_2(width - first)
    stages = STAGES if width * x.element_size() <= STAGED else 1
    return dict(WIDTH=width, FIRST=first, REST=rest, STAGES=stages, num_warps=max(1, first // ELEMENTS))


@triton_op("megalith::norm_forward", mutates_args={})
def norm_forward(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    columns: Tensor | None,
    probability: float,
    epsilon: float,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y [tokens, width], its norm, and float32 statistics of its rows, [2, tokens]: 1 / deviation and mean.

    Without y, the first result is empty, and x is normalized. Without `bias`, the norm is RMSNorm, whose statistics
    have no mean: [1, tokens]. With `rows` int32 [tokens] and `columns` int32 [width], y goes through dropout as in
    ops.dropout.counter_dropout. `rounded`: weight and bias, float32 [width], are first rounded to x's dtype.
    """
    tokens = len(x)
    x, adds, drops, centred = x.contiguous(), y is not None, rows is not None, bias is not None
    y = y.contiguous() if adds else x
    stream = torch.empty_like(x) if adds else x.new_empty(0)
    out = torch.empty_like(x)
    stats = x.new_empty(1 + centred, tokens, dtype=torch.float32)
    wrap_triton(_norm_forward)[(min(FORWARD_PROGRAMS, tokens),)](
        x, y, weight, bias if centred else weight, rows.contiguous() if drops else x, columns if drops else x,
        stream, out, stats, tokens, epsilon, 1.0 / (1.0 - probability), THRESHOLD=int(probability * 0x80000000),
        CENTRED=centred, ROUNDED=rounded, ADDS=adds, DROPS=drops, **_pieces(x),
    )  # fmt: skip
    return stream, out, stats


@triton_op("megalith::norm_backward", mutates_args={})
def norm_backward(
    grad: Tensor,
    x: Tensor,
    stats: Tensor,
    stream_grad: Tensor | None,
    weight: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    probability: float,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and, with dropout (`rows`), of y, and sums over tokens.

    Args:
        grad: gradient of the normed x, [tokens, width].
        x: sum from norm_forward; `stats` and the other arguments as there.
        stream_grad: gradient of x along the stream, [tokens, width]. None: x has no other use than this norm.

    Returns:
        Gradient of x in its dtype; gradient of y before dropout, or an empty tensor; float32 [count, width]: gradient
            of weight and, if there is one, of bias.
    """
    tokens, width = x.shape
    grad, x = grad.contiguous(), x.contiguous()
    streams, drops, centred = stream_grad is not None, rows is not None, len(stats) == 2
    stream_grad = stream_grad.contiguous() if streams else x
    out = torch.empty_like(x)
    dropped = torch.empty_like(x) if drops else x.new_empty(0)
    programs = min(PROGRAMS, tokens)
    parts = x.new_empty(programs, 1 + centred, width, dtype=torch.float32)
    wrap_triton(_norm_backward)[(programs,)](
        grad, x, stats, stream_grad, weight, rows.contiguous() if drops else x, columns if drops else x,
        out, dropped, parts, tokens, 1.0 / (1.0 - probability), THRESHOLD=int(probability * 0x80000000),
        CENTRED=centred, ROUNDED=rounded, STREAMS=streams, DROPS=drops, **_pieces(x),
    )  # fmt: skip
    return out, dropped, parts.sum(0)
