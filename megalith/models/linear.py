"""A linear layer, and the MLP that consists of two linear layers.

A linear's seams are `gemm` (its matmuls), `style` (the collectives around them) and `rows` (the rows of weight and bias
that it uses). An adapter's output (adapters.py) is added to the linear's. An MLP's activation is GELU as in GPT-2, or
gated (Shazeer 2020): SiLU as in Llama, GELU as in Gemma.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.coded_weight import CodedWeight
from megalith.models.identity import identity
from megalith.models.pass_context import Context
from megalith.models.runnable import Runnable, runnable
from megalith.models.xielu import XIELU
from megalith.ops.activation import ACTIVATIONS, gated_activation
from megalith.ops.coded_gemm import CodedGemm
from megalith.ops.gemm import GEMM, Gemm, add_bias_gradient, linear


class Linear(nn.Module):
    """y = x · weightᵀ + bias, with an fp32 weight [out, in] that is cast to x's dtype."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, device: torch.device | None = None
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None
        self.gemm = GEMM
        self.style = plain
        self.rows = identity
        self.adapter: nn.Module | None = None
        self.coded: CodedWeight | None = None  # the weight, if it is frozen and quantized

    def forward(
        self,
        x: Tensor,  # [..., in]
        context: Context | None = None,
        then: Callable[[Tensor, Tensor | None], Tensor] = add_bias_gradient,
    ) -> Tensor:
        """Return `then`(y, bias) for y = x · weightᵀ + bias, [..., out].

        No gradient flows from y to the bias; `then`, a function of ops/, computes the bias gradient.
        """
        weight = self.rows(local(self.weight)).to(x.dtype) if self.coded is None else self.coded.codes
        bias = None if self.bias is None else self.rows(local(self.bias))
        added = None if bias is None else bias.detach().to(x.dtype)
        if self.adapter is not None and self.adapter.rescales:
            y = self.style(x, weight, None, self.gemm, context) + self.adapter(x, context)
            y = y * self.adapter.row_factors(weight if self.coded is None else self.coded.decoded()).to(
                y.dtype
            )
            return then(y if added is None else y + added, bias)
        y = self.style(x, weight, added, self.gemm, context)
        if self.adapter is not None:
            y = y + self.adapter(x, context)
        return then(y, bias)

    def keep_in_codes(self, weight: CodedWeight) -> None:
        """Replace the weight by a quantized, frozen one, in place."""
        weight.rows = self.rows
        self.weight, self.coded, self.gemm = None, weight, CodedGemm(weight)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, context: Context | None) -> Tensor:
    """Return x [..., in] · weightᵀ + bias: the `style` of a linear on one device."""
    return linear(x, weight, bias, gemm)


class MLP(Runnable):
    """MLP: linear_fc1, activation, linear_fc2.

    With a gate, the rows of fc1 alternate: gate 0, up 0, gate 1, up 1, …
    """

    roles = {"xielu": "q_layernorm"}  # replicated, with partial gradients: each rank has some of fc1's rows

    def __init__(self, config: ModelConfig, device: torch.device | None = None, ffn_size: int | None = None):
        """Create an MLP of width `ffn_size`, by default the configured width."""
        super().__init__()
        ffn_size = ffn_size or config.ffn_size
        if config.mlp_activation == "xielu":
            self.xielu = XIELU(device)
        plain = self.xielu.forward if config.mlp_activation == "xielu" else ACTIVATIONS[config.mlp_activation]
        self.activation = plain
        of_gate, self.multiplier = config.mlp_multipliers or (1.0, 1.0)
        if config.gated:
            clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
            options = {} if clamp is None and not offset else dict(clamp=clamp, offset=offset)
            if of_gate != 1:
                options["factor"] = of_gate
            self.activation = partial(gated_activation, plain, **options)
        width = ffn_size * (2 if config.gated else 1)
        bias = config.mlp_bias
        self.linear_fc1 = Linear(config.hidden_size, width, bias=bias, device=device)
        self.linear_fc2 = Linear(ffn_size, config.hidden_size, bias=bias, device=device)

    @runnable
    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:  # [batch, seq, hidden]
        x = self.linear_fc1(x, context, then=self.activation)  # [batch, seq, ffn]
        y = self.linear_fc2(x, context)
        return y if self.multiplier == 1 else y * self.multiplier
