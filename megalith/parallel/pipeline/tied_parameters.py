"""Parameters that several pipeline stages hold, and the reduction of their gradients.

Two kinds of parameters are on several stages: a word embedding that is also the output matrix, on the first and on the
last stage; and relative positions, which all layers of a stack share, on every stage (a table is buckets × heads
numbers).

The copies start from the same values, because these depend on the name alone. Each stage computes its own part of the
gradient: for the embedding, the first stage that of the lookup and the last stage that of the prediction; for relative
positions, each stage that of its layers. Summed once per step, the parts are the gradient of the one matrix, and the
same update keeps the copies bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megalith.comm.collectives import Axis
from megalith.local_shards import local
from megalith.models.mixers.attention import RelativeBias
from megalith.models.transformer import Transformer
from megalith.parallel.mesh import Mesh

NAME = "embedding.word_embeddings.weight"


def shared_parameters(chunks: Sequence[Transformer], mesh: Mesh) -> dict[str, Axis]:
    """The parameters of this rank of which other stages hold copies, by name: the axis of the stages that do.

    All ranks of a pipeline list them in one order.
    """
    if mesh.pp.size == 1:
        return {}
    held = {NAME: mesh.tied} if chunks[0].config.embedding_at_head else {}
    held |= {
        f"{name}.weight": mesh.pp
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, RelativeBias)
    }
    return {name: axis for name, axis in held.items() if axis.size > 1}


def reduce_shared_gradients(chunks: Sequence[Transformer], mesh: Mesh) -> None:
    """Sums the gradients of what several stages hold, in place; after the last backward pass.

    Moves local shards, fp32, once a step: [rows of the padded vocabulary, hidden] where the matrices are tied, and
    [buckets, heads] of each stack with relative positions.
    """
    parameters = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
    for name, axis in shared_parameters(chunks, mesh).items():
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # no layer here reads it
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(local(parameter.grad), group=axis.group)


def copies(chunks: Sequence[Transformer], mesh: Mesh) -> set[str]:
    """The parameters of this rank that another rank counts in the gradient norm: the first stage with a copy does."""
    return {name for name, axis in shared_parameters(chunks, mesh).items() if axis.rank > 0}
