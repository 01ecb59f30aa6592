"""Schedule-free AdamW (Defazio et al. 2024): AdamW without a decay of the learning rate, by averaging its iterates.

During training, the weights of the model are y, at which gradients are computed. AdamW's steps update z. x is the
average of all z, which is evaluated and exported (averages.py):

     lr_t   = lr · √(1 - beta2^t),  c = lr_max² / Σ lr_max²,  where lr_max is the highest lr_t so far
     u      = g / (√v + eps) + weight_decay · y
     y      = (1 - c) · y + c · z + lr_t · (beta1 · (1 - c) - 1) · u
     z      = z - lr_t · u
     x      = y + (1 - 1 / beta1) · (z - y)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.functional import FunctionalOptimizer, State, bias_correction, scalar_of, zeros_of
from megalith.optim.optimizer import TrainedParameter, register_optimizer


class ScheduleFreeAdamW(FunctionalOptimizer):
    """Schedule-free AdamW with the state `z` and `exp_avg_sq`. z begins at the weights of the first step."""

    def initial_state(self, item: TrainedParameter) -> dict[str, Tensor]:
        scalars = {key: scalar_of(item) for key in ("step", "weight_sum", "lr_max")}
        return scalars | {"z": zeros_of(item), "exp_avg_sq": zeros_of(item)}

    def update(
        self, item: TrainedParameter, gradient: Tensor, state: State, group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, y, step = self.config, item.parameter, state["step"] + 1
        z = torch.where(state["step"] > 0, state["z"], y)
        lr = group["lr"] * bias_correction(config.adam_beta2, step).sqrt()
        lr_max = torch.maximum(lr, state["lr_max"])
        weight_sum = state["weight_sum"] + lr_max.square()
        share = torch.where(weight_sum > 0, lr_max.square() / weight_sum, 0.0)
        square = state["exp_avg_sq"].lerp(gradient.square(), 1 - config.adam_beta2)
        update = gradient / (square.sqrt() + group["eps"]) + group["weight_decay"] * y
        value = y.lerp(z, share) + lr * (config.adam_beta1 * (1 - share) - 1) * update
        scalars = {"step": step, "weight_sum": weight_sum, "lr_max": lr_max}
        return value, scalars | {"z": z - lr * update, "exp_avg_sq": square}


@register_optimizer("schedule_free_adamw", state_bytes=lambda config: (8, 8))
def build_schedule_free_adamw(
    parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str
) -> ScheduleFreeAdamW:
    return ScheduleFreeAdamW(parameters, config)
