"""Accelerate's state of a process: as if Megatron were installed, on GPUs and without, over process groups of ours; and
what is gathered over the data-parallel replicas that it knows of.

The main process under Megatron-LM is the last rank, and transformers 5 saves on rank 0 alone: a script's
`model.save_pretrained(folder, is_main_process=accelerator.is_main_process)` would leave an empty folder. Here both
ranks write where the script calls for it, one after the other, because a script may also save on rank 0 or on all.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import accelerate.accelerator as stock
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, recursively_apply
from accelerate.utils.operations import verify_operation
from torch import Tensor

from megalith.comm.collectives import Axis, all_reduce_no_grad, gather_json
from megalith.config import ParallelConfig
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.errors import ConfigError
from megalith.hardware import pick_device
from megalith.launch.call_order import CallOrder, clone_store
from megalith.launch.launcher import init_distributed, this_process
from megalith.parallel.mesh import build_mesh

REPLICAS = "megalith_replicas"  # the data-parallel axis
CALLS = "megalith_calls"  # the CallOrder of several processes


class _GlooState(AcceleratorState):
    """The state of processes without GPUs, for which Accelerate does not take Megatron into account."""

    def __init__(self, *args: Any, megatron_lm_plugin: Any = None, **options: Any):
        first = not AcceleratorState._shared_state
        asked = options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if str(asked) == "fp8":
            raise ConfigError(
                'mixed_precision is "fp8", which Accelerate hands to Transformer Engine; FP8 is a setting of the run '
                'here: give mixed_precision="bf16" and MegatronLMPlugin(other_megatron_args={"fp8_format": "hybrid"})'
            )
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
def megalith_for_megatron(cpu: bool, timeout: timedelta) -> Iterator[None]:
    """In it Accelerate makes an Accelerator as if Megatron were installed, over process groups of ours."""
    join_processes(cpu, timeout)
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


def join_processes(cpu: bool, timeout: timedelta) -> None:
    """The process group, of both gloo and NCCL on GPUs, before Accelerate makes one of NCCL alone."""
    joined = dist.is_initialized()
    if joined and "RANK" not in os.environ:  # as by Accelerate's debug_launcher
        return
    process = this_process()
    if process.world_size > 1:  # which Accelerate asks for without GPUs
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(process.local_world_size))
    if joined:
        return
    if process.world_size > 1:
        init_distributed(
            pick_device("cpu" if cpu else "cuda", process.local_rank), timeout, mute_other_ranks=False
        )
    else:  # Accelerate broadcasts under Megatron, be it alone
        dist.init_process_group(
            "gloo" if cpu else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1
        )


def watch_calls() -> None:
    """Watch over the calls that every rank has to make. Every rank calls it alike."""
    state = AcceleratorState._shared_state
    if CALLS not in state and dist.is_initialized() and dist.get_world_size() > 1:
        state[CALLS] = CallOrder(dist.get_rank(), dist.get_world_size(), clone_store(timedelta(seconds=30)))


def on_every_rank(name: str) -> AbstractContextManager:
    """A call of this name, in which the ranks wait for each other."""
    order = AcceleratorState._shared_state.get(CALLS)
    return nullcontext() if order is None else order.call(name)


def over_replicas(name: str) -> AbstractContextManager:
    """Watch a call in which the data-parallel replicas wait for each other, if every rank is a replica of its own.

    Ranks that share a replica need not make the call together: the last pipeline stage may gather alone.
    """
    return on_every_rank(name) if 1 < replicas().size == dist.get_world_size() else nullcontext()


def replicas() -> Axis:
    """The data-parallel axis of this process: of the prepared model, and before there is one of the plugin's layout.
    Every rank asks alike, for the first time makes process groups."""
    state = AcceleratorState._shared_state
    plugin, processes = state.get("megatron_lm_plugin"), dist.get_world_size() if dist.is_initialized() else 1
    if REPLICAS not in state and plugin is not None and plugin.data_parallel_size_of(processes) > 1:
        layout = ParallelConfig(
            tensor_model_parallel_size=plugin.tp_degree,
            pipeline_model_parallel_size=plugin.pp_degree,
            context_parallel_size=plugin.context_parallel_size,
        )
        set_replicas(build_mesh(layout, processes, PartialState().device.type).dp)
    return state.get(REPLICAS, Axis())


def set_replicas(axis: Axis) -> None:
    """Makes an axis the data-parallel one of this process."""
    AcceleratorState._shared_state[REPLICAS] = axis


def _gather_one(tensor: Tensor) -> Tensor:
    """Scalars become a row."""
    axis, own = replicas(), (tensor[None] if tensor.dim() == 0 else tensor).detach().contiguous()
    if axis.size == 1:
        return own
    every = [torch.empty_like(own) for _ in range(axis.size)]
    dist.all_gather(every, own, group=axis.group)
    return torch.cat(every)


@verify_operation
def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Tensors, in lists and dictionaries too, of all data-parallel replicas, one behind the other."""
    return recursively_apply(_gather_one, tensor, error_on_other_type=True)


def gather_objects(objects: Any) -> list[Any]:
    """The members of each replica's `objects`, one behind the other. Raises ConfigError for what JSON has not."""
    if (other := _unsayable(objects)) is not None:
        raise ConfigError(
            f"gather_for_metrics was given {other}, but beside tensors alone objects go between processes as JSON, "
            "which nobody has to trust: numbers, words, None, lists, and dictionaries by words; gather tensors by "
            "themselves"
        )
    return [one for each in gather_json(objects, replicas()) for one in each]


def _unsayable(value: Any) -> str | None:
    """What of an object JSON would not give back; None: nothing."""
    if isinstance(value, dict):
        keys = (f"a dictionary with the key {key!r}" for key in value if not isinstance(key, str))
        return next(keys, None) or _unsayable(list(value.values()))
    if isinstance(value, (list, tuple)):
        return next((found for one in value if (found := _unsayable(one)) is not None), None)
    return None if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


@verify_operation
def reduce_over_replicas(tensor: Any, reduction: str) -> Any:
    """Tensors, in lists and dictionaries too, reduced; the mean of whole numbers is float32. Raises ConfigError."""
    if reduction not in ("sum", "mean", "max", "none"):
        raise ConfigError(f"reduce was given the reduction {reduction!r}; there are sum, mean, max and none")

    def one(own: Tensor) -> Tensor:
        every = _gather_one(own[None])
        if reduction == "none":
            return own
        if reduction == "max":
            return every.amax(0)
        return every.sum(0) if reduction == "sum" else every.sum(0) / len(every)

    return recursively_apply(one, tensor, error_on_other_type=True)


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Each of the losses averaged over the data-parallel replicas: a tensor with one number a loss."""
    mean, axis = torch.stack([loss.detach().float().reshape(()) for loss in losses]), replicas()
    return all_reduce_no_grad(mean, axis) / axis.size


def barrier() -> None:
    """Waits for all processes."""
    if dist.is_initialized():
        with on_every_rank("wait_for_everyone"):
            dist.barrier()


@cache
def let_main_process_save() -> None:
    """Patch transformers' PreTrainedModel. Without Megatron's plugin it saves as before."""
    from transformers import PreTrainedModel

    save, decide = PreTrainedModel.save_pretrained, getattr(PreTrainedModel, "should_save_on_this_rank", None)

    @wraps(save)
    def save_pretrained(self: Any, save_directory: str | os.PathLike, *args: Any, **options: Any) -> Any:
        with _alone_in(save_directory):
            return save(self, save_directory, *args, **options)

    PreTrainedModel.save_pretrained = save_pretrained
    if decide is None:  # transformers 4 writes on each rank that says it is the main process
        return

    @wraps(decide)
    def should_save_on_this_rank(self: Any, is_main_process: bool) -> bool:
        if not _trains_here():
            return decide(self, is_main_process)
        return bool(is_main_process) and dist.get_rank() in (0, dist.get_world_size() - 1)

    PreTrainedModel.should_save_on_this_rank = should_save_on_this_rank


def _trains_here() -> bool:
    kind = PartialState._shared_state.get("distributed_type")
    return kind == DistributedType.MEGATRON_LM and dist.is_initialized()


@contextmanager
def _alone_in(folder: str | os.PathLike) -> Iterator[None]:
    """Keep the other ranks of this machine out of the folder, which is created."""
    if not _trains_here() or os.path.isfile(folder):  # transformers reports a file
        yield
        return
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
