"""Sharded layers for user-defined models: column- and row-parallel linears, and a vocabulary-parallel embedding.

A pair of linears needs one all-reduce, by the collectives of tensor_parallel.py:

    x ── ColumnParallelLinear ── activation or attention of this rank's units ── RowParallelLinear ── all-reduced

Each layer is built on the meta device from global sizes, and its parameters are DTensors over `axis`. On an axis of
size 1 it is a plain layer.
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
from megalith.parallel.replication import Replication, record_replication
from megalith.parallel.seams import plug, replace_parameter
from megalith.parallel.tensor.apply_tensor import distribute_parameters
from megalith.parallel.tensor.roles import COLUMNS, REPLICATED, ROWS, Role
from megalith.parallel.tensor.tensor_parallel import TensorParallel
from megalith.parallel.tensor.vocab_parallel import VocabParallel


class _ShardedLinear(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, Context(len(x), PassLayout()))


class ColumnParallelLinear(_ShardedLinear):
    """A linear with sharded outputs: [..., in_features], replicated -> [..., out_features / tp].

    Args:
        in_features: global input size.
        out_features: global output size. Weight [out_features, in_features] and bias [out_features] are sharded along
            dimension 0.
        axis: the tensor axis.
        bias: add a bias.

    Raises:
        ConfigError: the size of the axis does not divide out_features.
    """

    def __init__(self, in_features: int, out_features: int, axis: Axis, *, bias: bool = True):
        super().__init__(in_features, out_features, bias=bias)
        self.out_features = out_features
        _shard(self, Role(ROWS, ROWS, "column"), axis, out_features, "out_features")


class RowParallelLinear(_ShardedLinear):
    """A linear with sharded inputs: [..., in_features / tp] -> [..., out_features], all-reduced.

    Args:
        in_features: global input size. Weight [out_features, in_features] is sharded along dimension 1.
        out_features: global output size.
        axis: the tensor axis.
        bias: add a bias [out_features], which is replicated and added after the sum.

    Raises:
        ConfigError: the size of the axis does not divide in_features.
    """

    def __init__(self, in_features: int, out_features: int, axis: Axis, *, bias: bool = True):
        super().__init__(in_features, out_features, bias=bias)
        _shard(self, Role(COLUMNS, REPLICATED, "row"), axis, in_features, "in_features")


class VocabParallelEmbedding(nn.Module):
    """An embedding with a sharded vocabulary: int64 [batch, seq] -> float32 [batch, seq, embedding_dim].

    Args:
        num_embeddings: global vocabulary size. Weight [num_embeddings, embedding_dim] is sharded along dimension 0; the
            last ranks have fewer rows if the axis does not divide it.
        embedding_dim: size of an embedding.
        axis: the tensor axis.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, axis: Axis):
        super().__init__()
        self.num_embeddings = num_embeddings
        embedding = nn.utils.skip_init(nn.Embedding, num_embeddings, embedding_dim, device="meta")
        self.weight = embedding.weight
        self._vocabulary = vocab_parallel_of(self, axis)[0]
        if axis.size > 1:
            distribute_parameters(self, Role(ROWS), axis)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self._vocabulary.lookup(input_ids, local(self.weight), Context(len(input_ids), PassLayout()))


def vocab_parallel_of(output: nn.Module, axis: Axis) -> tuple[VocabParallel, int]:
    """Return the vocabulary-parallel loss and logits of an output matrix, and the matrix's global number of rows."""
    size = output.num_embeddings if isinstance(output, VocabParallelEmbedding) else output.out_features
    return VocabParallel(TensorParallel(axis, sequence_parallel=False), size), size


def replicate_plain_parameters(model: Model, axis: Axis, fully_sharded: bool) -> None:
    """Mark the parameters outside of sharded layers as replicated over the axis, in place.

    They become replicated DTensors. If FSDP2 will shard them, they stay plain and are recorded as the model's
    Replication, because a user's own modules would otherwise get DTensors from FSDP2 to compute with.
    """
    if axis.size == 1:
        return
    plain = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    if fully_sharded:
        record_replication(model, Replication(dict.fromkeys(plain, axis)))
        return
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            if name in plain:
                dtensor = distribute_tensor(parameter, axis.mesh, [Replicate()], src_data_rank=None)
                replicated = nn.Parameter(dtensor, parameter.requires_grad)
                replace_parameter(module, name.rpartition(".")[2], replicated)


def _shard(module: Linear, role: Role, axis: Axis, size: int, name: str) -> None:
    if axis.size == 1:
        return
    if size % axis.size:
        raise ConfigError(
            f"a {type(module).__name__} has {name} {size}, which the {axis.size} tensor-parallel ranks do not divide; "
            "choose a multiple"
        )
    distribute_parameters(module, role, axis)
    plug(module, "style", getattr(TensorParallel(axis, sequence_parallel=False), role.style))
