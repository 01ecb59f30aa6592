"""Optimizers, loss scale and learning-rate schedule."""

from megalith.optim import (  # noqa: F401 (registers the built-in optimizers)
    adafactor,
    adam,
    ademamix,
    lion,
    muon,
    schedule_free,
    sgd,
    soap,
)
from megalith.optim.loss_scale import ConstantLossScale, DynamicLossScale, LossScale, build_loss_scale
from megalith.optim.optimizer import build_optimizer, set_learning_rate
from megalith.optim.schedule import ParamSchedule, build_schedule
from megalith.optim.step import StepResult, optimizer_step, sum_of_squares

__all__ = [
    "ConstantLossScale",
    "DynamicLossScale",
    "LossScale",
    "ParamSchedule",
    "StepResult",
    "build_loss_scale",
    "build_optimizer",
    "build_schedule",
    "optimizer_step",
    "set_learning_rate",
    "sum_of_squares",
]
