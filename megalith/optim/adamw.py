"""torch's AdamW, with the large parameters on a GPU stepped by our own kernel (ops/kernels/adam_kernel.py)."""

from __future__ import annotations

import torch
from torch import nn

from megalith.ops import kernels as fused

LEAST = 2**18  # elements; below, torch steps many parameters with one launch


class AdamW(torch.optim.AdamW):
    """Fused. It is stepped by `optimizer_step`, which sets `grad_scale` and `found_inf`."""

    @torch.no_grad()
    def step(self) -> None:
        """Steps every parameter that has a gradient. Gradients of large ones are left as they were."""
        large = [
            (group, p, p.grad) for group in self.param_groups for p in group["params"] if self._is_large(p)
        ]
        for _, parameter, _ in large:
            parameter.grad = None  # which torch takes as: not to be stepped
        super().step()
        steps = [self.state[parameter]["step"] for _, parameter, _ in large]
        if steps:
            # A list: the value of a single tensor would be read on the host.
            torch._foreach_add_(steps, [1 - self.found_inf] * len(steps))
        for (group, parameter, grad), step in zip(large, steps):
            parameter.grad = grad
            state = self.state[parameter]
            fused.adamw_(
                parameter, grad, state["exp_avg"], state["exp_avg_sq"], step, self.grad_scale, self.found_inf,
                group["lr"], group["betas"], group["eps"], group["weight_decay"],
            )  # fmt: skip

    def _is_large(self, parameter: nn.Parameter) -> bool:
        grad = parameter.grad
        if grad is None or not (fused.AVAILABLE and parameter.is_cuda) or parameter.numel() < LEAST:
            return False
        return parameter.is_contiguous() and grad.is_contiguous()
