"""A word embedding that is the output matrix too, with the first and the last pipeline stage each holding a copy.

Both start from the same values, for these depend on the name alone. Each stage finds its own part of the gradient:
the first that of looking tokens up, the last that of predicting them. Summed, once a step, they are the gradient of
the one matrix, and the same update keeps the copies equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megalith.comm.collectives import Axis, local
from megalith.models.transformer import Transformer

NAME = "embedding.word_embeddings.weight"


def reduce_tied_embedding(chunks: Sequence[Transformer], tied: Axis) -> None:
    """Sums the gradient over the first and last stage (`mesh.tied`), in place; after the last backward pass.

    Moves the local shard, fp32 [rows of the padded vocabulary, hidden], once a step. Does nothing where the
    matrices are not tied or `tied` has size 1.
    """
    if not on_two_stages(chunks, tied):
        return
    for chunk in chunks:
        if chunk.embedding is not None and chunk.embedding.word_embeddings.weight.requires_grad:
            dist.all_reduce(local(chunk.embedding.word_embeddings.weight.grad), group=tied.group)


def on_two_stages(chunks: Sequence[Transformer], tied: Axis) -> set[str]:
    """The parameters of this rank of which `mesh.tied` says that another stage holds a copy."""
    return {NAME} if tied.size > 1 and chunks[0].config.embedding_at_head else set()


def copies(chunks: Sequence[Transformer], pp: Axis) -> set[str]:
    """The parameters of this rank that another rank counts in the gradient norm: the last stage's tied copy."""
    last = pp.size > 1 and pp.rank == pp.size - 1
    return {NAME} if last and chunks[0].config.embedding_at_head else set()
