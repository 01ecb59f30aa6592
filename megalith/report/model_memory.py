"""Memory of this rank's weights, gathered parameters and gradients, counted from their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megalith.local_shards import local


@dataclass(frozen=True)
class Held:
    """Bytes on this rank."""

    weights: int
    gathered: int
    """Parameters as FSDP2 has gathered them."""
    gradients: int


def model_bytes(chunks: Iterable[nn.Module]) -> Held:
    """The weights, gathered copies and gradients of the chunks, each tensor's memory counted once."""
    weights: list[Tensor | None] = []
    gathered: list[Tensor | None] = []
    gradients: list[Tensor | None] = []
    for chunk in chunks:
        counted: set[int] = set()
        for parameter in _sharded_parameters(chunk):
            held = [parameter.sharded_param]
            if hasattr(parameter, "_unsharded_param"):  # stands in the module while it is gathered
                held.append(parameter._unsharded_param)
            counted |= {id(tensor) for tensor in held}
            weights.append(parameter.sharded_param)
            gathered += parameter.all_gather_outputs
            gradients += [tensor.grad for tensor in held] + [parameter.unsharded_accumulated_grad]
        others = [parameter for parameter in chunk.parameters() if id(parameter) not in counted]
        weights += others
        gradients += [parameter.grad for parameter in others]
    return Held(total_bytes(weights), total_bytes(gathered), total_bytes(gradients))


def total_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The memory behind the tensors: tensors that share it count once."""
    storages = [local(tensor.detach()).untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _sharded_parameters(chunk: nn.Module) -> Iterable:
    """FSDP2's own record of each parameter (private: one group a module in torch 2.11, a list of them in 2.13)."""
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                yield from group.fsdp_params if group is not None else ()
