"""A mixer that replaces attention by a causal convolution: `Transformer(config, mixer=CausalConvolution)`.

Each unit convolves its last tokens, including the current one. Its two matrices are sharded like the MLP's, and the
taps are sharded by unit.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.pass_context import Context
from megalith.models.runnable import Runnable, runnable

TAPS = 4


class CausalConvolution(Runnable):
    roles = {"linear_in": "linear_fc1", "taps": "units", "linear_out": "linear_fc2"}

    def __init__(self, config: ModelConfig, number: int, device: torch.device | None = None):
        super().__init__()
        size = config.hidden_size
        self.linear_in = Linear(size, size, bias=False, device=device)
        self.taps = nn.Conv1d(size, size, TAPS, groups=size, bias=False, device=device)
        self.linear_out = Linear(size, size, bias=False, device=device)

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        x = self.linear_in(x, context)  # all tokens, this rank's units
        x = x.view(context.batch, -1, x.shape[-1]).mT  # [batch, units, seq]
        taps = local(self.taps.weight).to(x.dtype)  # [units, 1, TAPS]
        x = conv1d(pad(x, (TAPS - 1, 0)), taps, groups=len(taps))
        return self.linear_out(x.mT, context)
