"""Rotation of pairs of a head's dimensions, in one pass over memory.

Products and sums are rounded as PyTorch's operators round them: Triton would combine a product and a sum to one
operation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # per step of a program


@triton.jit(do_not_specialize=["seq"])
def _rotate(
    x, cos, sin, out, seq, x_row, x_token, x_head, table_row, table_token,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, WIDTH)
    table = token // seq * table_row + token % seq * table_token + pair
    c = tl.load(cos + table, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + table, mask=pair < HALF, other=0.0)[None, :]
    if BACKWARD:
        s = -s
    x += token // seq * x_row + token % seq * x_token
    out += token * (HEADS * SIZE)
    for start in range(0, HEADS, AT_ONCE):
        head = start + tl.arange(0, AT_ONCE)[:, None]
        if INTERLEAVED:
            both = tl.arange(0, 2 * WIDTH)[None, :]
            inside = (head < HEADS) & (both < 2 * HALF)
            values = tl.load(x + head * x_head + both, mask=inside, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(values, [AT_ONCE, WIDTH, 2]))
            values = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [AT_ONCE, 2 * WIDTH])
            tl.store(out + head * SIZE + both, values.to(out.dtype.element_ty), mask=inside)
        else:
            inside = (head < HEADS) & (pair < HALF)[None, :]
            source, target = head * x_head + pair[None, :], head * SIZE + pair[None, :]
            a = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + source + HALF, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + target, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
            tl.store(out + target + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=inside)
        if 2 * HALF < SIZE:
            rest = 2 * HALF + tl.arange(0, REST)[None, :]
            inside = (head < HEADS) & (rest < SIZE)
            values = tl.load(x + head * x_head + rest, mask=inside)
            tl.store(out + head * SIZE + rest, values, mask=inside)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool = False) -> Tensor:
    """Return x [batch, seq, heads, head_dim] rotated as ops.rotary.rotate does, with the same bits, on a GPU.

    Args:
        x: consecutive along head_dim.
        cos, sin: float32 [batch or 1, seq, 1, pairs], with equal strides; pairs are at most head_dim / 2.
        interleaved: pair j is (x_2j, x_2j+1) in place of (x_j, x_{j + pairs}).
        backward: rotate by the negative angle, which is the gradient's rotation.
    """
    (batch, seq, heads, size), half = x.shape, cos.shape[-1]
    out = x.new_empty(x.shape)
    if out.numel():
        at_once = min(HEADS, triton.next_power_of_2(heads))
        _rotate[(batch * seq,)](
            x, cos, sin, out, seq, *x.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(1),
            heads, size, half, interleaved, backward, at_once, triton.next_power_of_2(half),
            triton.next_power_of_2(max(size - 2 * half, 1)),
            num_warps=4 if at_once * half >= 512 else 1, enable_fp_fusion=False,
        )  # fmt: skip
    return out
