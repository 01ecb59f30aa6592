"""Scaling of RoPE beyond the original context length."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from megalith.config.base import RequiresSetting, Section


class RopeScaling(Section):
    """Scaling of RoPE frequencies beyond the original context length."""

    type: Literal["linear", "llama3", "yarn", "longrope"] = "llama3"
    """Scaling method: `linear` divides all frequencies by factor, `longrope` each by its own value, `llama3` and `yarn`
    by an amount that depends on the frequency."""

    factor: PositiveFloat = 8.0
    """Ratio of the new context length to the original."""

    original_max_position_embeddings: Annotated[
        PositiveInt, RequiresSetting("type", "llama3", "yarn", "longrope")
    ] = 8192
    """Context length of the original training, in tokens."""

    low_freq_factor: Annotated[PositiveFloat, RequiresSetting("type", "llama3")] = 1.0
    """llama3: wavelengths longer than original / low_freq_factor are divided by factor."""

    high_freq_factor: Annotated[PositiveFloat, RequiresSetting("type", "llama3")] = 4.0
    """llama3: wavelengths shorter than original / high_freq_factor are unchanged."""

    beta_fast: Annotated[PositiveFloat, RequiresSetting("type", "yarn")] = 32.0
    """yarn: dimensions with more rotations than this over the original length are unchanged."""

    beta_slow: Annotated[PositiveFloat, RequiresSetting("type", "yarn")] = 1.0
    """yarn: dimensions with fewer rotations than this over the original length are divided by factor."""

    attention_factor: Annotated[PositiveFloat | None, RequiresSetting("type", "yarn", "longrope")] = None
    """Scale of cosines and sines. Default: yarn 0.1 · ln(factor) + 1, longrope √(1 + ln(factor) / ln(original))."""

    truncate: Annotated[bool, RequiresSetting("type", "yarn")] = True
    """yarn: round the bounds of the blended range to whole dimensions (off for gpt-oss)."""

    mscale: Annotated[PositiveFloat | None, RequiresSetting("type", "yarn")] = None
    """yarn: cosines and sines are scaled by (0.1 · mscale · ln(factor) + 1), divided by the same expression with
    mscale_all_dim (DeepSeek)."""

    mscale_all_dim: Annotated[PositiveFloat | None, RequiresSetting("type", "yarn")] = None
    """yarn: attention scores are multiplied by (0.1 · mscale_all_dim · ln(factor) + 1)²."""

    short_factor: Annotated[list[PositiveFloat] | None, RequiresSetting("type", "longrope")] = None
    """longrope: divisors of the frequencies in sequences up to the original length."""

    long_factor: Annotated[list[PositiveFloat] | None, RequiresSetting("type", "longrope")] = None
    """longrope: divisors of the frequencies in longer sequences."""

    def magnitude(self, mscale: float = 1.0) -> float:
        """Return yarn's magnitude: 0.1 · mscale · ln(factor) + 1, or 1 if the factor is at most 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def with_megatron_mscales(
    scaling: dict[str, Any], mscale: float, mscale_all_dim: float, latent: bool
) -> dict[str, Any]:
    """Add Megatron-LM's `mscale` and `mscale_all_dim` to the tree of yarn's settings.

    Latent attention scales its scores too if mscale_all_dim is not 0. Otherwise both only scale cosines and sines.
    """
    if mscale_all_dim and latent:
        return {**scaling, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    if not mscale_all_dim and mscale == 1.0:
        return scaling  # with the default magnitude
    magnitude = RopeScaling(factor=scaling["factor"]).magnitude
    denominator = magnitude(mscale_all_dim) if mscale_all_dim else 1
    return {**scaling, "attention_factor": magnitude(mscale) / denominator}
