"""Sharded layers for a model of one's own: column- and row-parallel linears, and a vocabulary-parallel embedding.

A pair of matmuls has one all-reduce, as in tensor_parallel.py, whose collectives these are:

    x ── ColumnParallelLinear ── activation or attention of this rank's units ── RowParallelLinear ── all-reduced

Each is made on the meta device, out of global sizes, with parameters that are DTensors over `axis`. On an axis of one
they are plain layers.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from megalith.comm.collectives import Axis
from megalith.errors import ConfigError
from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.own_model import Model
from megalith.models.pass_context import Context, PassLayout
from megalith.parallel.seams import plug, replace_parameter
from megalith.parallel.tensor.roles import COLUMNS, ROWS, WHOLE, Role
from megalith.parallel.tensor.tensor_parallel import TensorParallel, VocabParallel, place


class _ShardedLinear(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, Context(len(x), PassLayout()))


class ColumnParallelLinear(_ShardedLinear):
    """[..., in_features], whole on every rank → [..., out_features / tp]: this rank's run of the outputs.

    Weight [out_features, in_features] and bias [out_features] are sharded along dimension 0. Raises ConfigError where
    the axis's size does not divide out_features.
    """

    def __init__(self, in_features: int, out_features: int, axis: Axis, *, bias: bool = True):
        super().__init__(in_features, out_features, bias=bias)
        self.out_features = out_features
        _shard(self, Role(ROWS, ROWS, "column"), axis, out_features, "out_features")


class RowParallelLinear(_ShardedLinear):
    """[..., in_features / tp], this rank's → [..., out_features]: the all-reduced sum, to which the bias is added.

    Weight [out_features, in_features] is sharded along dimension 1, bias [out_features] replicated. Raises ConfigError
    where the axis's size does not divide in_features.
    """

    def __init__(self, in_features: int, out_features: int, axis: Axis, *, bias: bool = True):
        super().__init__(in_features, out_features, bias=bias)
        _shard(self, Role(COLUMNS, WHOLE, "row"), axis, in_features, "in_features")


class VocabParallelEmbedding(nn.Module):
    """int64 [batch, seq] → float32 [batch, seq, embedding_dim]; weight [num_embeddings, embedding_dim], sharded along
    dimension 0, the last ranks having fewer rows where that does not come out even."""

    def __init__(self, num_embeddings: int, embedding_dim: int, axis: Axis):
        super().__init__()
        self.num_embeddings = num_embeddings
        embedding = nn.utils.skip_init(nn.Embedding, num_embeddings, embedding_dim, device="meta")
        self.weight = embedding.weight
        self._vocabulary = vocab_parallel_of(self, axis)[0]
        if axis.size > 1:
            place(self, Role(ROWS), axis)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self._vocabulary.lookup(input_ids, local(self.weight), Context(len(input_ids), PassLayout()))


def vocab_parallel_of(output: nn.Module, axis: Axis) -> tuple[VocabParallel, int]:
    """The loss and the logits over the rows of an output matrix, and how many rows it has on all ranks."""
    size = output.num_embeddings if isinstance(output, VocabParallelEmbedding) else output.out_features
    return VocabParallel(TensorParallel(axis, sequence_parallel=False), size), size


def replicate_plain_parameters(model: Model, axis: Axis, fully_sharded: bool) -> None:
    """Says, in place, of the parameters that no sharded layer has taken that they stand alike on the axis's ranks.

    They become replicated DTensors. Not where FSDP2 will shard them: it would give a model's own modules DTensors to
    compute with; there they stay plain, and `model.copied` tells of them.
    """
    if axis.size == 1:
        return
    plain = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    if fully_sharded:
        plug(model, "copied", dict.fromkeys(plain, axis))
        return
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            if name in plain:
                whole = distribute_tensor(parameter, axis.mesh, [Replicate()], src_data_rank=None)
                own = nn.Parameter(whole, parameter.requires_grad)
                replace_parameter(module, name.rpartition(".")[2], own)


def _shard(module: Linear, role: Role, axis: Axis, size: int, what: str) -> None:
    if axis.size == 1:
        return
    if size % axis.size:
        raise ConfigError(
            f"a {type(module).__name__} has {what} {size}, which the {axis.size} tensor-parallel ranks do not divide; "
            "choose a multiple"
        )
    place(module, role, axis)
    plug(module, "style", getattr(TensorParallel(axis, sequence_parallel=False), role.style))
