"""Rotary position embedding (Su et al. 2021): queries and keys turn by an angle that grows with their position.

Pair j of a head's dimensions, (x_j, x_{j + size/2}), turns by position · base^(−2j/size), where size is the head's or
with rotary_percent a part of it. Attention then sees only differences of positions. Scaling stretches the slow pairs so
that a model reaches beyond its training length: Llama 3's rule (Grattafiori et al. 2024) and YaRN (Peng et al. 2023)
leave the fast pairs as they are; LongRoPE (Ding et al. 2024) has a factor for each pair, found by a search.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.config import ModelConfig, RopeScaling

Tables = tuple[Tensor, Tensor]  # cosines and sines, float32 [batch, seq, 1, size / 2]


def rotary_tables(config: ModelConfig, position_ids: Tensor, length: int) -> Tables:
    """The tables at position_ids int64 [batch, seq], of sequences that are `length` tokens long in whole."""
    frequencies, magnitude = _scaled(config, length, position_ids.device)
    return _tables(position_ids, frequencies, magnitude)


def local_rotary_tables(config: ModelConfig, position_ids: Tensor) -> Tables:
    """Those of layers with a window, where they have a base of their own: rotary_base_local, never scaled."""
    frequencies = _frequencies(config.rotary_size, config.rotary_base_local, position_ids.device)
    return _tables(position_ids, frequencies, 1.0)


def rotate(x: Tensor, tables: Tables, interleaved: bool = False) -> Tensor:
    """Turns x [batch, seq, heads, head_dim] by the tables of its positions; computed in fp32. `interleaved`: pair j is
    (x_2j, x_2j+1)."""
    cos, sin = tables
    size = 2 * cos.shape[-1]
    part = x[..., :size].float()
    first, second = part.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    turned = turned.to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], dim=-1)


def _tables(position_ids: Tensor, frequencies: Tensor, magnitude: float) -> Tables:
    angles = position_ids[..., None, None].float() * frequencies  # [batch, seq, 1, size / 2]
    return angles.cos() * magnitude, angles.sin() * magnitude


def _frequencies(size: int, base: float, device: torch.device) -> Tensor:
    """Radians a token for each pair of dimensions: [size / 2]."""
    return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)


def _scaled(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, float]:
    """The frequencies as rope_scaling stretches them, and the factor on cosines and sines."""
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

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    scaled = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1 - scaled + scaled / scaling.factor)


def _yarn_magnitude(scaling: RopeScaling) -> float:
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.magnitude(scaling.mscale) / scaling.magnitude(scaling.mscale_all_dim)
    return scaling.magnitude()


def _longrope_magnitude(scaling: RopeScaling) -> float:
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
