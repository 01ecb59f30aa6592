"""Mixers: the modules of a layer that move information between tokens.

A mixer has `forward(x, context)`: from the normalized residual stream, [batch, seq, hidden] or with sequence
parallelism [1, tokens / tp, hidden], to a branch's output of the same shape. The Context has everything else:
positions, masks, and the sequence that cross-attention attends to. A class attribute `roles` assigns roles of tensor
parallelism to submodules whose names are not in `ROLES`: {"linear_in": "linear_fc1"}.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megalith.config import ModelConfig
from megalith.models.mixers.attention import SelfAttention
from megalith.models.mixers.gated_delta_net import GatedDeltaNet
from megalith.models.mixers.kimi_delta_attention import KimiDeltaAttention
from megalith.models.mixers.mamba2 import Mamba2
from megalith.models.mixers.mla import LatentAttention
from megalith.models.mixers.short_conv import ShortConvolution

MakeMixer = Callable[[ModelConfig, int, torch.device | None], nn.Module]


RECURRENT: dict[str, MakeMixer] = {
    "gated_delta_net": GatedDeltaNet,
    "kimi_delta_attention": KimiDeltaAttention,
    "mamba2": Mamba2,
    "short_conv": ShortConvolution,
}
"""Mixers that are not attention, by their names in the configuration."""


def make_mixer(config: ModelConfig, number: int, device: torch.device | None = None) -> nn.Module:
    """Return the mixer that the configuration specifies for layer `number`: attention or one of RECURRENT."""
    mixer = LatentAttention if config.multi_latent_attention else SelfAttention
    if number not in config.attention_layers:
        mixer = RECURRENT[config.recurrent_mixer(number)]
    return mixer(config, number, device)
