"""Rotary position embedding (Su et al. 2021): queries and keys are rotated by an angle proportional to the position.

Pair j of a head's dimensions, (x_j, x_{j + size/2}), is rotated by position · base^(−2j/size). size is head_dim, or a
fraction of it with rotary_percent. Attention then depends only on differences of positions. Scaling lowers the
frequencies of slow pairs, for sequences longer than in training: Llama 3's rule (Grattafiori et al. 2024) and YaRN
(Peng et al. 2023) leave fast pairs unchanged; LongRoPE (Ding et al. 2024) has one factor per pair, which its authors
found by a search.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.config import ModelConfig, RopeScaling

Tables = tuple[Tensor, Tensor]  # cosines and sines, float32 [batch, seq, 1, size / 2]


def rotary_tables(config: ModelConfig, position_ids: Tensor, length: int) -> Tables:
    """Return the tables at position_ids int64 [batch, seq], of full sequences of `length` tokens."""
    frequencies, magnitude = _scaled(config, length, position_ids.device)
    return _tables(position_ids, frequencies, magnitude)


def local_rotary_tables(config: ModelConfig, position_ids: Tensor) -> Tables:
    """Return the rotary tables of layers with a window, with the base rotary_base_local, which is never scaled."""
    frequencies = _frequencies(config.rotary_size, config.rotary_base_local, position_ids.device)
    return _tables(position_ids, frequencies, 1.0)


def _tables(position_ids: Tensor, frequencies: Tensor, magnitude: float) -> Tables:
    angles = position_ids[..., None, None].float() * frequencies  # [batch, seq, 1, size / 2]
    return angles.cos() * magnitude, angles.sin() * magnitude


def _frequencies(size: int, base: float, device: torch.device) -> Tensor:
    """Return the radians per token of each pair of dimensions: [size / 2]."""
    return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)


def _scaled(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, float]:
    """Return the frequencies scaled according to rope_scaling, and the factor that multiplies cosines and sines."""
    size, scaling = config.rotary_size, config.rope_scaling
    frequencies = _frequencies(size, config.rotary_base, device)
    match scaling.type if scaling else None:
        case None:
            return frequencies, 1.0
        case "linear":
            return frequencies / scaling.factor, 1.0
        case "llama3":
            return _llama3(frequencies, scaling), 1.0
        case "yarn":
            magnitude = scaling.attention_factor or _yarn_magnitude(scaling)
            return _yarn(frequencies, size, config.rotary_base, scaling), magnitude
        case "longrope":
            magnitude = scaling.attention_factor or _longrope_magnitude(scaling)
            long = length > scaling.original_max_position_embeddings
            factors = scaling.long_factor if long else scaling.short_factor
            return frequencies / torch.tensor(factors, device=device), magnitude


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale by Llama 3's rule: divide the frequencies of slow pairs by the factor, keep those of fast pairs, and blend
    in between. Llama 4 has no pairs in between.
    """
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fast = ((rotations - low) / (high - low)).clamp(0.0, 1.0) if low < high else (rotations >= low).float()
    return frequencies * (fast + (1 - fast) / scaling.factor)


def _yarn(frequencies: Tensor, size: int, base: float, scaling: RopeScaling) -> Tensor:
    """Scale like `_llama3`, but blend linearly over pair numbers, between beta_fast and beta_slow rotations."""

    def pair_with(rotations: float) -> float:
        period = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return size * math.log(period) / (2 * math.log(base))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    slow = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1 - slow + slow / scaling.factor)


def _yarn_magnitude(scaling: RopeScaling) -> float:
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.magnitude(scaling.mscale) / scaling.magnitude(scaling.mscale_all_dim)
    return scaling.magnitude()


def _longrope_magnitude(scaling: RopeScaling) -> float:
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
