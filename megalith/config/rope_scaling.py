"""How a model's rotary positions reach further than its first training did."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megalith.config.base import Section


class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the length that the model was first trained on."""

    type: Literal["linear", "llama3", "yarn", "longrope"] = "llama3"
    """`linear` divides all frequencies by factor, `longrope` each by its own; `llama3` and `yarn` by its height."""

    factor: PositiveFloat = 8.0
    """How many times longer than the original the context becomes."""

    original_max_position_embeddings: PositiveInt = 8192
    """The context length of the first training, in tokens."""

    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths longer than original / low_freq_factor are divided by factor."""

    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths shorter than original / high_freq_factor are kept."""

    beta_fast: PositiveFloat = 32.0
    """yarn: dimensions that turn more often than this over the original length are kept."""

    beta_slow: PositiveFloat = 1.0
    """yarn: dimensions that turn less often than this over the original length are divided by factor."""

    attention_factor: PositiveFloat | None = None
    """Scale of the cosines and sines. Absent: yarn 0.1 · ln(factor) + 1, longrope √(1 + ln(factor) / ln(original))."""

    mscale: PositiveFloat | None = None
    """yarn: cosines and sines are scaled by (0.1 · mscale · ln(factor) + 1) / the same of mscale_all_dim (DeepSeek)."""

    mscale_all_dim: PositiveFloat | None = None
    """yarn: attention scores are multiplied by (0.1 · mscale_all_dim · ln(factor) + 1)²."""

    short_factor: list[PositiveFloat] | None = None
    """longrope: what each frequency is divided by, in sequences not longer than the original."""

    long_factor: list[PositiveFloat] | None = None
    """longrope: what each frequency is divided by, in longer sequences."""

    def magnitude(self, mscale: float = 1.0) -> float:
        """yarn: 0.1 · mscale · ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
