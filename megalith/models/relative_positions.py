"""Relative positions as T5 has them (Raffel et al. 2020): a learned bias of attention's scores by distance.

A distance falls into a bucket. The nearer half of the buckets are single distances, the farther half ranges that grow
logarithmically up to a largest distance, beyond which all are one. Without a causal mask half of the buckets are for
keys behind the query. Each bucket has a number for each head, the same in all layers of a stack.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megalith.comm.collectives import local
from megalith.config import ModelConfig


class RelativeBias(nn.Module):
    """The biases of a stack's heads by distance; weight float32 [buckets, heads]."""

    def __init__(self, config: ModelConfig, causal: bool, device: torch.device | None = None):
        super().__init__()
        self.causal, self.farthest = causal, config.relative_attention_max_distance
        self.buckets = config.relative_attention_num_buckets
        self.weight = nn.Parameter(torch.empty(self.buckets, config.num_attention_heads, device=device))

    def forward(self, places: Tensor) -> Tensor:
        """float32 [1, heads here, seq, seq] for the tokens at these places, int64 [seq]."""
        distances = places[None] - places[:, None]  # [queries, keys]
        buckets = distance_buckets(distances, self.causal, self.buckets, self.farthest)
        return nn.functional.embedding(buckets, local(self.weight)).permute(2, 0, 1)[None]


def distance_buckets(distances: Tensor, causal: bool, buckets: int, farthest: int) -> Tensor:
    """The bucket of each distance, of a key's place from its query's: int64 like `distances`. Causal, keys behind the
    query count as at it."""
    behind = 0
    if causal:
        distances = (-distances).clamp(min=0)
    else:
        buckets //= 2
        behind, distances = (distances > 0).long() * buckets, distances.abs()
    single = buckets // 2
    ratio = torch.log(distances.clamp(min=1).float() / single) / math.log(farthest / single)
    ranges = (single + (ratio * (buckets - single)).long()).clamp(max=buckets - 1)
    return behind + torch.where(distances < single, distances, ranges)
