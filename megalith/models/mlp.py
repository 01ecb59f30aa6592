"""The feed-forward half of a layer: GELU as in GPT-2, or gated (Shazeer 2020): SiLU as in Llama, GELU as in Gemma."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.linear import Linear
from megalith.models.pass_context import Context, Runnable, runnable
from megalith.ops.activation import ACTIVATIONS, gated_activation


class MLP(Runnable):
    """linear_fc1, non-linearity, linear_fc2. With a gate, rows of fc1 alternate: gate 0, up 0, gate 1, up 1, …"""

    def __init__(self, config: ModelConfig, device: torch.device | None = None, ffn_size: int | None = None):
        """`ffn_size`: a width other than the configuration's."""
        super().__init__()
        ffn_size = ffn_size or config.ffn_size
        plain = ACTIVATIONS[config.mlp_activation]
        self.activation = partial(gated_activation, plain) if config.gated else plain
        width = ffn_size * (2 if config.gated else 1)
        bias = config.mlp_bias
        self.linear_fc1 = Linear(config.hidden_size, width, bias=bias, device=device)
        self.linear_fc2 = Linear(ffn_size, config.hidden_size, bias=bias, device=device)

    @runnable
    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:  # [batch, seq, hidden]
        x = self.linear_fc1(x, context, then=self.activation)  # [batch, seq, ffn]
        return self.linear_fc2(x, context)
