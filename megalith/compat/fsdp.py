"""State of FSDP2 modules that `fully_shard` has no public interface for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def fsdp_state(module: FSDPModule) -> Any:
    """Return the state of an FSDP2 module, for `sharded_parameters`."""
    return module._get_fsdp_state()


def sharded_parameters(state: Any) -> list[Tensor]:
    """Return the sharded parameters of a module's FSDP2 unit, which are DTensors."""
    return [parameter.sharded_param for parameter in state._fsdp_param_group.fsdp_params]


def end_backward(root: FSDPModule) -> None:
    """Run FSDP2's callback for the end of a root module's backward pass, which reduces accumulated gradients."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def reduce_scatter_stream(root: FSDPModule) -> torch.cuda.Stream | None:
    """Return the stream on which a root module reduces gradients, or None on a CPU or before its first forward pass."""
    stream = getattr(root._get_fsdp_state()._comm_ctx, "reduce_scatter_stream", None)
    return stream if isinstance(stream, torch.cuda.Stream) else None


def parameter_records(module: FSDPModule) -> Iterator[Any]:
    """Yield FSDP2's record of each parameter of a module's unit.

    A record has `sharded_param`, `all_gather_outputs` (tensors) and `unsharded_accumulated_grad` (tensor or None).
    torch 2.11 has one group of parameters per module, and torch 2.13 a list.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        yield from group.fsdp_params if group is not None else ()


def unsharded_parameter(record: Any) -> Tensor | None:
    """Return the parameter that replaces the sharded one while it is gathered, or None before its first all-gather."""
    return getattr(record, "_unsharded_param", None)
