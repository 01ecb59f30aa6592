"""Multi-head latent attention (DeepSeek-AI 2024): computes the keys and values of all heads from one narrow latent.

    x ──linear_kv_down_proj──▶ latent, and the key's rotary part, shared by all heads
        latent ──norm──linear_kv_up_proj──▶ per head the key's part without positions, and the value
    x ──linear_q_down_proj──norm──linear_q_up_proj──▶ queries: a part without positions, and a rotary part
        or, without q_lora_rank, x ──linear_q_proj──▶

Without latent_layernorm, there are no norms. A head's query and key consist of the part without positions and then the
rotary part. A value may be narrower than a key: it is padded with zeros for the attention kernels, and the output is
cut. Tensor parallelism replicates the small low-rank matmuls and shards the heads. Generation caches the heads' keys
and values, not the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.models.identity import identity
from megalith.models.linear import Linear
from megalith.models.mixers.attention import Attention, split_heads
from megalith.models.norm import Norm, norm_or_identity
from megalith.models.pass_context import Context
from megalith.models.runnable import runnable
from megalith.ops.rotary import rotate


class LatentAttention(Attention):
    """Multi-head latent attention.

    Tensor parallelism replaces `gather`, which gathers the rotary keys shared by all heads.
    """

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__(config, number)
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.parts = (config.qk_head_dim, config.qk_pos_emb_head_dim)
        self.latent, self.value_size = config.kv_lora_rank, config.v_head_dim
        self.gather = identity
        self.linear_q_proj = self.linear_q_down_proj = None
        if config.q_lora_rank is None:
            self.linear_q_proj = Linear(hidden, heads * config.head_dim, bias=False, device=device)
        else:
            self.linear_q_down_proj = Linear(hidden, config.q_lora_rank, bias=False, device=device)
            self.q_down_layernorm = _norm(config, config.q_lora_rank, device)
            self.linear_q_up_proj = Linear(
                config.q_lora_rank, heads * config.head_dim, bias=False, device=device
            )
        self.linear_kv_down_proj = Linear(hidden, self.latent + self.parts[1], bias=False, device=device)
        self.kv_down_layernorm = _norm(config, self.latent, device)
        rows = heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj = Linear(self.latent, rows, bias=False, device=device)
        self.linear_proj = Linear(heads * config.v_head_dim, hidden, bias=config.proj_bias, device=device)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        queries = split_heads(self._queries(x, context), context.batch, sum(self.parts))
        nope, rope = queries.split(self.parts, dim=-1)
        query = torch.cat([nope, _rotated(rope, context)], dim=-1)

        latent, rope = self.linear_kv_down_proj(x, context).split([self.latent, self.parts[1]], dim=-1)
        up = self.linear_kv_up_proj(norm_or_identity(self.kv_down_layernorm, latent), context)
        sizes = [self.parts[0], self.value_size]
        nope, value = split_heads(up, context.batch, sum(sizes)).split(
            sizes, dim=-1
        )  # [batch, seq, heads, ·]
        rope = split_heads(self.gather(rope, context), context.batch, self.parts[1])
        rope = _rotated(rope, context)
        key = torch.cat([nope, rope.expand(-1, -1, nope.shape[2], -1)], dim=-1)

        value = nn.functional.pad(value, (0, sum(self.parts) - self.value_size))
        out = self.attend(query, key, value, context)  # [batch, seq, heads, head_dim]
        return self.linear_proj(out[..., : self.value_size].flatten(2), context)

    def _queries(self, x: Tensor, context: Context) -> Tensor:
        if self.linear_q_proj is not None:
            return self.linear_q_proj(x, context)
        return self.linear_q_up_proj(
            norm_or_identity(self.q_down_layernorm, self.linear_q_down_proj(x, context)), context
        )


def _rotated(x: Tensor, context: Context) -> Tensor:
    """Return x, rotated by its position unless the model has no positions (Kimi-Linear)."""
    return x if context.rotary is None else rotate(x, *context.rotary)


def _norm(config: ModelConfig, width: int, device: torch.device | None) -> Norm | None:
    return Norm(config, width, device) if config.latent_layernorm else None
