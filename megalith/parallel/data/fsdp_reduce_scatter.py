"""Reduce-scatters of gradients for FSDP2: with fp32 sums, and in an order that does not depend on the number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megalith.compat.fsdp import fsdp_state, sharded_parameters
from megalith.ops import kernels
from megalith.parallel.data.ordered_sums import sum_over_ranks


class ReduceScatter:
    """FSDP2's reduce-scatter of gradients to fp32 sums, with results that can reuse memory of freed activations.

    PyTorch's allocator keeps a memory pool per stream, and FSDP2 allocates results on its own stream, so gradients
    could not reuse the activations that the compute stream freed. Therefore a result that becomes a gradient is
    allocated from the compute stream's pool, and FSDP2's stream waits for the last use of that memory. The gradient may
    be freed once the compute stream has waited for the result: at the end of the step's last backward pass, or in
    `wait_for_reductions`. A result that is added to an existing gradient, or reduced over replicas, is allocated on
    FSDP2's stream as usual.
    """

    def __init__(self, module: FSDPModule, ranks: int, replicas: bool) -> None:
        """Prepare to reduce the gradients of `module`'s FSDP2 unit over `ranks`. `replicas`: also reduce them over
        replicas afterwards.
        """
        self._state, self._ranks, self._replicas = fsdp_state(module), ranks, replicas
        self._input, self._compute_stream = 0, None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP2.

        Calls alternate between the reduce-scatter's input, in `dtype`, and its result, in fp32.
        """
        length = math.prod(size)
        if length * self._ranks != self._input:  # an input; after an exception calls need not alternate
            self._input = length
            self._compute_stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            return torch.empty(*size, dtype=dtype, device=device)
        self._input = 0
        if self._compute_stream is None or not self._becomes_gradient():
            return torch.empty(*size, dtype=torch.float32, device=device)
        with torch.cuda.stream(self._compute_stream):
            result = torch.empty(*size, dtype=torch.float32, device=device)
        torch.cuda.current_stream(device).wait_stream(self._compute_stream)
        return result

    def _becomes_gradient(self) -> bool:
        shards = sharded_parameters(self._state)
        return not self._replicas and all(
            shard.grad is None and shard.dtype == torch.float32 for shard in shards if shard.requires_grad
        )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter `input_tensor`, [ranks · elements]. FSDP2 passes the arguments by these names."""
        self._reduce(output_tensor, input_tensor, group, op)

    def _reduce(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup, op) -> None:
        # torch 2.13 has the first name, torch 2.11 the second.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(output, gradients, op=op, group=group)


class Fp32SumReduceScatter(ReduceScatter):
    """Reduce-scatter of gradients in the compute dtype: an all-to-all in that dtype and a local sum in fp32.

    The result is the same as with a reduce-scatter in fp32, which would send twice as many bytes.
    """

    def _reduce(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup, op) -> None:
        parts = _exchange(gradients, group)
        if kernels.AVAILABLE and parts.is_cuda:
            kernels.sum_rows(parts, output)
        else:
            torch.sum(parts, 0, dtype=torch.float32, out=output)


class OrderedReduceScatter(ReduceScatter):
    """A reduce-scatter that adds the ranks' gradients by the tree of ordered_sums.py, in fp32: an all-to-all and local
    additions."""

    def _reduce(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup, op) -> None:
        output.copy_(sum_over_ranks(_exchange(gradients, group), neighbours=True))


def _exchange(gradients: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange shards by an all-to-all. Returns every rank's contribution to this rank's shard, [ranks, elements]."""
    received = torch.empty_like(gradients)
    dist.all_to_all_single(received, gradients, group=group)
    return received.view(group.size(), -1)
