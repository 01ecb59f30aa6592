"""AdamW (Loshchilov and Hutter 2019) for one large fp32 parameter, in one pass over memory.

torch's fused kernel also writes back the unscaled gradient, which is not needed, and divides parameters into pieces
that leave a third of the memory bandwidth unused.
"""

from __future__ import annotations

from math import log

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from megalith.ops.kernels.kernel_launch import Launcher

ELEMENTS, WARPS = 1024, 8  # per program
MIN_BETA = 1e-30  # replaces a beta of 0, which has no logarithm; 1 - MIN_BETA^age is 1 in fp32


@triton.jit
def _adamw(
    value, grad, first, second, step, grad_scale, found_inf, count, lr, decay, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        age, unscaled = tl.load(step), 1 / tl.load(grad_scale)
        rate = -lr / libdevice.expm1(age * LOG1)  # expm1 keeps 1 - beta^age exact while it is small
        correction = tl.rsqrt(-libdevice.expm1(age * LOG2))
        offsets = tl.cast(tl.program_id(0), tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        mask = offsets < count
        g = tl.load(grad + offsets, mask=mask) * unscaled
        m = BETA1 * tl.load(first + offsets, mask=mask) + (1 - BETA1) * g
        v = BETA2 * tl.load(second + offsets, mask=mask) + (1 - BETA2) * g * g
        x = tl.load(value + offsets, mask=mask)
        x -= decay * x
        x -= rate * m / (tl.sqrt(v) * correction + eps)
        tl.store(value + offsets, x, mask=mask)
        tl.store(first + offsets, m, mask=mask)
        tl.store(second + offsets, v, mask=mask)


_launch = Launcher(_adamw)


def adamw_(
    value: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update contiguous fp32 tensors of one shape in place: `value`, with moments `first` and `second`.

    `step` (including this one), `grad_scale` (divides the gradient) and `found_inf` (nonzero: change nothing) are
    float32 scalars on the device.
    """
    count = value.numel()
    _launch(
        (-(-count // ELEMENTS), 1, 1),
        (value, grad, first, second, step, grad_scale, found_inf),
        (count,),
        (float(lr), float(lr * weight_decay), float(eps)),
        (*betas, *(log(beta or MIN_BETA) for beta in betas), ELEMENTS),
        WARPS,
    )
