"""Mixers: the modules of a layer that move information between tokens.

A mixer has `forward(x, context)`: from the normalized residual stream, [batch, seq, hidden] or with sequence
parallelism [1, tokens / tp, hidden], to a branch's output of the same shape. The Context has all else: positions,
masks, and the sequence that cross-attention attends to. A class attribute `roles` assigns roles of tensor parallelism
to submodules whose names are not in `ROLES`: {"linear_in": "linear_fc1"}.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megalith.config import ModelConfig
from megalith.models.mixers.attention import SelfAttention
from megalith.models.mixers.gated_delta_net import GatedDeltaNet
from megalith.models.mixers.mla import LatentAttention

MakeMixer = Callable[[ModelConfig, int, torch.device | None], nn.Module]


def make_mixer(config: ModelConfig, number: int, device: torch.device | None = None) -> nn.Module:
    """Return the mixer that the configuration has for layer `number`."""
    if number in config.linear_attention_layers:
        return GatedDeltaNet(config, number, device)
    mixer = LatentAttention if config.multi_latent_attention else SelfAttention
    return mixer(config, number, device)
