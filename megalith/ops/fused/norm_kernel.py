"""The backward pass of a norm that stands beside a residual stream: one pass over memory, and small column sums.

A program holds whole rows in registers. It reads the gradient of the normed rows, the rows and the gradient that comes
along the stream, and writes the sum of both gradients. What is summed over tokens (the gradients of weight and bias,
and those of the linears' biases that were added to the stream before and behind the norm) it sums over its own rows;
the programs' parts are summed afterwards, in a fixed order, so that a run can be repeated to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

PROGRAMS = 660  # each takes every PROGRAMS-th row; five at a time on each of an H200's 132 multiprocessors
ELEMENTS = 256  # of the first piece for a warp: 8 a thread, 16 bytes in a type of two
STAGES = 1  # rows that a program has on their way from memory


@triton.jit
def _norm_backward(
    grad, x, mean, rstd, beside, weight, out, parts, tokens,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
    CENTRED: tl.constexpr, ROUNDED: tl.constexpr, BEFORE: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    # A row is held in two pieces, since a piece has a power of two of elements: 1280 = 1024 + 256.
    first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    gain_a, gain_b = _gain(weight, x, first, WIDTH, ROUNDED), _gain(weight, x, rest, WIDTH, ROUNDED)
    zeros_a, zeros_b = tl.zeros([FIRST], tl.float32), tl.zeros([REST], tl.float32)
    weights_a, biases_a, before_a, behind_a = zeros_a, zeros_a, zeros_a, zeros_a
    weights_b, biases_b, before_b, behind_b = zeros_b, zeros_b, zeros_b, zeros_b
    for row in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(row, tl.int64) * WIDTH
        dy_a, dy_b = _row(grad + start, first, WIDTH), _row(grad + start, rest, WIDTH)
        value_a, value_b = _row(x + start, first, WIDTH), _row(x + start, rest, WIDTH)
        along_a, along_b = _row(beside + start, first, WIDTH), _row(beside + start, rest, WIDTH)
        scale = tl.load(rstd + row)
        level = tl.zeros_like(scale)
        if CENTRED:
            centre = tl.load(mean + row)
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
        dx_a = (dy_a - level - value_a * slope) * scale + along_a
        dx_b = (dy_b - level - value_b * slope) * scale + along_b
        tl.store(out + start + first, dx_a.to(out.dtype.element_ty), mask=first < WIDTH)
        tl.store(out + start + rest, dx_b.to(out.dtype.element_ty), mask=rest < WIDTH)
        if BEFORE:
            before_a += dx_a
            before_b += dx_b
        if BEHIND:
            behind_a += along_a
            behind_b += along_b
    part = parts + tl.program_id(0) * ((1 + CENTRED + BEFORE + BEHIND) * WIDTH)
    _keep(part, first, rest, weights_a, weights_b, WIDTH)
    if CENTRED:
        _keep(part + WIDTH, first, rest, biases_a, biases_b, WIDTH)
    if BEFORE:
        _keep(part + (1 + CENTRED) * WIDTH, first, rest, before_a, before_b, WIDTH)
    if BEHIND:
        _keep(part + (1 + CENTRED + BEFORE) * WIDTH, first, rest, behind_a, behind_b, WIDTH)


@triton.jit
def _gain(weight, x, columns, WIDTH: tl.constexpr, ROUNDED: tl.constexpr):
    gain = tl.load(weight + columns, mask=columns < WIDTH, other=0.0)
    return gain.to(x.dtype.element_ty).to(tl.float32) if ROUNDED else gain


@triton.jit
def _row(start, columns, WIDTH: tl.constexpr):
    return tl.load(start + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _keep(part, first, rest, sums_a, sums_b, WIDTH: tl.constexpr):
    tl.store(part + first, sums_a, mask=first < WIDTH)
    tl.store(part + rest, sums_b, mask=rest < WIDTH)


@triton_op("megalith::norm_backward", mutates_args={})
def norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    beside: Tensor,
    weight: Tensor,
    centred: bool,
    rounded: bool,
    before: bool,
    behind: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of x [tokens, width], in its type, and sums over tokens: float32 [count, width].

    `grad` and `beside` [tokens, width] are the gradients of the normed x and of x along the stream, `mean` and `rstd`
    float32 [tokens, 1] the rows' statistics. Not `centred`: RMSNorm, which has no mean. `rounded`: the forward pass
    has rounded `weight` float32 [width] to x's type. The sums: the gradient of weight, that of bias where centred,
    with `before` the sum of the result, with `behind` that of `beside`.
    """
    tokens, width = x.shape
    grad, x, beside = grad.contiguous(), x.contiguous(), beside.contiguous()
    out = torch.empty_like(x)
    programs = min(PROGRAMS, tokens)
    parts = x.new_empty(programs, 1 + centred + before + behind, width, dtype=torch.float32)
    first = triton.next_power_of_2(width) // 2
    wrap_triton(_norm_backward)[(programs,)](
        grad, x, mean, rstd, beside, weight, out, parts, tokens,
        WIDTH=width, FIRST=first, REST=triton.next_power_of_2(width - first), STAGES=STAGES,
        CENTRED=centred, ROUNDED=rounded, BEFORE=before, BEHIND=behind, num_warps=max(1, first // ELEMENTS),
    )  # fmt: skip
    return out, parts.sum(0)
