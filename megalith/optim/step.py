"""One optimizer step: gradient norm, clipping, unscaling and the skip of non-finite gradients.

The gradients hold loss_scale times the true gradient. Four scalars are computed on the device:

    norm       = ‖gradients‖ / loss_scale                  over the whole model, in fp32
    found_inf  = 1 when the norm is not finite, else 0
    clip       = min(1, clip_grad / (norm + 1e-6))
    grad_scale = loss_scale / clip

and handed to torch's fused optimizer, as torch.amp.GradScaler does: its kernel divides each gradient by
`grad_scale` while it reads it, and leaves everything as it is when `found_inf` is 1. So unscaling and
clipping cost no pass of their own, a non-finite gradient skips the update in every precision, and the host
never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.optim.loss_scale import LossScale

CPU_BLOCK = (
    8192  # torch's CPU norm adds up in fp32: of 40 million equal elements it is 2% off, of a block 3e-6
)


@dataclass(frozen=True)
class StepResult:
    """What a step found out: fp32 scalars on the device, to be read when there is a log line to write."""

    grad_norm: Tensor
    """Norm of the unscaled gradient before clipping; not finite when the step was skipped."""

    skipped: Tensor
    """1 when the gradient was not finite and nothing changed, else 0."""

    loss_scale: Tensor
    """The scale that this step's loss was multiplied by."""


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements of fp32 tensors of one device, as an fp32 scalar there.

    Its root is accurate to 3e-6 whatever the sizes, so that it does not depend on how a parameter is cut.
    """
    blocks = []
    for gradient in gradients:
        blocks += gradient.flatten().split(CPU_BLOCK) if gradient.device.type == "cpu" else [gradient]
    return torch.stack(torch._foreach_norm(blocks)).square().sum()


def gradient_squares(parameters: Iterable[Tensor]) -> Tensor:
    """Sum of squares of the gradients of parameters that all have one, as an fp32 scalar."""
    return sum_of_squares(parameter.grad for parameter in parameters)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    loss_scale: LossScale,
    clip_grad: float,
    total_squares: Callable[[list[Tensor]], Tensor] = gradient_squares,
) -> StepResult:
    """Clips, unscales and applies the gradients in `.grad`, or skips them all; then moves the loss scale on.

    `clip_grad` is the largest norm allowed; 0 means no clipping. `total_squares` gives the sum of squares of
    the gradients of the parameters that it is given; a parallel run passes one that counts each logical
    parameter once and adds up over the ranks, so that all of them clip and skip alike. The gradients are
    used up: what they hold afterwards, clipped and unscaled or as before, depends on the kernel.

    In a skipped step parameters and optimizer state, step counts included, stay bitwise what they were.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    scale = loss_scale.scale
    norm = total_squares(parameters).sqrt() / scale
    found_inf = (~norm.isfinite()).to(torch.float32)
    clip = (clip_grad / (norm + 1e-6)).clamp(max=1.0) if clip_grad > 0 else torch.ones_like(norm)

    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = scale / clip
        optimizer.found_inf = found_inf
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    elif not found_inf.item():  # an optimizer of one's own
        torch._foreach_div_([parameter.grad for parameter in parameters], scale / clip)
        optimizer.step()
    loss_scale.update(found_inf)
    return StepResult(grad_norm=norm, skipped=found_inf, loss_scale=scale)
