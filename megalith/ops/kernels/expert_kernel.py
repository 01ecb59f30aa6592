"""Fused operations of experts and MLPs, with gradients: gathering rows, and the gated activation, multiplied by row
weights if there are any.

Each program handles one row, so that it can sum the gradient of the row's weight. In an oversized buffer, programs of
rows after the last one read its position and exit without moving data.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megalith.ops.kernels.kernel_launch import Launcher

TAKE_COLUMNS, COLUMNS = 1024, 512  # columns at a time: of gathered rows, and of the experts' inner width
WARPS = 4


@triton.jit
def _take_rows(
    x, index, end, out,
    EACH: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(end):
        x += tl.load(index + row) // EACH * STRIDE
        for first in range(0, WIDTH, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            value = tl.load(x + columns, mask=columns < WIDTH)
            tl.store(out + row * WIDTH + columns, value, mask=columns < WIDTH)


@triton.jit
def _parts(x, first, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return gates and ups, which alternate in the row at x, starting at index `first`: fp32 [COLUMNS]."""
    offsets = 2 * first + tl.arange(0, 2 * COLUMNS)
    both = tl.load(x + offsets, mask=offsets < 2 * WIDTH, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(both, [COLUMNS, 2]))


@triton.jit
def _swiglu_forward(
    x, weights, end, out,
    WIDTH: tl.constexpr, BOUNDED: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    in_range = True
    if BOUNDED:
        in_range = row < tl.load(end)
    if in_range:
        if WEIGHTED:
            weight = tl.load(weights + row)
        x += row * (2 * WIDTH)
        out += row * WIDTH
        for first in range(0, WIDTH, COLUMNS):
            gate, up = _parts(x, first, WIDTH, COLUMNS)
            y = gate * tl.sigmoid(gate) * up
            if WEIGHTED:
                y *= weight
            columns = first + tl.arange(0, COLUMNS)
            tl.store(out + columns, y.to(out.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _swiglu_backward(
    grad, x, weights, end, grad_x, grad_weights,
    WIDTH: tl.constexpr, BOUNDED: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    in_range = True
    if BOUNDED:
        in_range = row < tl.load(end)
    if in_range:
        if WEIGHTED:
            weight = tl.load(weights + row)
        x += row * (2 * WIDTH)
        grad_x += row * (2 * WIDTH)
        grad += row * WIDTH
        sums = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            gate, up = _parts(x, first, WIDTH, COLUMNS)
            columns = first + tl.arange(0, COLUMNS)
            dy = tl.load(grad + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
            gate_sigmoid = tl.sigmoid(gate)
            active = gate * gate_sigmoid
            if WEIGHTED:
                sums += dy * active * up
                dy *= weight
            slope = gate_sigmoid * (1 + gate * (1 - gate_sigmoid))
            both = tl.reshape(tl.join(dy * up * slope, dy * active), [2 * COLUMNS])
            offsets = 2 * first + tl.arange(0, 2 * COLUMNS)
            tl.store(grad_x + offsets, both.to(grad_x.dtype.element_ty), mask=offsets < 2 * WIDTH)
        if WEIGHTED:
            tl.store(grad_weights + row, tl.sum(sums, 0))


_launch_take, _launch_forward, _launch_backward = map(
    Launcher, (_take_rows, _swiglu_forward, _swiglu_backward)
)


def take_rows(x: Tensor, index: Tensor, end: Tensor, each: int = 1) -> Tensor:
    """Gather the rows `index // each` of contiguous x [n, width] on a GPU. `index` is int64 [rows].

    Rows at or after index `end`, int32 [1], are left uninitialized.
    """
    rows, width = len(index), x.shape[1]
    out = x.new_empty(rows, width)
    if rows:
        constants = (each, x.stride(0), width, TAKE_COLUMNS)
        _launch_take((rows, 1, 1), (x, index, end, out), (), (), constants, WARPS)
    return out


def swiglu(x: Tensor, weights: Tensor | None = None, end: Tensor | None = None) -> Tensor:
    """Return silu(gate) · up · weight, [rows, width], computed in fp32 on a GPU.

    Gates and ups alternate in the contiguous rows x [rows, 2 · width]. weights are float32 [rows, 1]; None means 1.
    Rows at or after index `end`, int32 [1], are left uninitialized.
    """
    rows, width = len(x), x.shape[1] // 2
    out = x.new_empty(rows, width)
    constants = (width, end is not None, weights is not None, COLUMNS)
    if rows:
        tensors = (x, x if weights is None else weights, x if end is None else end, out)
        _launch_forward((rows, 1, 1), tensors, (), (), constants, WARPS)
    return out


def swiglu_backward(
    grad: Tensor, x: Tensor, weights: Tensor | None = None, end: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and weights of `swiglu`, from `grad` [rows, width] of its result."""
    rows, width = grad.shape
    grad_x = x.new_empty(x.shape)
    grad_weights = None if weights is None else weights.new_empty(rows, 1)
    constants = (width, end is not None, weights is not None, COLUMNS)
    if rows:
        of_rows = (x, grad_x) if weights is None else (weights, grad_weights)
        tensors = (grad, x, of_rows[0], x if end is None else end, grad_x, of_rows[1])
        _launch_backward((rows, 1, 1), tensors, (), (), constants, WARPS)
    return grad_x, grad_weights
