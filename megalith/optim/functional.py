"""Base class of optimizers that compute the update of each parameter by a pure function.

The base class unscales gradients and skips steps that are not finite on the device, so that the host never waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import OptimConfig
from megalith.optim.optimizer import TrainedParameter, decay_groups

State = Mapping[str, Tensor]


class FunctionalOptimizer(torch.optim.Optimizer):
    """Optimizer defined by `initial_state` and `update`.

    `optimizer_step` calls `step` after it has set `grad_scale` and `found_inf`. `step` is a collective call if `update`
    is one.
    """

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Sequence[TrainedParameter], config: OptimConfig):
        """Build the optimizer for `parameters`, with state at zero."""
        super().__init__(decay_groups(parameters, config), {"lr": config.lr})
        self.config = config
        self._items = {item.parameter: item for item in parameters}
        for item in parameters:
            self.state[item.parameter] = self.initial_state(item)

    def initial_state(self, item: TrainedParameter) -> dict[str, Tensor]:
        """Return the state that a parameter has before the first step."""
        raise NotImplementedError

    def update(
        self, item: TrainedParameter, gradient: Tensor, state: State, group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a parameter's value and state after a step, as new tensors.

        Args:
            item: the parameter with its placement.
            gradient: unscaled and clipped gradient, fp32, of the parameter's local shape.
            state: state before the step.
            group: parameter group, with `lr` and `weight_decay`.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        skip = self.found_inf > 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad / self.grad_scale
                value, changes = self.update(self._items[parameter], gradient, state, group)
                parameter.copy_(torch.where(skip, parameter, value))
                self.store(parameter, changes, skip)

    def store(self, parameter: nn.Parameter, changes: Mapping[str, Tensor], skip: Tensor) -> None:
        """Copy `changes` into a parameter's state, unless `skip` is true."""
        state = self.state[parameter]
        for key, changed in changes.items():
            state[key].copy_(torch.where(skip, state[key], changed))


def zeros_of(item: TrainedParameter) -> Tensor:
    """Return zeros of the parameter's local shape."""
    return torch.zeros_like(item.parameter)


def scalar_of(item: TrainedParameter) -> Tensor:
    """Return an fp32 zero on the parameter's device."""
    return torch.zeros((), dtype=torch.float32, device=item.parameter.device)


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step, exact for small steps."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)
