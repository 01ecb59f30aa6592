"""Lion (Chen et al. 2023): the sign of an interpolation of gradient and momentum, with decoupled weight decay.

     update   = sign(beta1 · m + (1 - beta1) · g)
     w        = w - lr · (update + weight_decay · w)
     m        = beta2 · m + (1 - beta2) · g

Every element changes by lr in each step, so use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay
3 to 10 times larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.functional import FunctionalOptimizer, State, zeros_of
from megalith.optim.optimizer import TrainedParameter, register_optimizer


class Lion(FunctionalOptimizer):
    """Lion with one moment, `exp_avg`."""

    def initial_state(self, item: TrainedParameter) -> dict[str, Tensor]:
        return {"exp_avg": zeros_of(item)}

    def update(
        self, item: TrainedParameter, gradient: Tensor, state: State, group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        moment, lr = state["exp_avg"], group["lr"]
        direction = moment.lerp(gradient, 1 - self.config.lion_beta1).sign()
        value = item.parameter * (1 - lr * group["weight_decay"]) - lr * direction
        return value, {"exp_avg": moment.lerp(gradient, 1 - self.config.lion_beta2)}


@register_optimizer("lion", state_bytes=lambda config: (4, 4))
def build_lion(parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str) -> Lion:
    return Lion(parameters, config)
