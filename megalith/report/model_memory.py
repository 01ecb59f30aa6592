"""Memory of this rank's weights, gathered parameters and gradients, counted from their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

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
        for parameter in _sharded_parameters(chunk):
            tensors = [parameter.sharded_param]
            if hasattr(parameter, "_unsharded_param"):  # replaces it in the module while it is gathered
                tensors.append(parameter._unsharded_param)
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


def _sharded_parameters(chunk: nn.Module) -> Iterable:
    """Yield FSDP2's private record of each parameter. A module has one group in torch 2.11 and a list in 2.13."""
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                yield from group.fsdp_params if group is not None else ()
