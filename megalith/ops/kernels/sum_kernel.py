"""Rows of a short type added up in fp32: each is read once, and the sum written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megalith.ops.kernels.kernel_launch import Launcher

ELEMENTS, WARPS = 2048, 4  # a program's part


@triton.jit
def _sum_parts(parts, out, count, ROWS: tl.constexpr, ELEMENTS: tl.constexpr):
    places = tl.cast(tl.program_id(0), tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    here = places < count
    total = tl.load(parts + places, mask=here).to(tl.float32)
    for row in tl.static_range(1, ROWS):
        total += tl.load(parts + tl.cast(count, tl.int64) * row + places, mask=here).to(tl.float32)
    tl.store(out + places, total, mask=here)


_launch = Launcher(_sum_parts)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """out float32 [size] = the sum of the contiguous parts [rows, size], in their order."""
    rows, count = parts.shape
    _launch((-(-count // ELEMENTS), 1, 1), (parts, out), (count,), (), (rows, ELEMENTS), WARPS)
