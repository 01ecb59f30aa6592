"""A layer of the model: attention and MLP or experts, each added to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.comm.collectives import local
from megalith.config import ModelConfig
from megalith.models.linear import Linear
from megalith.models.mixers.attention import SelfAttention
from megalith.models.mixers.mla import LatentAttention
from megalith.models.mlp import MLP
from megalith.models.moe import MoE
from megalith.models.mtp import Join
from megalith.models.norm import Norm, added
from megalith.models.pass_context import Context
from megalith.ops.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, Mask
from megalith.ops.norm import fuses_norm


class TransformerLayer(nn.Module):
    """Attention and MLP, each added to the residual stream, with norms where `norm_placement` says."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__()
        self.dropout = config.hidden_dropout

        def norm(*placements: str) -> Norm | None:
            wanted = config.norm_placement in placements
            return Norm(config, config.hidden_size, device) if wanted else None

        self.input_layernorm = norm("pre", "sandwich")
        attention = LatentAttention if config.multi_latent_attention else SelfAttention
        self.self_attention = attention(config, number, device)
        self.post_attention_layernorm = norm("post", "sandwich")
        self.pre_mlp_layernorm = norm("pre", "sandwich")
        self.join = self.final_layernorm = None
        if number in config.further_layers:
            self.join, self.final_layernorm = Join(config, device), Norm(config, config.hidden_size, device)
        self.has_experts = number in config.expert_layers
        self.mlp = MoE(config, device) if self.has_experts else MLP(config, device)
        self.post_mlp_layernorm = norm("post", "sandwich")

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        if self.join is not None:
            x = self.join(x, context)
        proj_bias, fc2_bias = self._biases_beside_norm(x, context)
        x, normed = _beside(x, None, None, self.input_layernorm)
        y = self.self_attention(normed, context, proj_bias is None)
        y, mask = _normed(y, self.post_attention_layernorm), self._mask(context, ATTENTION_OUTPUT)
        x, normed = _beside(x, y, mask, self.pre_mlp_layernorm, proj_bias, fc2_bias)
        mask = self._mask(context, MLP_OUTPUT)
        if self.has_experts:
            plan = self.mlp.plan(normed, context)
            if mask is None and self.post_mlp_layernorm is None:
                # What is left is an addition, which is not worth a graph of its own.
                return _normed(self.mlp(normed, plan, x), self.final_layernorm)
            y = self.mlp(normed, plan)
        else:
            y = self.mlp(normed, context) if fc2_bias is None else self.mlp(normed, context, False)
        x = added(x, _normed(y, self.post_mlp_layernorm), mask)
        return _normed(x, self.final_layernorm)

    def _mask(self, context: Context, site: int) -> Mask | None:
        if context.dropout is None or self.dropout == 0:
            return None
        rows = context.dropout.outputs[site - ATTENTION_OUTPUT]
        return Mask(self.dropout, rows, context.dropout.columns)

    def _biases_beside_norm(self, x: Tensor, context: Context) -> tuple[Tensor | None, Tensor | None]:
        """The biases of linear_proj and linear_fc2 whose gradients the backward pass of pre_mlp_layernorm makes.

        It sums over the tokens what it reads and writes: the gradients of y and of the stream. So nothing may stand
        between the linear and y, and nothing, dropout neither, between the other and the stream.
        """
        if self.pre_mlp_layernorm is None or not fuses_norm(x):
            return None, None
        before, behind = self.self_attention.linear_proj, None
        if not self.has_experts and self._mask(context, MLP_OUTPUT) is None:
            behind = self.mlp.linear_fc2
        pairs = (before, self.post_attention_layernorm), (behind, self.post_mlp_layernorm)
        return tuple(_bias(linear, x) if norm is None else None for linear, norm in pairs)


def _bias(linear: Linear | None, x: Tensor) -> Tensor | None:
    return local(linear.bias) if linear is not None and linear.fuses_bias(x) else None


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


def _beside(
    x: Tensor, y: Tensor | None, mask: Mask | None, norm: Norm | None, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x + y after dropout of y, and that normed."""
    if norm is not None:
        return norm.beside(x, y, mask, *biases)
    x = added(x, y, mask)
    return x, x
