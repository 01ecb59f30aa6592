"""Kimi Delta Attention (Kimi Team 2025): a gated delta net with a decay per channel, the linear attention of
Kimi-Linear.

Queries, keys and values go through a short causal convolution and SiLU, then the delta rule (ops/delta_rule.py). The
decay of a token's channel is log α = −e^A softplus(f + bias), with f from a low-rank projection: A is per head, the
bias per channel. The write strength is β = σ(b) per head. The output is normalized per head and multiplied by the
sigmoid of a low-rank gate.

Rows of linear_in and the convolution's units are ordered by head: its query, key and value. A slice of rows is
therefore a slice of heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.mixers.gated_delta_net import DeltaNet
from megalith.models.mixers.recurrent import OutputNorm, StateSizes
from megalith.models.pass_context import Context
from megalith.models.runnable import runnable
from megalith.ops.batch_invariant.elementwise import exp, sigmoid, silu, softplus


class KimiDeltaAttention(DeltaNet):
    """Kimi Delta Attention: linear_in, linear_gates and two low-rank projections, convolution, delta rule, gated
    norm, linear_out.
    """

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__()
        hidden, heads = config.hidden_size, config.linear_num_key_heads
        self.sizes = key, value = config.linear_key_head_dim, config.linear_value_head_dim
        units, taps = heads * (2 * key + value), config.linear_conv_kernel_dim

        def linear(taken: int, out: int, bias: bool = False) -> Linear:
            return Linear(taken, out, bias=bias, device=device)

        self.linear_in, self.linear_gates = linear(hidden, units), linear(hidden, heads)
        self.linear_decay_down, self.linear_decay_up = linear(hidden, key), linear(key, heads * key)
        self.linear_gate_down, self.linear_gate_up = linear(hidden, value), linear(value, heads * value)
        self.conv = nn.Conv1d(units, units, taps, groups=units, bias=False, device=device)
        self.time_step = ChannelDecay(heads, key, device)
        self.out_norm = SigmoidGatedNorm(
            value, config.linear_norm_epsilon or config.layernorm_epsilon, device
        )
        self.linear_out = linear(heads * value, hidden, config.proj_bias)

    @property
    def state_sizes(self) -> StateSizes:
        units, _, taps = local(self.conv.weight).shape
        heads, (key, value) = len(local(self.time_step.weight)), self.sizes
        return StateSizes(taps, units, (heads, key, value), heads * (3 * key + value + 1))

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        key_size, value_size = self.sizes
        y = self.linear_in(x, context)
        y = y.view(context.batch, -1, y.shape[-1])
        documents = self.documents(context, y.shape[1])
        mixed = silu(self.convolve(y, local(self.conv.weight), None, documents, context))
        mixed = mixed.unflatten(2, (-1, 2 * key_size + value_size))  # [batch, seq, heads, ·]
        query, key, value = mixed.split([key_size, key_size, value_size], dim=-1)
        value = context.without_padding(value)
        decay = self.linear_decay_up(self.linear_decay_down(x, context), context)
        gate = self.linear_gate_up(self.linear_gate_down(x, context), context)
        gate = gate.view(*value.shape)
        share = sigmoid(self.linear_gates(x, context).view(*value.shape[:3]))
        inputs = query, key, value, self.time_step(decay.view(*query.shape)), share
        return self.output(inputs, gate, documents, context)


class ChannelDecay(nn.Module):
    """Decay per token, head and channel, in fp32: log α = −e^weight · softplus(f + bias).

    `weight` [heads] is Hugging Face's A_log and `bias` [heads · size] its dt_bias.
    """

    def __init__(self, heads: int, size: int, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, device=device))
        self.bias = nn.Parameter(torch.empty(heads * size, device=device))

    def forward(self, f: Tensor) -> Tensor:  # [batch, seq, heads, size]
        bias = local(self.bias).float().view(*f.shape[2:])
        return -exp(local(self.weight).float())[:, None] * softplus(f.float() + bias)


class SigmoidGatedNorm(OutputNorm):
    """RMSNorm per head, times the sigmoid of a gate, in fp32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [batch, seq, heads, size], both
        wide = x.float()
        normed = wide * torch.rsqrt(self.total(wide) / x.shape[-1] + self.epsilon)
        return (local(self.weight).float() * normed * sigmoid(gate.float())).to(x.dtype)
