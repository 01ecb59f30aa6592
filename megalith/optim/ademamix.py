"""AdEMAMix (Pagliardini et al. 2024): AdamW with a second, slow average of the gradient.

     m1, m2, v  = averages of g, g and g² with beta1, beta3 and beta2
     update     = (m1 / (1 - beta1^t) + alpha · m2) / (√(v / (1 - beta2^t)) + eps)
     w          = w - lr · (update + weight_decay · w)

During the first `ademamix_warmup_iters` steps alpha grows linearly from 0, and beta3 grows from beta1 such that the
half-life of its average grows linearly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.functional import FunctionalOptimizer, State, bias_correction, scalar_of, zeros_of
from megalith.optim.optimizer import TrainedParameter, register_optimizer

HALF_LIFE_EPS = 1e-8  # as in the authors' code


class AdEMAMix(FunctionalOptimizer):
    """AdEMAMix with the moments `exp_avg`, `exp_avg_slow` and `exp_avg_sq`."""

    def initial_state(self, item: TrainedParameter) -> dict[str, Tensor]:
        moments = {key: zeros_of(item) for key in ("exp_avg", "exp_avg_slow", "exp_avg_sq")}
        return {"step": scalar_of(item), **moments}

    def update(
        self, item: TrainedParameter, gradient: Tensor, state: State, group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, step, lr = self.config, state["step"] + 1, group["lr"]
        alpha, beta3 = self._slow_average(step)
        fast = state["exp_avg"].lerp(gradient, 1 - config.adam_beta1)
        slow = state["exp_avg_slow"].lerp(gradient, 1 - beta3)
        square = state["exp_avg_sq"].lerp(gradient.square(), 1 - config.adam_beta2)
        root = (square / bias_correction(config.adam_beta2, step)).sqrt() + group["eps"]
        update = (fast / bias_correction(config.adam_beta1, step) + alpha * slow) / root
        value = item.parameter * (1 - lr * group["weight_decay"]) - lr * update
        return value, {"step": step, "exp_avg": fast, "exp_avg_slow": slow, "exp_avg_sq": square}

    def _slow_average(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and beta3 of a step, two scalars."""
        config = self.config
        first, last = (_half_life(beta) for beta in (config.adam_beta1, config.ademamix_beta3))
        done = (
            (step / config.ademamix_warmup_iters).clamp(max=1.0)
            if config.ademamix_warmup_iters
            else step * 0 + 1
        )
        grown = 0.5 ** (1 / (first + done * (last - first) + 1))
        return config.ademamix_alpha * done, torch.where(done < 1, grown, config.ademamix_beta3)


def _half_life(beta: float) -> float:
    return math.log(0.5) / math.log(beta + HALF_LIFE_EPS) - 1


@register_optimizer("ademamix", state_bytes=lambda config: (12, 12))
def build_ademamix(parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str) -> AdEMAMix:
    return AdEMAMix(parameters, config)
