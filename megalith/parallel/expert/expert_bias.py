"""How many tokens each expert got in a step, over all ranks, and the expert bias that follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalith.comm.collectives import summed
from megalith.models.load_balance import move_bias
from megalith.models.router import Router
from megalith.models.transformer import Transformer
from megalith.parallel.mesh import Mesh


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
    tallies = summed(tallies, mesh.dp_cp)
    if sequence_parallel:  # else the ranks of the tensor axis have the same tokens
        tallies = summed(tallies, mesh.tp)
    return summed(tallies, mesh.pp)


def move_biases(chunks: Sequence[Transformer], tallies: Tensor, skipped: Tensor) -> None:
    """Moves the expert bias of every layer that has one, by the tallies of the step; `skipped` is 1 or 0."""
    config = chunks[0].config
    for index, router in _routers(chunks):
        if router.expert_bias is not None:
            counts = tallies[index, : config.num_experts]
            move_bias(router.expert_bias, counts, config.moe_router_bias_update_rate, skipped)


def _routers(chunks: Sequence[Transformer]) -> Iterator[tuple[int, Router]]:
    """The routers here, each with the number of its layer among those with experts."""
    for chunk in chunks:
        for name, layer in chunk.layers.items():
            if layer.has_experts:
                yield chunk.config.expert_layers.index(int(name)), layer.mlp.router
