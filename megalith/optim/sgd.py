"""torch's fused SGD with momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalith.config import OptimConfig
from megalith.optim.optimizer import TrainedParameter, decay_groups, register_optimizer


@register_optimizer("sgd", supports_offload=True, state_bytes=lambda config: (4, 4))
def build_sgd(parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str) -> torch.optim.SGD:
    groups, momentum = decay_groups(parameters, config), config.sgd_momentum
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=momentum, fused=True)
    for item in parameters:
        buffer = {"momentum_buffer": torch.zeros_like(item.parameter, device=item.state_device)}
        optimizer.state[item.parameter] = buffer if momentum else {}
    return optimizer
