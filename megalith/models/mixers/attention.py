"""Attention with grouped queries (Ainslie et al. 2023): each key and value head serves a group of query heads.

With as many groups as query heads it is multi-head attention. Rows of linear_qkv are ordered by group (its query heads,
its key head, its value head), so that a slice of rows is a slice of groups. Cross-attention (Vaswani et al. 2017) takes
keys and values from another sequence, without rotary positions and without a causal mask; rows of linear_kv are a key
head and a value head per group.

T5's relative positions (Raffel et al. 2020) are a learned bias of self-attention's scores, per head and bucket of
distances, shared by all layers of a stack. The first half of the buckets are single distances; the second half are
ranges that grow logarithmically up to a maximum distance, beyond which all distances share a bucket. Without a causal
mask, half of the buckets are for keys after the query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from megalith.models.runnable import Runnable, runnable
from megalith.ops.attention_core import attention
from megalith.ops.batch_invariant.elementwise import sigmoid
from megalith.ops.rotary import rotate
from megalith.ops.split_qkv import split_qkv


class Heads(NamedTuple):
    """Range of the query heads that this rank computes."""

    in_group: int  # query heads per key and value head
    first: int = 0  # global index of the first query head


def split_heads(x: Tensor, batch: int, size: int) -> Tensor:
    """Reshape x, [batch · seq, heads · size] or [batch, seq, heads · size], to [batch, seq, heads, size]."""
    return x.reshape(batch, -1, x.shape[-1]).unflatten(-1, (-1, size))


class Attention(Runnable):
    """Base class of attention.

    `core` is a seam of context parallelism, `heads` one of tensor parallelism, and `record_logits` one of qk-clip.
    """

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        self.number = number
        self.dropout = config.attention_dropout
        self.window = config.window(number)
        self.two_sided = config.two_sided_window(number) is not None
        self.chunk = config.attention_chunk(number)
        self.softcap = config.attn_logit_softcapping
        self.scale = config.attention_scale
        self.alibi = config.num_attention_heads if config.position_embedding_type == "alibi" else None
        self.core = attention
        self.record_logits: Callable[..., None] | None = None
        self.heads = Heads(in_group=1)
        self.softmax_offset: SoftmaxOffset | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """Return attention's output [batch, seq, heads, head_dim].

        Args:
            query: [batch, seq, heads, head_dim].
            key, value: [batch, seq, groups, head_dim] of the same tokens; keys and values in the cache are added.
            context: mask, documents, dropout keys, cache.
        """
        uses_dropout = self.dropout > 0 and context.dropout is not None
        core = self.core
        if context.layout.full_sequence:
            core = partial(core, full_sequence=True)
        if context.layout.core is not None:
            core = partial(core, run=context.layout.core)
        value = context.without_padding(value)
        causal = context.causal and query.shape[1] > 1
        mask, documents = context.mask, context.documents
        if self.chunk is not None:
            mask, documents = context.chunk_mask, context.chunk_documents
        if self.two_sided and context.window_mask is not None:
            mask, documents = context.window_mask, None
        if self.record_logits is not None and self.training:
            seen = dict(causal=causal, mask=mask, documents=documents, window=self.window)
            self.record_logits(query, key, first_head=self.heads.first, scale=self.scale, **seen)
        if context.cache is not None:
            core = partial(context.cache.attend, core)
            if self.chunk is not None:
                core = partial(core, chunk=self.chunk)
        if context.bias is not None:
            core = partial(core, bias=context.bias)
        return core(
            query,
            key,
            value,
            causal=causal,
            mask=mask,
            documents=documents,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            dropout=self.dropout if uses_dropout else 0.0,
            dropout_rows=context.dropout.query_rows() if uses_dropout else None,
            first_head=self.heads.first,
            alibi=self.alibi,
            sink=None if self.softmax_offset is None else self.softmax_offset(query),
        )


class SelfAttention(Attention):
    """Self-attention: linear_qkv, rotary positions, the attention core, linear_proj.

    With attention_output_gate, the core's output is multiplied by the sigmoid of a gate. The gate's rows in linear_qkv
    follow the queries of their group.
    """

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__(config, number)
        self.head_dim = config.head_dim
        self.heads = Heads(config.num_attention_heads // config.query_groups)
        self.gated = config.attention_output_gate
        rows = config.query_groups * (self.heads.in_group * (1 + self.gated) + 2) * config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.linear_qkv = Linear(config.hidden_size, rows, bias=config.qkv_bias, device=device)
        self.linear_proj = Linear(width, config.hidden_size, bias=config.has_proj_bias(number), device=device)
        if config.softmax_type != "vanilla":
            self.softmax_offset = SoftmaxOffset(config, device)
        self.uses_rope, self.interleaved = config.uses_rope(number), config.rotary_interleaved
        self.query_scaling = QueryScaling.of_layer(config, number)
        self.clip = config.clip_qkv
        self.norm_after_rope = config.qk_layernorm_after_rope
        self.relative_attention_bias = None
        if config.relative_attention_per_layer:
            self.relative_attention_bias = RelativeBias(config, number >= config.encoder_layers, device)
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
        elif config.qk_l2_norm and (self.uses_rope or not config.qk_l2_norm_rope_only):
            self.q_layernorm, self.k_layernorm = RootMeanSquare(config), RootMeanSquare(config)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        heads_in_group = self.heads.in_group * (1 + self.gated)  # queries and gates
        norm_before = self.q_layernorm is not None and not self.norm_after_rope
        by_group = norm_before and isinstance(self.q_layernorm, (Norm, RootMeanSquare)) and not self.gated
        split = partial(
            split_qkv,
            batch=context.batch,
            heads_in_group=heads_in_group,
            head_dim=self.head_dim,
            flat=not by_group,
        )
        query, key, value = self.linear_qkv(x, context, then=split)  # [batch, seq, heads or groups, head_dim]
        if self.gated:
            grouped = query.unflatten(2, (-1, 2, self.heads.in_group))
            query, gate = (half.flatten(2, 3) for half in grouped.unbind(3))
        if norm_before:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
            query = query.flatten(2, 3) if by_group else query
        if self.clip is not None:
            query, key, value = (x.clamp(-self.clip, self.clip) for x in (query, key, value))
        if self.uses_rope and context.rotary is not None:
            if not norm_before and not self.gated and torch.is_grad_enabled():
                # The backward pass needs the values, and a view would keep all of linear_qkv's output for them.
                value = value.contiguous()
            tables = context.rotary
            if (self.window is not None or self.two_sided) and context.rotary_local is not None:
                tables = context.rotary_local
            query, key = (rotate(x, *tables, self.interleaved) for x in (query, key))
        if self.norm_after_rope:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.query_scaling is not None:
            query = self.query_scaling(query, context.position_ids)
        if self.relative_attention_bias is not None:
            context = replace(context, bias=self._relative_scores(context))
        out = self.attend(query, key, value, context)  # [batch, seq, heads, head_dim]
        if self.gated:
            out = out * sigmoid(gate)
        return self.linear_proj(out.flatten(2), context)

    def _relative_scores(self, context: Context) -> Tensor:
        """Return the layer's relative positions, float32 [1, local heads, queries, keys]."""
        scores = self.relative_attention_bias(context.token_index, context.layout)
        # A generated token attends to all before it.
        return scores if context.cache is None else scores[:, :, -1:]


class QueryScaling(NamedTuple):
    """Multiplies queries by 1 + beta · ln(1 + ⌊(position + offset) / length⌋) (Nakanishi 2025)."""

    beta: float
    length: int
    offset: int

    @classmethod
    def of_layer(cls, config: ModelConfig, number: int) -> QueryScaling | None:
        """Return the scaling of layer `number`, or None if it has none."""
        if not config.scales_queries(number):
            return None
        offset = int(config.query_scaling_layers == "no_rope")
        return cls(config.query_scaling_beta, config.query_scaling_length, offset)

    def __call__(self, query: Tensor, position_ids: Tensor) -> Tensor:
        """Return query [batch, seq, heads, head_dim], scaled by its positions, int64 [batch, seq]."""
        steps = (position_ids + self.offset) // self.length
        factors = 1 + self.beta * torch.log1p(steps.float())
        return (query * factors[..., None, None]).to(query.dtype)


class CrossAttention(Attention):
    """Cross-attention: linear_q on the residual stream, linear_kv on `context.encoded`, attention, linear_proj."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__(config, number)
        self.window = self.alibi = self.chunk = None
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
        query = split_heads(self.linear_q(x, context), context.batch, self.head_dim)
        keys_values = self.linear_kv(encoded.hidden, encoded.context)
        key, value = split_heads(keys_values, context.batch, 2 * self.head_dim).chunk(2, dim=-1)
        dropout = None if context.dropout is None else context.dropout.cross_attention_keys()
        queries = query.shape[1] * context.layout.cp_size
        mask = None if encoded.mask is None else encoded.mask.expand(-1, -1, queries, -1)
        cross_context = replace(
            context,
            causal=False,
            mask=mask,
            bias=None,
            documents=encoded.documents,
            padding=None,
            dropout=dropout,
            cache=None,
        )
        out = self.attend(query, key, value, cross_context)  # [batch, seq, heads, head_dim]
        return self.linear_proj(out.flatten(2), context)


class SoftmaxOffset(nn.Module):
    """An attention sink: an additional score per head, without a key.

    The score is learned, with a weight float32 [heads] (gpt-oss), or is 0, which adds 1 to the softmax's denominator
    (Miller 2023).
    """

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.weight = None
        if config.softmax_type == "learnable":
            self.weight = nn.Parameter(torch.empty(config.num_attention_heads, device=device))

    def forward(self, query: Tensor) -> Tensor:
        """Return the scores, float32 [heads], for query [batch, seq, heads, head_dim]."""
        if self.weight is None:
            return torch.zeros(query.shape[2], device=query.device)
        return local(self.weight).float()


def all_scores(weight: Tensor, token_index: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
    """Return the biases [buckets, heads] of the local heads and the indices of the tokens to score.

    Context parallelism replaces this function: there, each rank scores all tokens for some of the heads.
    """
    return weight, token_index


class RelativeBias(nn.Module):
    """Relative position biases of a stack, weight float32 [buckets, heads]. `scores` is a seam."""

    def __init__(self, config: ModelConfig, causal: bool, device: torch.device | None = None):
        super().__init__()
        self.causal, self.max_distance = causal, config.relative_attention_max_distance
        self.buckets = config.relative_attention_num_buckets
        self.weight = nn.Parameter(torch.empty(self.buckets, config.num_attention_heads, device=device))
        self.scores = all_scores

    def forward(self, token_index: Tensor, layout: PassLayout) -> Tensor:
        """Return the biases, float32 [1, local heads, seq, seq], for the tokens at these indices, int64 [seq]."""
        weight, token_index = self.scores(local(self.weight), token_index, layout)
        distances = token_index[None] - token_index[:, None]  # [queries, keys]
        buckets = distance_buckets(distances, self.causal, self.buckets, self.max_distance)
        return nn.functional.embedding(buckets, weight).permute(2, 0, 1)[None]


def distance_buckets(distances: Tensor, causal: bool, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance (key index − query index), int64 of the same shape.

    With `causal`, keys after the query count as distance 0.
    """
    first = 0
    if causal:
        distances = (-distances).clamp(min=0)
    else:
        buckets //= 2
        first, distances = (distances > 0).long() * buckets, distances.abs()
    single = buckets // 2
    ratio = torch.log(distances.clamp(min=1).float() / single) / math.log(max_distance / single)
    ranges = (single + (ratio * (buckets - single)).long()).clamp(max=buckets - 1)
    return first + torch.where(distances < single, distances, ranges)
