"""What experts do with their rows beside matmuls, each in one pass over memory: rows taken, the gated non-linearity
between the two matrices times the rows' weights, and its gradients.

A program has one row, so that the gradient of the row's weight is a sum of its own. Where a buffer would hold any
number of rows, the programs of those behind the last one read where that is, and end: nothing is moved for them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megalith.ops.kernels.kernel_launch import Launcher

TAKEN, COLUMNS, WARPS = 1024, 512, 4  # columns at a time, of rows taken, and of the experts' inner width


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
    """Gates and ups from the first on, fp32 [COLUMNS], which alternate in the row at x."""
    places = 2 * first + tl.arange(0, 2 * COLUMNS)
    both = tl.load(x + places, mask=places < 2 * WIDTH, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(both, [COLUMNS, 2]))


@triton.jit
def _swiglu_forward(
    x, weights, end, out,
    WIDTH: tl.constexpr, BOUNDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = True
    if BOUNDED:
        here = row < tl.load(end)
    if here:
        weight = tl.load(weights + row)
        x += row * (2 * WIDTH)
        out += row * WIDTH
        for first in range(0, WIDTH, COLUMNS):
            gate, up = _parts(x, first, WIDTH, COLUMNS)
            y = gate * tl.sigmoid(gate) * up * weight
            columns = first + tl.arange(0, COLUMNS)
            tl.store(out + columns, y.to(out.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _swiglu_backward(
    grad, x, weights, end, grad_x, grad_weights,
    WIDTH: tl.constexpr, BOUNDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = True
    if BOUNDED:
        here = row < tl.load(end)
    if here:
        weight = tl.load(weights + row)
        x += row * (2 * WIDTH)
        grad_x += row * (2 * WIDTH)
        grad += row * WIDTH
        sums = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            gate, up = _parts(x, first, WIDTH, COLUMNS)
            columns = first + tl.arange(0, COLUMNS)
            dy = tl.load(grad + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
            opened = tl.sigmoid(gate)
            active = gate * opened
            sums += dy * active * up
            dy *= weight
            slope = opened * (1 + gate * (1 - opened))
            both = tl.reshape(tl.join(dy * up * slope, dy * active), [2 * COLUMNS])
            places = 2 * first + tl.arange(0, 2 * COLUMNS)
            tl.store(grad_x + places, both.to(grad_x.dtype.element_ty), mask=places < 2 * WIDTH)
        tl.store(grad_weights + row, tl.sum(sums, 0))


_launch_take, _launch_forward, _launch_backward = map(
    Launcher, (_take_rows, _swiglu_forward, _swiglu_backward)
)


def take_rows(x: Tensor, index: Tensor, end: Tensor, each: int = 1) -> Tensor:
    """The rows index // each of x [n, width], contiguous ones, on a GPU; index int64 [rows]. Rows from `end` on, int32
    [1], are left as memory has them."""
    rows, width = len(index), x.shape[1]
    out = x.new_empty(rows, width)
    if rows:
        constants = (each, x.stride(0), width, TAKEN)
        _launch_take((rows, 1, 1), (x, index, end, out), (), (), constants, WARPS)
    return out


def weighted_swiglu(x: Tensor, weights: Tensor, end: Tensor | None) -> Tensor:
    """silu(gate) · up · weight of contiguous rows x [rows, 2 · width] on a GPU, in which gates and ups alternate, and
    weights float32 [rows, 1]: [rows, width], computed in fp32. Rows from `end` on, int32 [1], are left as memory has
    them."""
    rows, width = len(x), x.shape[1] // 2
    out = x.new_empty(rows, width)
    constants = (width, end is not None, COLUMNS)
    if rows:
        tensors = (x, weights, weights if end is None else end, out)
        _launch_forward((rows, 1, 1), tensors, (), (), constants, WARPS)
    return out


def weighted_swiglu_backward(
    grad: Tensor, x: Tensor, weights: Tensor, end: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weights, `grad` [rows, width] being that of weighted_swiglu(x, weights, end)."""
    rows, width = grad.shape
    grad_x, grad_weights = x.new_empty(x.shape), weights.new_empty(rows, 1)
    constants = (width, end is not None, COLUMNS)
    if rows:
        tensors = (grad, x, weights, weights if end is None else end, grad_x, grad_weights)
        _launch_backward((rows, 1, 1), tensors, (), (), constants, WARPS)
    return grad_x, grad_weights
