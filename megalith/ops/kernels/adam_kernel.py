"""AdamW (Loshchilov and Hutter 2019) over one large fp32 parameter, in one pass over memory.

torch's fused kernel also writes back the unscaled gradient, which nothing here reads again, and takes the parameters
in pieces that leave a third of the memory's speed unused.
"""

from __future__ import annotations

from math import log

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from megalith.ops.kernels.kernel_launch import Launcher

ELEMENTS, WARPS = 1024, 8  # a program's part
LEAST = 1e-30  # stands for a decay of 0, which has no logarithm: in fp32 1 - LEAST^age is 1 as well


@triton.jit
def _adamw(
    value, grad, first, second, step, grad_scale, found_inf, count, lr, decay, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        age, unscaled = tl.load(step), 1 / tl.load(grad_scale)
        rate = -lr / libdevice.expm1(age * LOG1)  # of 1 - beta^age nothing is lost while it is small
        narrowed = tl.rsqrt(-libdevice.expm1(age * LOG2))
        places = tl.cast(tl.program_id(0), tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        here = places < count
        g = tl.load(grad + places, mask=here) * unscaled
        m = BETA1 * tl.load(first + places, mask=here) + (1 - BETA1) * g
        v = BETA2 * tl.load(second + places, mask=here) + (1 - BETA2) * g * g
        x = tl.load(value + places, mask=here)
        x -= decay * x
        x -= rate * m / (tl.sqrt(v) * narrowed + eps)
        tl.store(value + places, x, mask=here)
        tl.store(first + places, m, mask=here)
        tl.store(second + places, v, mask=here)


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
    """One step, in place, of contiguous fp32 tensors of one shape: `value`, with moments `first` and `second`.

    float32 scalars on the device: `step`, this one counted; `grad_scale`, which the gradient is divided by;
    `found_inf`, with which, if it is not zero, nothing changes.
    """
    count = value.numel()
    _launch(
        (-(-count // ELEMENTS), 1, 1),
        (value, grad, first, second, step, grad_scale, found_inf),
        (count,),
        (float(lr), float(lr * weight_decay), float(eps)),
        (*betas, *(log(beta or LEAST) for beta in betas), ELEMENTS),
        WARPS,
    )
