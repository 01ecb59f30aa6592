"""What ranks count together of their routers' choices.

A router whose tokens are one of several parts of a micro-batch; the tokens of each expert in a step, over all ranks,
and the expert bias that follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_gather, all_reduce_no_grad
from megalith.models.load_balance import LocalTokens, move_bias
from megalith.models.router import Router
from megalith.models.transformer import Transformer, layers_of
from megalith.parallel.mesh import Mesh


class ShardedTokens(LocalTokens):
    """The tokens here are one of `axis.size` parts of their micro-batch."""

    def __init__(self, axis: Axis):
        self.axis, self.shards = axis, axis.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return all_reduce_no_grad(x, self.axis)

    def all_gather(self, x: Tensor) -> Tensor:
        return all_gather(x, self.axis)

    def local_slice(self, x: Tensor) -> Tensor:
        return x.chunk(self.axis.size)[self.axis.rank]


@torch.no_grad()
def gather_tallies(
    chunks: Sequence[Transformer], mesh: Mesh, sequence_parallel: bool, device: torch.device
) -> Tensor | None:
    """The tallies of the step's micro-batches, summed: float32 [layers with experts, experts + 3], on every rank.

    Every rank calls it after its backward passes; its own tallies begin anew. None where there are no experts.
    """
    config = chunks[0].config
    if not config.expert_layers:
        return None
    tallies = torch.zeros(len(config.expert_layers), config.num_experts + 3, device=device)
    for index, router in _routers(chunks):
        tallies[index] = router.tally
        router.tally.zero_()
    tallies = all_reduce_no_grad(tallies, mesh.dp_cp)
    if sequence_parallel:  # else the ranks of the tensor axis have the same tokens
        tallies = all_reduce_no_grad(tallies, mesh.tp)
    return all_reduce_no_grad(tallies, mesh.pp)


def update_expert_biases(chunks: Sequence[Transformer], tallies: Tensor, skipped: Tensor) -> None:
    """Moves the expert bias of every layer that has one, by the tallies of the step; `skipped` is 1 or 0."""
    config = chunks[0].config
    for index, router in _routers(chunks):
        if router.expert_bias is not None:
            counts = tallies[index, : config.num_experts]
            move_bias(router.expert_bias, counts, config.moe_router_bias_update_rate, skipped)


def _routers(chunks: Sequence[Transformer]) -> Iterator[tuple[int, Router]]:
    """The routers here, each with the number of its layer among those with experts."""
    for chunk in chunks:
        for layer in layers_of(chunk).values():
            if layer.has_experts:
                yield chunk.config.expert_layers.index(layer.number), layer.mlp.router
