"""Calls of a prepared model that Megalith does not have, and what to call instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalith.errors import ConfigError

NO_LOGITS_GRADIENT = (
    "a loss computed from the model's logits has no gradient, because the backward passes run inside the model's call "
    "and no rank has the full logits; pass labels to the model and use outputs.loss, or set MegatronLMPlugin's "
    "custom_loss_function"
)


class PreparedModelError(ConfigError, AttributeError):
    """An attribute or method of the script's model that a prepared model does not have."""


def unsupported_method(name: str, advice: str) -> Any:
    """Return a method that raises PreparedModelError."""

    def method(self: nn.Module, *args: Any, **options: Any) -> Any:
        raise PreparedModelError(
            f"{name} is not available for the prepared model, whose weights are sharded over the ranks; {advice}"
        )

    return method


class NoGradient(torch.autograd.Function):
    """Identity function whose backward pass raises ConfigError with a given message."""

    @staticmethod
    def forward(ctx, value: Tensor, anchor: Tensor, message: str) -> Tensor:
        ctx.message = message
        return value.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise ConfigError(ctx.message)
