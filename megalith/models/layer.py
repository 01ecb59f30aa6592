"""A layer of the model: mixers and a feed-forward half, each added to the residual stream.

A mixer (mixers/) lets tokens see each other, a second one those of another sequence; the feed-forward half, an MLP or
experts, takes each by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.models.mixers import MakeMixer, make_mixer
from megalith.models.mixers.attention import CrossAttention
from megalith.models.mlp import MLP
from megalith.models.moe import MoE
from megalith.models.mtp import Join
from megalith.models.norm import Norm, normed_after
from megalith.models.pass_context import Context, Runnable, runnable
from megalith.ops.dropout import ATTENTION_OUTPUT, CROSS_ATTENTION_OUTPUT, MLP_OUTPUT, Mask
from megalith.ops.fused_norm import add


class TransformerLayer(Runnable):
    """x + mixer(norm(x)), then x + mlp(norm(x)): norms where `norm_placement` says, dropout before additions. With
    `cross` there is x + cross_attention(norm(x)) between them. With parallel_attn_mlp (Wang and Komatsuzaki 2021)
    x + mixer(norm(x)) + mlp(norm(x)), the norms two or one."""

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        device: torch.device | None = None,
        *,
        cross: bool = False,
        mixer: MakeMixer = make_mixer,
    ):
        super().__init__()
        self.number = number
        self.dropout = config.hidden_dropout
        self.side_by_side = config.parallel_attn_mlp

        def norm(*placements: str) -> Norm | None:
            wanted = config.norm_placement in placements
            return Norm(config, config.hidden_size, device) if wanted else None

        self.input_layernorm = norm("pre", "sandwich")
        self.self_attention = mixer(config, number, device)  # its name in checkpoints, whatever it is
        self.post_attention_layernorm = norm("post", "sandwich")
        self.pre_cross_attn_layernorm = self.cross_attention = self.post_cross_attn_layernorm = None
        if cross:
            self.pre_cross_attn_layernorm = norm("pre", "sandwich")
            self.cross_attention = CrossAttention(config, number, device)
            self.post_cross_attn_layernorm = norm("post", "sandwich")
        self.pre_mlp_layernorm = None if config.shared_layernorm else norm("pre", "sandwich")
        self.join = self.final_layernorm = None
        if number in config.further_layers:
            self.join, self.final_layernorm = Join(config, device), Norm(config, config.hidden_size, device)
        self.has_experts = number in config.expert_layers
        self.mlp = MoE(config, device) if self.has_experts else MLP(config, device)
        self.post_mlp_layernorm = norm("post", "sandwich")

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        """Of several micro-batches, with a context each, a tuple: side by side in one graph."""
        if isinstance(x, tuple):
            return tuple(self.forward(*each) for each in zip(x, context, strict=True))
        if self.join is not None:
            x = self.join(x, context)
        x, h = normed_after(self.input_layernorm, x)
        y = normed(self.post_attention_layernorm, self.self_attention(h, context))
        mask = self._mask(context, ATTENTION_OUTPUT)
        if self.side_by_side:
            h = h if self.pre_mlp_layernorm is None else self.pre_mlp_layernorm(x)
            x = add(add(x, y, mask), self.mlp(h, context), self._mask(context, MLP_OUTPUT))
            return normed(self.final_layernorm, x)
        if self.cross_attention is not None:
            x, h = normed_after(self.pre_cross_attn_layernorm, x, y, mask)
            y = normed(self.post_cross_attn_layernorm, self.cross_attention(h, context))
            mask = self._mask(context, CROSS_ATTENTION_OUTPUT)
        x, h = normed_after(self.pre_mlp_layernorm, x, y, mask)
        mask = self._mask(context, MLP_OUTPUT)
        if self.has_experts:  # they are no part of a graph, but what routes tokens to them is: see moe.py
            plan = self.mlp.plan(h, context)
            if mask is None and self.post_mlp_layernorm is None:
                return normed(self.final_layernorm, self.mlp(h, plan, context, x))
            y = self.mlp(h, plan, context)
        else:
            y = self.mlp(h, context)
        x = add(x, normed(self.post_mlp_layernorm, y), mask)
        return normed(self.final_layernorm, x)

    def _mask(self, context: Context, site: int) -> Mask | None:
        if context.dropout is None or self.dropout == 0:
            return None
        return Mask(self.dropout, context.dropout.output_rows(site), context.dropout.columns)

    @property
    def mixers(self) -> list[nn.Module]:
        return [self.self_attention] + ([] if self.cross_attention is None else [self.cross_attention])


def normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
