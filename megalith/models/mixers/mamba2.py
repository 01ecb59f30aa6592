"""Mamba-2 (Dao and Gu 2024): a state space model with a short convolution on its inputs.

The input projection gives each head a gate z, an input x and a step size, and each group of heads the vectors B and C
(ops/state_space.py). x, B and C go through a short causal convolution and SiLU. A token's step size is Δ =
softplus(dt + bias), clamped to limits if there are any, and its decay is log α = −e^A Δ. The output, with D x added, is
multiplied by SiLU of z and normalized per group (RMSNorm), in this or the reverse order, before the output projection.

Rows of linear_zxbcdt are ordered by group: z and x of its heads, its B and C, and dt of its heads; the units of
conv_xbc are in the same order, without z and dt. A slice of rows is therefore a slice of groups. With fewer groups than
tensor-parallel ranks, `rows` of both modules selects the rows of the rank's own heads and of their group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.mixers.recurrent import OutputNorm, Recurrent, StateSizes, UnitConvolution
from megalith.models.pass_context import Context
from megalith.models.runnable import runnable
from megalith.ops.batch_invariant.elementwise import exp, silu, softplus
from megalith.ops.state_space import state_space


class Mamba2(Recurrent):
    """Mamba-2: linear_zxbcdt, conv_xbc, state space model, gated norm, linear_out. `heads_in_group` is a seam."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__(state_space)
        heads, groups = config.mamba_heads, config.mamba_num_groups
        self.heads_in_group = heads // groups
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.multiplier, self.multipliers = config.ssm_in_multiplier, config.ssm_multipliers
        width, shared = heads * self.head_dim, 2 * groups * self.state_dim
        self.linear_zxbcdt = Linear(
            config.hidden_size, 2 * width + shared + heads, bias=config.mamba_proj_bias, device=device
        )
        taps = config.linear_conv_kernel_dim
        self.conv_xbc = UnitConvolution(width + shared, taps, config.mamba_conv_bias, device)
        self.time_step = TimeStep(heads, config.mamba_dt_limit, device)
        self.skip = Skip(heads, device)
        self.gated_norm: GatedGroupNorm | None = None
        if config.mamba_rms_norm:
            self.gated_norm = GatedGroupNorm(config, device)
        self.linear_out = Linear(width, config.hidden_size, bias=config.mamba_out_bias, device=device)

    @property
    def state_sizes(self) -> StateSizes:
        taps, heads = self.conv_xbc.taps(), len(local(self.skip.weight))
        inputs = heads * (self.head_dim + 2) + 2 * heads // self.heads_in_group * self.state_dim
        return StateSizes(taps.shape[2], taps.shape[0], (heads, self.state_dim, self.head_dim), inputs)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        width, state = self.heads_in_group * self.head_dim, self.state_dim
        if self.multiplier != 1:
            x = x * self.multiplier
        y = self.linear_zxbcdt(x, context)
        y = y.view(context.batch, -1, y.shape[-1])
        parts = [width, width, state, state, self.heads_in_group]
        gate, *mixed, step = y.unflatten(-1, (-1, sum(parts))).split(parts, dim=-1)
        if self.multipliers is not None:  # [batch, seq, groups, ·]
            of_gate, *of_mixed, of_step = self.multipliers
            gate, step = gate * of_gate, step * of_step
            mixed = [part * factor for part, factor in zip(mixed, of_mixed, strict=True)]
        documents = self.documents(context, y.shape[1])
        groups, taps, bias = gate.shape[2], self.conv_xbc.taps(), self.conv_xbc.local_bias()
        mixed = self.convolve(torch.cat(mixed, dim=-1).flatten(2), taps, bias, documents, context)
        mixed = silu(mixed).unflatten(2, (groups, -1))
        inputs, b, c = mixed.split([width, state, state], dim=-1)
        inputs, gate = (part.unflatten(-1, (-1, self.head_dim)).flatten(2, 3) for part in (inputs, gate))
        inputs = context.without_padding(inputs)  # [batch, seq, heads, head_dim]
        step, decay = self.time_step(step.flatten(2))
        arguments = inputs, step, decay, b, c, local(self.skip.weight).float()
        if context.cache is None:
            out = self.recurrence_of(context)(*arguments, documents)
        else:
            out = context.cache.state_space(*arguments)
        if self.gated_norm is None:
            out = (out * silu(gate)).flatten(2)
        else:
            out = self.gated_norm(out, gate, groups)
        return self.linear_out(out, context)


class TimeStep(nn.Module):
    """Step size and decay per token and head, in fp32: Δ = softplus(dt + bias), log α = −e^weight Δ.

    `weight` is Hugging Face's A_log and `bias` its dt_bias.
    """

    def __init__(self, heads: int, limit: list[float] | None, device: torch.device | None = None):
        super().__init__()
        self.limit = limit
        self.weight = nn.Parameter(torch.empty(heads, device=device))
        self.bias = nn.Parameter(torch.empty(heads, device=device))

    def forward(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Return Δ and log α, float32 [batch, seq, heads], for dt [batch, seq, heads]."""
        step = softplus(dt.float() + local(self.bias).float())
        if self.limit is not None:
            step = step.clamp(*self.limit)
        return step, -exp(local(self.weight).float()) * step


class Skip(nn.Module):
    """D, the weight of the connection from a head's input to its output."""

    def __init__(self, heads: int, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, device=device))


class GatedGroupNorm(OutputNorm):
    """RMSNorm per group of heads, in fp32, before or after multiplying by SiLU of a gate.

    Where tensor-parallel ranks share a group, `total` sums over the group's heads of all ranks.
    """

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        width = config.mamba_heads * config.mamba_head_dim
        super().__init__(width, config.layernorm_epsilon, device)
        self.norm_first = config.mamba_norm_before_gate
        self.width = width // config.mamba_num_groups  # elements of a group

    def forward(self, x: Tensor, gate: Tensor, groups: int) -> Tensor:
        """Return [batch, seq, width] in x's dtype, for x and gate [batch, seq, heads, head_dim] with `groups` groups of
        heads."""
        wide, gate = x.flatten(2).float(), silu(gate.flatten(2).float())
        if not self.norm_first:
            wide = wide * gate
        grouped = wide.unflatten(-1, (groups, -1))
        squares = self.total(grouped)  # [batch, seq, groups, 1]
        normed = (grouped * torch.rsqrt(squares / self.width + self.epsilon)).flatten(2)
        normed = normed * local(self.weight).float()
        return (normed * gate if self.norm_first else normed).to(x.dtype)
