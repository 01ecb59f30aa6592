"""Memory of this rank's weights, gathered parameters and gradients, counted from their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megalith.compat.fsdp import parameter_records, unsharded_parameter
from megalith.local_shards import local


@dataclass(frozen=True)
class ModelBytes:
    """Memory of the model on this rank, in bytes."""

    weights: int
    gathered: int
    """Parameters gathered by FSDP2."""
    gradients: int


def model_bytes(chunks: Iterable[nn.Module]) -> ModelBytes:
    """Return the memory of the chunks' weights, gathered copies and gradients. Shared memory counts once."""
    weights: list[Tensor | None] = []
    gathered: list[Tensor | None] = []
    gradients: list[Tensor | None] = []
    for chunk in chunks:
        counted: set[int] = set()
        modules = (module for module in chunk.modules() if isinstance(module, FSDPModule))
        for parameter in (record for module in modules for record in parameter_records(module)):
            tensors = [parameter.sharded_param]
            if (unsharded := unsharded_parameter(parameter)) is not None:
                tensors.append(unsharded)
            counted |= {id(tensor) for tensor in tensors}
            weights.append(parameter.sharded_param)
            gathered += parameter.all_gather_outputs
            gradients += [tensor.grad for tensor in tensors] + [parameter.unsharded_accumulated_grad]
        others = [parameter for parameter in chunk.parameters() if id(parameter) not in counted]
        weights += others
        gradients += [parameter.grad for parameter in others]
    return ModelBytes(total_bytes(weights), total_bytes(gathered), total_bytes(gradients))


def total_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the total size of the tensors' storages in bytes. Shared storage counts once."""
    storages = [local(tensor.detach()).untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
