"""Largest attention logits of a training step, per layer and head, for qk-clip and for the log.

Each rank records the maxima of its heads and tokens in every forward pass, and one all-reduce per step takes the
maximum over all ranks. The table is a few kilobytes, and every rank holds all of it. Recomputed passes record nothing.
Under context parallelism, each layer all-gathers its keys for the recording.

Self-attention is recorded, cross-attention is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megalith.comm.collectives import all_reduce_no_grad, begin_group_all_gather, gather_json
from megalith.compat.torch_operators import functional_collectives
from megalith.compat.training_objects import in_backward_pass
from megalith.models.mixers.attention import Attention, CrossAttention
from megalith.ops.max_logits import max_logits
from megalith.parallel.context.zigzag import from_zigzag, spans
from megalith.parallel.mesh import Mesh
from megalith.parallel.seams import plug


class AttentionLogits:
    """Largest attention logits, float32 [layers, heads], with one row per self-attention of the model."""

    def __init__(self, chunks: Sequence[nn.Module], heads: int, mesh: Mesh, device: torch.device):
        """Make the self-attention of this rank's `chunks` record its logits. Collective.

        Args:
            chunks: this rank's chunks of the model.
            heads: query heads per layer.
            mesh: this rank's axes.
            device: device of the table.
        """
        mixers = {
            name: module
            for chunk in chunks
            for name, module in chunk.named_modules()
            if isinstance(module, Attention) and not isinstance(module, CrossAttention)
        }
        names = {name for each in gather_json(list(mixers), mesh.world) for name in each}
        self.rows = {name: row for row, name in enumerate(sorted(names))}
        """Row of each self-attention, by module name."""
        self._world = mesh.world
        self._maxima = torch.full((len(names), heads), float("-inf"), device=device)
        axis = mesh.cp
        context = dict(size=axis.size, rank=axis.rank, group=axis.name)
        for name, mixer in mixers.items():
            plug(mixer, "record_logits", partial(_record, self._maxima[self.rows[name]], **context))

    def clear(self) -> None:
        """Clear the recorded logits."""
        self._maxima.fill_(float("-inf"))

    def all_ranks(self) -> Tensor:
        """Return the step's maxima over all ranks, float32 [layers, heads]. Collective."""
        return all_reduce_no_grad(self._maxima, self._world, "max")


def _record(
    maxima: Tensor,  # float32 [heads] of a layer
    query: Tensor,  # [batch, local queries, local heads, head_dim]
    key: Tensor,  # [batch, local keys, local groups, head_dim]
    *,
    first_head: int,
    scale: float | None,
    causal: bool,
    mask: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    size: int,
    rank: int,
    group: str,
) -> None:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    visibility = mask, documents, causal, window
    record_max_logits(maxima, query.detach(), key.detach(), first_head, scale, *visibility, size, rank, group)


@torch.library.custom_op("megalith::record_max_logits", mutates_args={"maxima"})
def record_max_logits(
    maxima: Tensor,
    query: Tensor,
    key: Tensor,
    first_head: int,
    scale: float,
    mask: Tensor | None,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    size: int,
    rank: int,
    group: str,
) -> None:
    """Raise a layer's recorded maxima to this forward pass's largest logits per head.

    Collective over the context group.

    Does nothing during recomputation. Under context parallelism the keys of all `size` ranks are all-gathered.
    """
    if in_backward_pass():
        return
    positions = None
    if size > 1:
        positions = spans(rank, size, key.shape[1])
        gathered = functional_collectives.wait_tensor(begin_group_all_gather(key.contiguous(), size, group))
        key = from_zigzag(gathered.view(size, *key.shape), dim=1)
    visibility = dict(causal=causal, mask=mask, documents=documents, window=window)
    largest = max_logits(query, key, scale=scale, spans=positions, **visibility)
    local = maxima[first_head : first_head + len(largest)]
    local.copy_(torch.maximum(local, largest))


@record_max_logits.register_fake
def _(maxima, query, key, first_head, scale, mask, documents, causal, window, size, rank, group) -> None:
    return None
