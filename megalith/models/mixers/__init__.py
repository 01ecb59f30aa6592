"""Mixers: the part of a layer in which tokens see each other.

A mixer is a module with `forward(x, context)`, from the normed residual stream, [batch, seq, hidden] or under sequence
parallelism [1, tokens / tp, hidden], to what is added to it, of the same shape. All that it needs to know of the tokens
stands in the Context, another sequence that it attends to included. `roles` of its class says which role of tensor
parallelism a module inside of it has whose name is not one of the table: {"linear_in": "linear_fc1"}.
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
    """The mixer of layer `number`, which the configuration names."""
    if number in config.linear_attention_layers:
        return GatedDeltaNet(config, number, device)
    mixer = LatentAttention if config.multi_latent_attention else SelfAttention
    return mixer(config, number, device)
