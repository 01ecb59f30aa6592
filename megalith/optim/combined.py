"""Several optimizers that update disjoint parameters in one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.compat.training_objects import supports_amp_scaling


def combine(parts: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an optimizer that steps `parts` in this order. A single optimizer is returned unchanged."""
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


class CombinedOptimizer(torch.optim.Optimizer):
    """Combines optimizers of disjoint parameters. Their groups are concatenated, and they share one state.

    `optimizer_step` calls `step` after it has set `grad_scale` and `found_inf`. `step` is a collective call if the
    `step` of any part is.
    """

    _step_supports_amp_scaling = True

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        """Combine the optimizers `parts`, including their states."""
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for part in self.parts:
            step_scaled(part, self.grad_scale, self.found_inf)


def step_scaled(optimizer: torch.optim.Optimizer, grad_scale: Tensor, found_inf: Tensor) -> None:
    """Step an optimizer on gradients divided by `grad_scale`, or change nothing if `found_inf` is 1.

    The host waits for the device only if the optimizer does not handle `grad_scale` and `found_inf` itself.
    """
    if supports_amp_scaling(optimizer):
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    elif not found_inf.item():
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if gradients:
            torch._foreach_div_(gradients, grad_scale)
        optimizer.step()
