"""Sinusoidal positions (Vaswani et al. 2017), all sines before all cosines.

    position p of width 2n = [sin(p · f_0), …, sin(p · f_{n-1}), cos(p · f_0), …, cos(p · f_{n-1})]
    f_i = 10000^(-i / n)         `exclusive`: Marian, Pegasus, CTRL
    f_i = 10000^(-i / (n - 1))   `inclusive`: fairseq's M2M100, XGLM

Each spacing is computed in the precision of the model's published code: float64 and float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config import ModelConfig

BASE = 10000.0


class Sinusoids(NamedTuple):
    """Positions that are computed from their numbers."""

    width: int
    first: int
    inclusive: bool

    @classmethod
    def of_model(cls, config: ModelConfig) -> Sinusoids:
        """Return the positions of a model with `position_embedding_type: sinusoidal`."""
        inclusive = config.sinusoidal_spacing == "inclusive"
        return cls(config.hidden_size, config.sinusoidal_first_position, inclusive)

    def __call__(self, position_ids: Tensor) -> Tensor:
        """Return the positions, float32 [*shape, width], for position_ids, int64 of any shape."""
        half = self.width // 2
        index = torch.arange(half, device=position_ids.device)
        if self.inclusive:
            frequencies = torch.exp(index.float() * -(math.log(BASE) / (half - 1)))
            angles = (position_ids + self.first).float()[..., None] * frequencies
        else:
            angles = (position_ids + self.first).double()[..., None] / BASE ** (
                2 * index.double() / self.width
            )
        return torch.cat([angles.sin(), angles.cos()], dim=-1).float()
