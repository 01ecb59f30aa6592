"""Adafactor (Shazeer and Stern 2018): stores a matrix's second moments as the product of row and column averages.

The update is the same as in torch.optim.Adafactor:

     rate     = max(1e-3, RMS(w)) · min(lr, 1 / √t)
     v        = averages of g², row · column / mean(row) for a matrix, with weight t^-0.8 for the new value
     update   = g / √v, divided by max(1, RMS(update) / clip_threshold)
     w        = w - lr · weight_decay · w - rate · update

Averages and RMS are over the global parameter. Each rank stores the averages of its own rows and columns. To compute
them, it sums over the ranks that hold the rest of these rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.functional import FunctionalOptimizer, State, scalar_of, zeros_of
from megalith.optim.optimizer import TrainedParameter, register_optimizer

EPS = torch.finfo(torch.float32).eps  # bounds the second moment from below, squared
MIN_RMS = 1e-3


class Adafactor(FunctionalOptimizer):
    """Adafactor with the second moments `row_var` and `col_var` for matrices, and `variance` for vectors."""

    def initial_state(self, item: TrainedParameter) -> dict[str, Tensor]:
        parameter = item.parameter
        if parameter.ndim < 2:
            return {"step": scalar_of(item), "variance": zeros_of(item)}
        rows, columns = parameter.shape[:-1], (*parameter.shape[:-2], parameter.shape[-1])
        row = torch.zeros(*rows, 1, device=parameter.device)
        column = torch.zeros(*columns[:-1], 1, columns[-1], device=parameter.device)
        return {"step": scalar_of(item), "row_var": row, "col_var": column}

    def update(
        self, item: TrainedParameter, gradient: Tensor, state: State, group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shape, total, every = item.global_shape, item.placement.sum, range(len(item.global_shape))
        parameter, step, lr = item.parameter, state["step"] + 1, group["lr"]

        def rms(x: Tensor) -> Tensor:
            return (total(x.square().sum(), every) / math.prod(shape)).sqrt()

        weight = step**self.config.adafactor_beta2_decay
        rate = rms(parameter).clamp(min=MIN_RMS) * step.rsqrt().clamp(max=lr)
        square = gradient.square()
        if len(shape) < 2:
            variance = state["variance"].lerp(square, weight)
            changes = {"variance": variance}
        else:
            rows, columns = len(shape) - 2, len(shape) - 1
            row = total(square.sum(-1, keepdim=True), [columns]) / shape[-1]
            column = total(square.sum(-2, keepdim=True), [rows]) / shape[-2]
            row, column = state["row_var"].lerp(row, weight), state["col_var"].lerp(column, weight)
            mean = total(row.sum(-2, keepdim=True), [rows]) / shape[-2]
            variance = row * column / mean.clamp(min=EPS * EPS)
            changes = {"row_var": row, "col_var": column}
        update = gradient * variance.clamp(min=EPS * EPS).rsqrt()
        clip = (rms(update) / self.config.adafactor_clip_threshold).clamp(min=1.0)
        value = parameter * (1 - lr * group["weight_decay"]) - rate / clip * update
        return value, {"step": step, **changes}


@register_optimizer("adafactor", state_bytes=lambda config: (0, 0))
def build_adafactor(parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str) -> Adafactor:
    return Adafactor(parameters, config)
