"""Multi-head latent attention (DeepSeek-AI 2024): keys and values of all heads come from one narrow latent.

    x ──linear_kv_down_proj──▶ latent, and the rotary part of the key, one for all heads
        latent ──norm──linear_kv_up_proj──▶ for each head a key without position, and a value
    x ──linear_q_down_proj──norm──linear_q_up_proj──▶ queries: a part without position, a rotary part
        or, without q_lora_rank, x ──linear_q_proj──▶
    no norms without latent_layernorm

A head's query and key are the part without position followed by the rotary part, so that their product is the sum of
both. A value may be narrower than a key: it is filled up with zeros for the attention's kernels, which every layout
shares, and what comes out is cut. The low-rank matmuls are small: tensor parallelism leaves them whole on every rank
and cuts the heads. The cache of generation holds keys and values of the heads, not the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.models.identity import identity
from megalith.models.linear import Linear
from megalith.models.mixers.attention import Attention, by_head
from megalith.models.norm import Norm, norm_or_identity
from megalith.models.pass_context import Context
from megalith.models.rope import rotate
from megalith.models.runnable import runnable


class LatentAttention(Attention):
    """Attention of heads made from latents. `gather`, of what every rank's heads use alike, is a seam of TP."""

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
        queries = by_head(self._queries(x, context), context.batch, sum(self.parts))
        plain, turning = queries.split(self.parts, dim=-1)
        query = torch.cat([plain, rotate(turning, context.rotary)], dim=-1)

        latent, turning = self.linear_kv_down_proj(x, context).split([self.latent, self.parts[1]], dim=-1)
        up = self.linear_kv_up_proj(norm_or_identity(self.kv_down_layernorm, latent), context)
        sizes = [self.parts[0], self.value_size]
        plain, value = by_head(up, context.batch, sum(sizes)).split(sizes, dim=-1)  # [batch, seq, heads, ·]
        turning = by_head(self.gather(turning, context), context.batch, self.parts[1])
        turned = rotate(turning, context.rotary)
        key = torch.cat([plain, turned.expand(-1, -1, plain.shape[2], -1)], dim=-1)

        value = nn.functional.pad(value, (0, sum(self.parts) - self.value_size))
        out = self.attend(query, key, value, context)  # [batch, seq, heads, head_dim]
        return self.linear_proj(out[..., : self.value_size].flatten(2), context)

    def _queries(self, x: Tensor, context: Context) -> Tensor:
        if self.linear_q_proj is not None:
            return self.linear_q_proj(x, context)
        return self.linear_q_up_proj(
            norm_or_identity(self.q_down_layernorm, self.linear_q_down_proj(x, context)), context
        )


def _norm(config: ModelConfig, width: int, device: torch.device | None) -> Norm | None:
    return Norm(config, width, device) if config.latent_layernorm else None
