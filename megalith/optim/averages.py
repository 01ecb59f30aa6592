"""Weight averages over steps, which are evaluated and exported instead of the weights.

With `optim.ema_decay`, the state of each parameter has an exponential moving average, `ema`:

     ema = w after the first step, then ema_decay · ema + (1 - ema_decay) · w

Schedule-free AdamW's average follows from its weights and its state `z` (schedule_free.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from megalith.config import OptimConfig

EMA, EMA_STEP, Z = "ema", "ema_step", "z"


def add_ema(optimizer: torch.optim.Optimizer) -> None:
    """Add an exponential moving average to every parameter's state: fp32 on the parameter's device."""
    for parameter in _parameters(optimizer):
        optimizer.state[parameter] |= {
            EMA: torch.zeros_like(parameter),
            EMA_STEP: torch.zeros((), dtype=torch.float32, device=parameter.device),
        }


@torch.no_grad()
def update_ema(optimizer: torch.optim.Optimizer, decay: float, skipped: Tensor) -> None:
    """Update the moving averages after a step. A skipped step changes nothing.

    Args:
        optimizer: optimizer to which `add_ema` has added averages.
        decay: weight of the average so far.
        skipped: 1 if the step was skipped, otherwise 0; a scalar on the device.
    """
    for parameter in _parameters(optimizer):
        state = optimizer.state[parameter]
        average = torch.where(state[EMA_STEP] > 0, state[EMA].lerp(parameter, 1 - decay), parameter)
        state[EMA].copy_(torch.where(skipped > 0, state[EMA], average))
        state[EMA_STEP] += 1 - skipped


def average_from_z(weights: Tensor, z: Tensor, beta1: float) -> Tensor:
    """Return schedule-free AdamW's average of the weights."""
    return weights.lerp(z, 1 - 1 / beta1)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer, config: OptimConfig) -> Iterator[None]:
    """Replace the weights by their average within the context. Afterwards, restore them bitwise.

    Parameters without an average, and all parameters before the first step, keep their weights. Meanwhile the tensor
    `ema` holds the weights. For schedule-free AdamW the weights are copied, which takes 4 bytes per parameter of this
    rank's shard.
    """
    restore = []
    with torch.no_grad():
        for parameter in _parameters(optimizer):
            state: Mapping[str, Tensor] = optimizer.state[parameter]
            if EMA in state and state[EMA_STEP] > 0:
                restore.append((parameter, state[EMA]))
                _exchange(parameter, state[EMA])
            elif Z in state and state["step"] > 0:
                restore.append((parameter, parameter.clone()))
                parameter.copy_(average_from_z(parameter, state[Z], config.adam_beta1))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, saved in restore:
                _exchange(parameter, saved)


def _exchange(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
