"""Token counts per expert over all ranks, used for load-balancing losses, logging and expert biases."""

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
    """Collectives over the tokens of a micro-batch that is sharded over `axis.size` ranks."""

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
    """Sum the routers' tallies over micro-batches and ranks, and reset them. Collective.

    Call it after the backward passes of a step.

    Returns:
        float32 [layers with experts, experts + 3], the same on every rank. None without experts.
    """
    config = chunks[0].config
    if not config.expert_layers:
        return None
    tallies = torch.zeros(len(config.expert_layers), config.num_experts + 3, device=device)
    for index, router in _routers(chunks):
        tallies[index] = router.tally
        router.tally.zero_()
    tallies = all_reduce_no_grad(tallies, mesh.dp_cp)
    if sequence_parallel:  # otherwise the tensor-parallel ranks have the same tokens
        tallies = all_reduce_no_grad(tallies, mesh.tp)
    return all_reduce_no_grad(tallies, mesh.pp)


def update_expert_biases(chunks: Sequence[Transformer], tallies: Tensor, skipped: Tensor) -> None:
    """Update the expert bias of every layer that has one from the step's tallies. `skipped`: 1 if the step was
    skipped, else 0."""
    config = chunks[0].config
    for index, router in _routers(chunks):
        if router.expert_bias is not None:
            counts = tallies[index, : config.num_experts]
            move_bias(router.expert_bias, counts, config.moe_router_bias_update_rate, skipped)


def _routers(chunks: Sequence[Transformer]) -> Iterator[tuple[int, Router]]:
    """Yield each local router and its index among the layers with experts."""
    for chunk in chunks:
        for layer in layers_of(chunk).values():
            if layer.has_experts:
                yield chunk.config.expert_layers.index(layer.number), layer.mlp.router
