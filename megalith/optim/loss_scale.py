"""Loss scale: a factor of the loss that prevents small fp16 gradients from underflowing.

The dynamic scale (Micikevicius et al., "Mixed precision training") starts high, halves when gradients overflow, and
doubles after `loss_scale_window` consecutive good steps. Hysteresis as in Megatron: overflows are counted from one
doubling to the next, and overflow number `hysteresis` and each later one halve the scale. Only doubling resets the
count.

The state is three scalars on the device, updated there, so that a step never waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.config.rules.optim_rules import check_loss_scale

LARGEST_SCALE = 2.0**127  # the largest power of two in fp32


class ConstantLossScale:
    """Constant loss scale, 1 in fp32 and bf16."""

    def __init__(self, scale: float, device: torch.device | str) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Do nothing."""

    def state(self) -> dict[str, float]:
        """Return an empty state; the configuration determines the scale."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Do nothing."""


class DynamicLossScale:
    """Megatron's DynamicGradScaler with device tensors. `scale` is an fp32 scalar."""

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_interval: int,
        hysteresis: int,
        device: torch.device | str,
    ) -> None:
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.scale = torch.tensor(initial_scale, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.allowance = torch.full((), hysteresis, dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Update the scale on the device. `found_inf` is a scalar: 1 if the gradient was not finite, otherwise 0."""
        overflow = found_inf != 0
        good_steps = torch.where(overflow, 0, self.good_steps + 1)
        allowance = torch.where(overflow, self.allowance - 1, self.allowance)
        grows = good_steps == self.growth_interval
        halves = overflow & (allowance <= 0)
        factor = torch.where(grows, 2.0, torch.where(halves, 0.5, 1.0))
        # New tensors, because a StepResult may still refer to the old scale.
        self.scale = (self.scale * factor).clamp(self.min_scale, LARGEST_SCALE)
        self.good_steps = torch.where(grows, 0, good_steps)
        self.allowance = torch.where(grows, self.hysteresis, allowance)

    def state(self) -> dict[str, float]:
        """Return the state as Python numbers, for a checkpoint. Waits for the device."""
        return {
            "scale": self.scale.item(),
            "growth_tracker": self.good_steps.item(),
            "hysteresis_tracker": self.allowance.item(),
        }

    def load_state(self, state: dict[str, float]) -> None:
        """Load a stored state. An empty state, from a run with a constant scale, changes nothing."""
        if state:
            self.scale.fill_(state["scale"])
            self.good_steps.fill_(state["growth_tracker"])
            self.allowance.fill_(state["hysteresis_tracker"])


LossScale = ConstantLossScale | DynamicLossScale


def build_loss_scale(precision: str, config: OptimConfig, device: torch.device | str) -> LossScale:
    """Return a constant scale if `loss_scale` is set; otherwise a dynamic scale in fp16, and 1 in bf16 and fp32.

    Raises ConfigError in the same cases as `check_loss_scale`.
    """
    check_loss_scale(config, precision)
    if config.loss_scale is not None:
        return ConstantLossScale(config.loss_scale, device)
    if precision != "fp16":
        return ConstantLossScale(1.0, device)
    return DynamicLossScale(
        config.initial_loss_scale,
        config.min_loss_scale,
        config.loss_scale_window,
        config.hysteresis,
        device,
    )
