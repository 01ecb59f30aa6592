"""Short convolution (LFM2): a gated causal convolution over the last few tokens.

     y = linear_out(C ⊙ conv(B ⊙ x)),        B, C, x = linear_bcx(h)

Rows of linear_bcx alternate: B 0, C 0, x 0, B 1, C 1, x 1, … A slice of rows is therefore a slice of units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.linear import Linear
from megalith.models.mixers.recurrent import Recurrent, StateSizes, UnitConvolution
from megalith.models.pass_context import Context
from megalith.models.runnable import runnable


class ShortConvolution(Recurrent):
    """Short convolution: linear_bcx, gate, convolution, gate, linear_out."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__()
        size, bias = config.hidden_size, config.short_conv_bias
        self.linear_bcx = Linear(size, 3 * size, bias=bias, device=device)
        self.conv = UnitConvolution(size, config.linear_conv_kernel_dim, bias, device)
        self.linear_out = Linear(size, size, bias=bias, device=device)

    @property
    def state_sizes(self) -> StateSizes:
        units, _, taps = self.conv.taps().shape
        return StateSizes(taps, units, None)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        y = self.linear_bcx(x, context)
        b, c, x = y.view(context.batch, -1, y.shape[-1] // 3, 3).unbind(-1)  # [batch, seq, units]
        documents = self.documents(context, x.shape[1])
        x = self.convolve(b * x, self.conv.taps(), self.conv.local_bias(), documents, context)
        return self.linear_out(c * x, context)
