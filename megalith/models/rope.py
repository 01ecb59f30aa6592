"""Rotary position embedding (Su et al. 2021): queries and keys turn by an angle that grows with their position.

Pair j of a head's dimensions, (x_j, x_{j + head_dim/2}), turns by position · base^(−2j/head_dim). Attention then sees
only differences of positions. Scaling stretches the slow pairs so that a model reaches beyond its training length:
Llama 3's rule (Grattafiori et al. 2024) and YaRN (Peng et al. 2023) leave the fast pairs as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.config import ModelConfig, RopeScaling


def rotary_tables(config: ModelConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [batch, seq, 1, head_dim / 2], at position_ids int64 [batch, seq]."""
    frequencies, magnitude = _frequencies(config, position_ids.device)
    angles = position_ids[..., None, None].float() * frequencies  # [batch, seq, 1, head_dim / 2]
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turns x [batch, seq, heads, head_dim] by the tables of its positions; computed in fp32."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Radians a token for each pair of dimensions [head_dim / 2], and the factor on cosines and sines."""
    size = config.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequencies = 1.0 / config.rotary_base**exponents
    scaling = config.rope_scaling
    match scaling.type if scaling else None:
        case None:
            return frequencies, 1.0
        case "linear":
            return frequencies / scaling.factor, 1.0
        case "llama3":
            return _llama3(frequencies, scaling), 1.0
        case "yarn":
            magnitude = scaling.attention_factor or _yarn_magnitude(scaling.factor)
            return _yarn(frequencies, size, config.rotary_base, scaling), magnitude


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow pairs are divided by factor, fast ones kept, those between blended by their turns over the original."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, size: int, base: float, scaling: RopeScaling) -> Tensor:
    """As llama3, but blended linearly over the pair's number, between those of beta_fast and beta_slow turns."""

    def pair_with(turns: float) -> float:
        period = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(period) / (2 * math.log(base))

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), size - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    scaled = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1 - scaled + scaled / scaling.factor)


def _yarn_magnitude(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
