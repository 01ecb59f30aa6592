"""The base of a model of one's own, which `megalith.parallelize` makes trainable (docs/own_model.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalith.local_shards import local, local_shape_and_offset
from megalith.models.init import normal_rows

if TYPE_CHECKING:
    from megalith.data.batch import Batch


class Model(nn.Module):
    """The base of a model of one's own: single-device PyTorch, but for the sharded layers that it is made of.

    `layers`, an nn.ModuleList or nn.ModuleDict, are the units that data parallelism gathers and reduces. It has no
    buffers: they would have no values.
    """

    compute_dtype = torch.float32

    def forward(self, batch: Batch, head: Any) -> Tensor:
        """batch.input_ids int64 [batch, seq], and what else the batch names → head(hidden, output layer)."""
        raise NotImplementedError

    def initial_std(self, name: str, shape: torch.Size) -> float:
        """The standard deviation of the parameter's initial values, of this global shape."""
        return 0.02

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Matrices N(0, `initial_std`), other weights 1, biases 0, by seed and name alone: the same in every layout."""
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
