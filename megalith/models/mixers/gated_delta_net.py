"""Gated delta net (Yang, Kautz and Hatamizadeh 2024), the linear attention of Qwen3-Next.

Queries, keys and values go through a short causal convolution and SiLU, then the delta rule (ops/delta_rule.py). A
token's decay is log α = −e^A softplus(a + bias) and its write strength β = σ(b), or 2 σ(b) with linear_allow_neg_eigval
(Grazzi et al. 2024): A and bias are per value head, a and b per token and value head. The output is normalized per head
and multiplied by SiLU of a gate z.

Rows of linear_in are ordered by key head: its query, its key, then values and gates z of the value heads that share it.
Rows of linear_gates are ordered in the same way, b before a; the convolution's units are ordered as in linear_in,
without z. A slice of rows is therefore a slice of heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.mixers.recurrent import OutputNorm, Recurrent, StateSizes
from megalith.models.pass_context import Context
from megalith.models.runnable import runnable
from megalith.ops.batch_invariant.elementwise import exp, sigmoid, silu, softplus
from megalith.ops.delta_rule import gated_delta_rule


class DeltaNet(Recurrent):
    """Base class of mixers whose state follows the gated delta rule."""

    out_norm: OutputNorm
    linear_out: Linear

    def __init__(self) -> None:
        super().__init__(gated_delta_rule)

    def output(
        self, inputs: Sequence[Tensor], gate: Tensor, documents: Tensor | None, context: Context
    ) -> Tensor:
        """Return the mixer's output for the rule's `inputs` (ops/delta_rule.py).

        `gate` of the norm is [batch, seq, value heads, value size].
        """
        if context.cache is not None:
            y = context.cache.delta_rule(*inputs)
        else:
            y = self.recurrence_of(context)(*inputs, documents)
        return self.linear_out(self.out_norm(y, gate).flatten(2), context)


class GatedDeltaNet(DeltaNet):
    """Gated delta net: linear_in and linear_gates, convolution, delta rule, gated norm, linear_out."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__()
        self.sharing = config.linear_num_value_heads // config.linear_num_key_heads
        self.sizes = config.linear_key_head_dim, config.linear_value_head_dim
        heads, (key, value) = config.linear_num_key_heads, self.sizes
        width, taps = config.linear_num_value_heads * value, config.linear_conv_kernel_dim
        self.linear_in = Linear(config.hidden_size, 2 * (heads * key + width), bias=False, device=device)
        gates = 2 * config.linear_num_value_heads
        self.linear_gates = Linear(config.hidden_size, gates, bias=False, device=device)
        units = 2 * heads * key + width
        self.conv = nn.Conv1d(units, units, taps, groups=units, bias=False, device=device)
        self.decay = Decay(config.linear_num_value_heads, device)
        self.strongest = 2.0 if config.linear_allow_neg_eigval else 1.0  # upper bound of β
        self.out_norm = GatedNorm(value, config.linear_norm_epsilon or config.layernorm_epsilon, device)
        self.linear_out = Linear(width, config.hidden_size, bias=config.proj_bias, device=device)

    @property
    def state_sizes(self) -> StateSizes:
        units, _, taps = local(self.conv.weight).shape
        heads, (key, value) = len(local(self.decay.weight)), self.sizes
        inputs = heads // self.sharing * 2 * key + heads * (value + 2)
        return StateSizes(taps, units, (heads, key, value), inputs)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        key_size, value_size = self.sizes
        y = self.linear_in(x, context)
        y = y.view(context.batch, -1, y.shape[-1])
        documents = self.documents(context, y.shape[1])
        parts = [2 * key_size + self.sharing * value_size, self.sharing * value_size]
        mixed, gate = y.unflatten(-1, (-1, sum(parts))).split(parts, dim=-1)  # [batch, seq, key heads, ·]
        heads = mixed.shape[2]
        mixed = self.convolve(mixed.flatten(2), local(self.conv.weight), None, documents, context)
        mixed = silu(mixed).unflatten(2, (heads, -1))
        query, key, value = mixed.split([key_size, key_size, self.sharing * value_size], dim=-1)
        value, gate = (z.unflatten(-1, (self.sharing, value_size)).flatten(2, 3) for z in (value, gate))
        value = context.without_padding(value)
        gates = self.linear_gates(x, context).view(context.batch, -1, heads, 2, self.sharing)
        beta, step = sigmoid(gates[..., 0, :].flatten(2)), gates[..., 1, :].flatten(2)
        if self.strongest != 1:
            beta = beta * self.strongest
        inputs = query, key, value, self.decay(step), beta
        return self.output(inputs, gate, documents, context)


class Decay(nn.Module):
    """Decay per token and value head: log α = −e^weight · softplus(step + bias), in fp32.

    `step` is the token's projected step size (dt); `weight` is Hugging Face's A_log.
    """

    def __init__(self, heads: int, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, device=device))
        self.bias = nn.Parameter(torch.empty(heads, device=device))

    def forward(self, step: Tensor) -> Tensor:  # [batch, seq, value heads]
        return -exp(local(self.weight).float()) * softplus(step.float() + local(self.bias).float())


class GatedNorm(OutputNorm):
    """RMSNorm per head, in fp32, times SiLU of a gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [batch, seq, heads, size], both
        wide = x.float()
        normed = (wide * torch.rsqrt(self.total(wide) / x.shape[-1] + self.epsilon)).to(x.dtype)
        return (local(self.weight).to(x.dtype) * normed * silu(gate.float())).to(x.dtype)
