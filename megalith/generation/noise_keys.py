"""Keys of the sampling noise of completions, from the seed and the completions' stream keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalith.ops.dropout import token_keys


def noise_keys(seed: int, stream_keys: Sequence[int]) -> list[int]:
    """Return the keys of the sampling noise of completions, from the run's seed and one stream key per completion."""
    samples = torch.tensor(stream_keys, dtype=torch.int64)  # may be empty on a replica
    return token_keys(seed, samples, torch.zeros(1, dtype=torch.int64))[:, 0].tolist()


def noise_key(seed: int, stream_key: int) -> int:
    """Return `noise_keys(seed, [stream_key])[0]`, computed in plain Python, which is faster for a single key."""
    low, high = stream_key & 0xFFFFFFFF, stream_key >> 32 & 0xFFFFFFFF
    sample = _mix(low ^ _mix(high ^ (seed * 0x9E3779B1 & 0xFFFFFFFF)))
    key = _mix(sample ^ _mix(0x632BE5AB))
    return key - (1 << 32) if key >= 1 << 31 else key


def _mix(h: int) -> int:
    """Apply Murmur3's finalizer to 32 bits."""
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16
