"""Self-attention with grouped queries (Ainslie et al. 2023): each key and value head serves a group of query heads.

`groups` equal to the number of query heads is multi-head attention. Rows of linear_qkv stand by group: its query
heads, then its key head, then its value head, so that a slice of rows is a slice of whole groups.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.linear import Linear
from megalith.models.norm import HeadsNorm, Norm
from megalith.models.pass_context import Context, Runnable, runnable
from megalith.models.rope import rotate
from megalith.ops.attention_core import attention
from megalith.ops.qkv import split_qkv


class Heads(NamedTuple):
    """The query heads that are here."""

    in_group: int  # that share a key and value head
    first: int = 0  # the number of the first of them among all of the layer's


class Attention(Runnable):
    """What every kind of attention shares. `core` is the seam of context parallelism, `heads` of tensor parallelism."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        self.number = number
        self.dropout = config.attention_dropout
        self.window = config.window(number)
        self.softcap = config.attn_logit_softcapping
        self.scale = config.attention_scale
        self.core = attention
        self.heads = Heads(in_group=1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """Queries [batch, seq, heads, head_dim] over keys and values [batch, seq, groups, head_dim], and the cache's:
        [batch, seq, heads, head_dim]."""
        if context.cache is not None:
            key, value = context.cache.extend(self.number, key, value)
        drops = self.dropout > 0 and context.dropout is not None
        core = attention if context.layout.whole_sequences else self.core
        return core(
            query,
            key,
            value,
            causal=context.causal and query.shape[1] > 1,
            mask=context.mask,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            dropout=self.dropout if drops else 0.0,
            dropout_rows=context.dropout.query_rows() if drops else None,
            first_head=self.heads.first,
        )


class SelfAttention(Attention):
    """linear_qkv, rotary positions, attention, linear_proj."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__(config, number)
        self.head_dim = config.head_dim
        self.heads = Heads(config.num_attention_heads // config.query_groups)
        rows = config.query_groups * (self.heads.in_group + 2) * config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.linear_qkv = Linear(config.hidden_size, rows, bias=config.qkv_bias, device=device)
        self.linear_proj = Linear(width, config.hidden_size, bias=config.proj_bias, device=device)
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm_full_width:
            self.q_layernorm = HeadsNorm(config, config.num_attention_heads, device)
            self.k_layernorm = HeadsNorm(config, config.query_groups, device)
        elif config.qk_layernorm:
            self.q_layernorm = Norm(config, config.head_dim, device)
            self.k_layernorm = Norm(config, config.head_dim, device)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        split = partial(
            split_qkv, batch=context.batch, heads_in_group=self.heads.in_group, head_dim=self.head_dim
        )
        query, key, value = self.linear_qkv(x, context, then=split)  # [batch, seq, heads or groups, head_dim]
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if context.rotary is not None:
            tables = context.rotary
            if self.window is not None and context.rotary_local is not None:
                tables = context.rotary_local
            query, key = rotate(query, tables), rotate(key, tables)
        out = self.attend(query, key, value, context)  # [batch, seq, heads, head_dim]
        return self.linear_proj(out.flatten(2), context)
