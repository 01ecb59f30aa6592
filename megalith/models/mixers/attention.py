"""Attention with grouped queries (Ainslie et al. 2023): each key and value head serves a group of query heads.

`groups` equal to the number of query heads is multi-head attention. Rows of linear_qkv stand by group: its query
heads, then its key head, then its value head, so that a slice of rows is a slice of whole groups. Cross-attention
(Vaswani et al. 2017) has its keys and values from another sequence: rows of linear_kv are a key head and a value head
for each group. Positions turn nothing there, and every token that the mask leaves is looked at.

Relative positions as T5 has them (Raffel et al. 2020) are a learned bias of self-attention's scores by distance. A
distance falls into a bucket. The nearer half of the buckets are single distances, the farther half ranges that grow
logarithmically up to a largest distance, beyond which all are one. Without a causal mask half of the buckets are for
keys behind the query. Each bucket has a number for each head, the same in all layers of a stack.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.norm import HeadNorms, HeadsNorm, Norm, RootMeanSquare
from megalith.models.pass_context import Context, PassLayout
from megalith.models.rope import rotate
from megalith.models.runnable import Runnable, runnable
from megalith.ops.attention_core import attention, split_qkv


class Heads(NamedTuple):
    """The query heads that are here."""

    in_group: int  # that share a key and value head
    first: int = 0  # the number of the first of them among all of the layer's


def by_head(x: Tensor, batch: int, size: int) -> Tensor:
    """All tokens' heads of this size, [batch, seq, heads, size], from the rows of them as they come."""
    return x.reshape(batch, -1, x.shape[-1]).unflatten(-1, (-1, size))


class Attention(Runnable):
    """What every kind of attention shares. `core` is the seam of context parallelism, `heads` of tensor parallelism."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        self.number = number
        self.dropout = config.attention_dropout
        self.window = config.window(number)
        self.softcap = config.attn_logit_softcapping
        self.scale = config.attention_scale
        self.alibi = config.num_attention_heads if config.position_embedding_type == "alibi" else None
        self.core = attention
        self.heads = Heads(in_group=1)
        self.softmax_offset: SoftmaxOffset | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """Queries [batch, seq, heads, head_dim] over keys and values [batch, seq, groups, head_dim], and the cache's:
        [batch, seq, heads, head_dim]."""
        drops = self.dropout > 0 and context.dropout is not None
        core, value = (
            attention if context.layout.full_sequence else self.core,
            context.without_padding(value),
        )
        if context.cache is not None:
            core = partial(context.cache.attend, core)
        if context.bias is not None:
            core = partial(core, bias=context.bias)
        return core(
            query,
            key,
            value,
            causal=context.causal and query.shape[1] > 1,
            mask=context.mask,
            documents=context.documents,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            dropout=self.dropout if drops else 0.0,
            dropout_rows=context.dropout.query_rows() if drops else None,
            first_head=self.heads.first,
            alibi=self.alibi,
            sink=None if self.softmax_offset is None else self.softmax_offset(query),
        )


class SelfAttention(Attention):
    """linear_qkv, rotary positions, attention, linear_proj. With attention_output_gate what attention gives is
    multiplied by the sigmoid of a gate, whose rows stand behind the queries of its group."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__(config, number)
        self.head_dim = config.head_dim
        self.heads = Heads(config.num_attention_heads // config.query_groups)
        self.gated = config.attention_output_gate
        rows = config.query_groups * (self.heads.in_group * (1 + self.gated) + 2) * config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.linear_qkv = Linear(config.hidden_size, rows, bias=config.qkv_bias, device=device)
        self.linear_proj = Linear(width, config.hidden_size, bias=config.proj_bias, device=device)
        if config.softmax_type != "vanilla":
            self.softmax_offset = SoftmaxOffset(config, device)
        self.uses_rope, self.interleaved = config.uses_rope(number), config.rotary_interleaved
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm_full_width:
            self.q_layernorm = HeadsNorm(config, config.num_attention_heads, device)
            self.k_layernorm = HeadsNorm(config, config.query_groups, device)
        elif config.qk_layernorm_per_head:
            self.q_layernorm = HeadNorms(config, config.num_attention_heads, device)
            self.k_layernorm = HeadNorms(config, config.query_groups, device)
        elif config.qk_layernorm:
            self.q_layernorm = Norm(config, config.head_dim, device)
            self.k_layernorm = Norm(config, config.head_dim, device)
        elif config.qk_l2_norm:
            self.q_layernorm, self.k_layernorm = RootMeanSquare(config), RootMeanSquare(config)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        of_queries = self.heads.in_group * (1 + self.gated)
        split = partial(split_qkv, batch=context.batch, heads_in_group=of_queries, head_dim=self.head_dim)
        query, key, value = self.linear_qkv(x, context, then=split)  # [batch, seq, heads or groups, head_dim]
        if self.gated:
            grouped = query.unflatten(2, (-1, 2, self.heads.in_group))
            query, gate = (half.flatten(2, 3) for half in grouped.unbind(3))
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.uses_rope and context.rotary is not None:
            tables = context.rotary
            if self.window is not None and context.rotary_local is not None:
                tables = context.rotary_local
            query, key = (rotate(x, tables, self.interleaved) for x in (query, key))
        out = self.attend(query, key, value, context)  # [batch, seq, heads, head_dim]
        if self.gated:
            out = out * gate.sigmoid()
        return self.linear_proj(out.flatten(2), context)


class CrossAttention(Attention):
    """linear_q of the stream, linear_kv of `context.encoded`, attention, linear_proj."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__(config, number)
        self.window = self.alibi = None
        self.head_dim = config.head_dim
        self.heads = Heads(config.num_attention_heads // config.query_groups)
        width, bias = config.num_attention_heads * config.head_dim, config.qkv_bias
        self.linear_q = Linear(config.hidden_size, width, bias=bias, device=device)
        rows = 2 * config.query_groups * config.head_dim
        self.linear_kv = Linear(config.hidden_size, rows, bias=bias, device=device)
        self.linear_proj = Linear(width, config.hidden_size, bias=config.proj_bias, device=device)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        encoded = context.encoded
        query = by_head(self.linear_q(x, context), context.batch, self.head_dim)
        keys_values = self.linear_kv(encoded.hidden, encoded.context)
        key, value = by_head(keys_values, context.batch, 2 * self.head_dim).chunk(2, dim=-1)
        dropout = None if context.dropout is None else context.dropout.cross_attention_keys()
        queries = query.shape[1] * context.layout.cp_size
        mask = None if encoded.mask is None else encoded.mask.expand(-1, -1, queries, -1)
        apart = replace(
            context,
            causal=False,
            mask=mask,
            bias=None,
            documents=encoded.documents,
            padding=None,
            dropout=dropout,
            cache=None,
        )
        out = self.attend(query, key, value, apart)  # [batch, seq, heads, head_dim]
        return self.linear_proj(out.flatten(2), context)


class SoftmaxOffset(nn.Module):
    """A score of each head beside those of the keys, of nothing: a sink for attention that is to go nowhere. Learned
    (gpt-oss), weight float32 [heads], or always 0: a softmax whose denominator is one more (Miller 2023)."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.weight = None
        if config.softmax_type == "learnable":
            self.weight = nn.Parameter(torch.empty(config.num_attention_heads, device=device))

    def forward(self, query: Tensor) -> Tensor:
        """float32 [heads] for query [batch, seq, heads, head_dim]."""
        if self.weight is None:
            return torch.zeros(query.shape[2], device=query.device)
        return local(self.weight).float()


def every_score(weight: Tensor, token_index: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
    """The biases of the heads whose scores are computed here, and the places of their tokens: context parallelism has
    all places of some heads."""
    return weight, token_index


class RelativeBias(nn.Module):
    """The biases of a stack's heads by distance; weight float32 [buckets, heads]."""

    def __init__(self, config: ModelConfig, causal: bool, device: torch.device | None = None):
        super().__init__()
        self.causal, self.farthest = causal, config.relative_attention_max_distance
        self.buckets = config.relative_attention_num_buckets
        self.weight = nn.Parameter(torch.empty(self.buckets, config.num_attention_heads, device=device))
        self.scores = every_score  # a seam

    def forward(self, token_index: Tensor, layout: PassLayout) -> Tensor:
        """float32 [1, heads here, seq, seq] for the tokens at these places, int64 [seq]."""
        weight, token_index = self.scores(local(self.weight), token_index, layout)
        distances = token_index[None] - token_index[:, None]  # [queries, keys]
        buckets = distance_buckets(distances, self.causal, self.buckets, self.farthest)
        return nn.functional.embedding(buckets, weight).permute(2, 0, 1)[None]


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
