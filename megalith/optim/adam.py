"""Fused Adam (weight decay added to the gradient) and AdamW (decoupled decay; Loshchilov and Hutter 2019).

AdamW updates large parameters on a GPU with our own kernel (ops/kernels/adam_kernel.py). Moments in bf16 or fp8 are in
moments.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megalith.config import OptimConfig
from megalith.ops import kernels as fused
from megalith.optim.moments import ReducedAdam
from megalith.optim.optimizer import TrainedParameter, decay_groups, register_optimizer

MIN_KERNEL_NUMEL = 2**18  # below, torch updates many parameters with one launch


class AdamW(torch.optim.AdamW):
    """Fused AdamW. `optimizer_step` calls `step` after it has set `grad_scale` and `found_inf`."""

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. Gradients of large parameters stay unchanged."""
        large = [
            (group, p, p.grad) for group in self.param_groups for p in group["params"] if self._is_large(p)
        ]
        for _, parameter, _ in large:
            parameter.grad = None  # hides it from torch's step
        super().step()
        steps = [self.state[parameter]["step"] for _, parameter, _ in large]
        if steps:
            # A list, because torch would read the value of a single tensor on the host.
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
        if (
            grad is None
            or not (fused.AVAILABLE and parameter.is_cuda)
            or parameter.numel() < MIN_KERNEL_NUMEL
        ):
            return False
        return parameter.is_contiguous() and grad.is_contiguous()


@register_optimizer("adamw", supports_offload=True)
def build_adamw(
    parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str
) -> torch.optim.Optimizer:
    if config.reduces_moments:
        return _build(ReducedAdam, parameters, config, decoupled_weight_decay=True)
    return _build(AdamW, parameters, config)


@register_optimizer("adam", supports_offload=True)
def build_adam(
    parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str
) -> torch.optim.Optimizer:
    return _build(ReducedAdam if config.reduces_moments else torch.optim.Adam, parameters, config)


def _build(
    kind: type, parameters: Sequence[TrainedParameter], config: OptimConfig, **settings: Any
) -> torch.optim.Optimizer:
    betas, groups = (config.adam_beta1, config.adam_beta2), decay_groups(parameters, config)
    optimizer = kind(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True, **settings)
    dtypes = config.exp_avg_dtype, config.exp_avg_sq_dtype
    for item in parameters:
        if kind is ReducedAdam and optimizer.add_reduced_state(item, dtypes):
            continue
        parameter, device = item.parameter, item.state_device
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter, device=device),
            "exp_avg_sq": torch.zeros_like(parameter, device=device),
        }
    return optimizer
