"""LoRA adapters under tensor parallelism: A and B are sharded like the linear that they adapt.

At a column-parallel linear A is replicated and B has the rows of the rank's heads or columns. x · Aᵀ is computed on the
rank's tokens; with SP its few columns, and not x, are all-gathered for B. At a row-parallel linear A has the columns of
the rank's inputs, x · Aᵀ is reduced as the linear's own output is, and B is replicated.

    linear   A           B           between them              partial gradients
    column   Replicate   Shard(0)    gathered as x is          A under SP: of a rank's tokens
    row      Shard(1)    Replicate   reduced as the output is  B under SP: of a rank's tokens
    none     Replicate   Replicate   nothing                   both under SP: of a rank's tokens (MLA's latents)

Where ranks share a KV group, B of keys and values is replicated, and each rank uses the group's rows of it; its
gradient is always partial.

Experts are sharded by expert parallelism (EXPERT_SHARDING): A and B of an expert are on its ranks. Over etp, B of
fc1 has the rank's rows and A of fc2 its columns. The other matrix is replicated, and its gradient is summed over etp.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megalith.comm.collectives import all_reduce_no_grad
from megalith.config.lora import WHOLE
from megalith.models.adapters import GroupedAdapter, LinearAdapter, QKVAdapter, adapters
from megalith.models.mixers.attention import Heads
from megalith.models.transformer import Transformer
from megalith.parallel.seams import plug
from megalith.parallel.tensor.roles import ROLES, shared_modules
from megalith.parallel.tensor.tensor_parallel import TensorParallel


class SharedKVRows:
    """Rows of B that a rank uses for the keys or values of a shared KV group."""

    def __init__(self, group: int, head_dim: int):
        self.first, self.count = group * head_dim, head_dim

    def rows(self, weight: Tensor) -> Tensor:
        return weight.narrow(0, self.first, self.count)


def shard_adapters(model: Transformer, tensor: TensorParallel) -> None:
    """Plug the tensor-parallel collectives and this rank's offsets into the adapters of `model`, in place.

    Call it after apply_tensor.
    """
    groups, axis = model.config.query_groups, tensor.axis
    shared = shared_modules(model.config, axis.size)
    for name, adapter in adapters(model):
        if isinstance(adapter, GroupedAdapter):
            continue
        style = ROLES[name.rpartition(".")[2]].style
        if style is not None:
            plug(adapter, "gather", tensor.gather if style == "column" else tensor.reduce)
        if style == "row":
            columns = next(iter(adapter.lora_A.values())).weight.shape[1]
            plug(adapter, "first_column", axis.rank * columns // axis.size)
            plug(adapter, "sum_columns", partial(all_reduce_no_grad, axis=axis))
        if not isinstance(adapter, QKVAdapter) and name.rpartition(".")[2] in shared:
            for each in _by_row(adapter, WHOLE):
                plug(each, "rows", model.get_submodule(name).rows)
        if isinstance(adapter, QKVAdapter) and groups < axis.size:
            plug(adapter, "heads", Heads(adapter.heads.in_group * groups // axis.size))
            rows = SharedKVRows(axis.rank * groups // axis.size, adapter.head_dim).rows
            for each in (each for part in adapter.ranks if part != "q" for each in _by_row(adapter, part)):
                plug(each, "rows", rows)


def _by_row(adapter: LinearAdapter, part: str) -> list[nn.Module]:
    """Return the modules of a sub-matrix whose rows correspond to rows of the adapted matrix."""
    by_part = adapter.lora_B, adapter.initial_B, adapter.lora_magnitude
    return [modules[part] for modules in by_part if modules is not None]
