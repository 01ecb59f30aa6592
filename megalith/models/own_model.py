"""Base class of user-defined models, which `megalith.parallelize` makes trainable (docs/own_model.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalith.local_shards import local, local_shape_and_offset
from megalith.models.init import normal_rows

if TYPE_CHECKING:
    from megalith.data.batch import Batch


class Model(nn.Module):
    """Base class of user-defined models: single-device PyTorch with sharded layers.

    Data parallelism gathers and reduces each module in `layers`, an nn.ModuleList or nn.ModuleDict, as one unit. A
    model must have no buffers, because nothing would fill them.
    """

    compute_dtype = torch.float32

    def forward(self, batch: Batch, head: Any) -> Tensor:
        """Return head(hidden, output layer) for a batch with input_ids int64 [batch, seq] and its other fields."""
        raise NotImplementedError

    def initial_std(self, name: str, shape: torch.Size) -> float:
        """Return the standard deviation of the initial values of a parameter of this global shape."""
        return 0.02

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill all parameters: matrices N(0, `initial_std`), other weights 1, biases 0.

        Values depend only on the seed and the parameter's name, so they are the same in every layout.
        """
        for name, parameter in self.named_parameters():
            shape, first = local_shape_and_offset(parameter)
            if parameter.dim() < 2:
                local(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = self.initial_std(name, parameter.shape)
            value = normal_rows(name, parameter.shape, std, seed, first[0], shape[0])
            for dim in range(1, len(shape)):
                value = value.narrow(dim, first[dim], shape[dim])
            local(parameter).copy_(value)
