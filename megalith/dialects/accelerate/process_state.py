"""Accelerate's state of a process: as if Megatron were installed, on GPUs and without, over process groups of ours; and
what is gathered over the data-parallel replicas that it knows of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import accelerate.accelerator as stock
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.hardware import pick_device
from megalith.launch.launcher import TIMEOUT, init_distributed, this_process

REPLICAS = "megalith_replicas"  # the data-parallel axis


class _GlooState(AcceleratorState):
    """The state of processes without GPUs, for which Accelerate does not take Megatron into account."""

    def __init__(self, *args: Any, megatron_lm_plugin: Any = None, **options: Any):
        first = not AcceleratorState._shared_state
        super().__init__(*args, megatron_lm_plugin=megatron_lm_plugin, **options)
        if first and self.distributed_type in (
            DistributedType.MULTI_CPU,
            DistributedType.NO,
            DistributedType.MULTI_GPU,
        ):
            self.distributed_type = DistributedType.MEGATRON_LM
            megatron_lm_plugin.set_mixed_precision(self._mixed_precision)
            self.megatron_lm_plugin = megatron_lm_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type


@contextmanager
def megalith_for_megatron(cpu: bool) -> Iterator[None]:
    """In it Accelerate makes an Accelerator as if Megatron were installed, over process groups of ours."""
    join_processes(cpu)
    before = {
        name: getattr(stock, name)
        for name in ("is_megatron_lm_available", "AcceleratorState", "MegatronLMPlugin")
    }
    after: dict[str, Callable] = {
        "is_megatron_lm_available": lambda: True,
        "AcceleratorState": _GlooState,
        "MegatronLMPlugin": MegatronLMPlugin,
    }
    for name, value in after.items():
        setattr(stock, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(stock, name, value)


def join_processes(cpu: bool, timeout: timedelta = TIMEOUT) -> None:
    """The process group, of both gloo and NCCL on GPUs, before Accelerate makes one of NCCL alone."""
    process = this_process()
    if process.world_size > 1:  # which Accelerate asks for without GPUs
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(process.local_world_size))
    if dist.is_initialized():
        return
    if process.world_size > 1:
        init_distributed(pick_device("cpu" if cpu else "cuda", process.local_rank), timeout, one_speaks=False)
    else:  # Accelerate broadcasts under Megatron, be it alone
        dist.init_process_group(
            "gloo" if cpu else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1
        )


def gather_over(tensor: Tensor, axis: Axis) -> Tensor:
    """The tensors of all ranks of an axis, one behind the other; scalars as a row."""
    own = (tensor[None] if tensor.dim() == 0 else tensor).detach().contiguous()
    if axis.size == 1:
        return own
    every = [torch.empty_like(own) for _ in range(axis.size)]
    dist.all_gather(every, own, group=axis.group)
    return torch.cat(every)


def current_replicas() -> Axis:
    """The data-parallel axis of the prepared model of this process; one of size 1 before there is one."""
    return AcceleratorState._shared_state.get(REPLICAS, Axis())


def set_replicas(axis: Axis) -> None:
    """Makes an axis the data-parallel one of this process."""
    AcceleratorState._shared_state[REPLICAS] = axis


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Each of the losses averaged over the data-parallel replicas: a tensor with one number a loss."""
    mean, axis = torch.stack([loss.detach().float().reshape(()) for loss in losses]), current_replicas()
    return all_reduce_no_grad(mean, axis) / axis.size


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Tensors, in lists and dictionaries too, of all data-parallel replicas, one behind the other."""
    axis = current_replicas()
    return recursively_apply(lambda one: gather_over(one, axis), tensor, error_on_other_type=True)


def barrier() -> None:
    """Waits for all processes."""
    if dist.is_initialized():
        dist.barrier()
