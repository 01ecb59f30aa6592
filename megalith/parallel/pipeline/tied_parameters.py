"""Parameters that several pipeline stages hold, and the reduction of their gradients.

Two kinds of parameters are on several stages: a tied word embedding, or its trained rows, on the first and the last
stage; and relative position embeddings [buckets, heads], which all layers of a stack share, on every stage.

The copies start equal, because initial values depend only on the name. Each stage computes a partial gradient. For
the embedding, the first stage has the gradient of the lookup and the last stage the gradient of the logits. For
relative positions, each stage has the gradient of its own layers. The partial gradients are summed once per step, and
the same update keeps the copies bitwise equal.
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
    """Return the parameters that several stages hold, and the axis of those stages, by name.

    The order is the same on all ranks of a pipeline.
    """
    if mesh.pp.size == 1:
        return {}
    shared = {}
    if chunks[0].config.embedding_at_head:
        shared = {
            name: mesh.tied
            for chunk in chunks
            for name, _ in chunk.named_parameters()
            if name.startswith(NAME.removesuffix("weight"))  # its trained rows too
        }
    shared |= {
        f"{name}.weight": mesh.pp
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, RelativeBias) and chunk.config.shares_relative_positions
    }
    return {name: axis for name, axis in shared.items() if axis.size > 1}


def reduce_shared_gradients(chunks: Sequence[Transformer], mesh: Mesh) -> None:
    """Sum the gradients of parameters that several stages share, in place. Call it after the last backward pass.

    It all-reduces local fp32 shards once per step: [padded vocabulary, hidden] of a tied embedding, and [buckets,
    heads] per stack with relative position embeddings.
    """
    shared = shared_parameters(chunks, mesh)
    if not shared:
        return
    parameters = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
    for name, axis in shared.items():
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # no layer of this stage uses it
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(local(parameter.grad), group=axis.group)


def counted_elsewhere(chunks: Sequence[Transformer], mesh: Mesh) -> set[str]:
    """Return the names of the parameters whose gradient norm another stage counts. The first stage with a copy counts
    it.
    """
    return {name for name, axis in shared_parameters(chunks, mesh).items() if axis.rank > 0}
