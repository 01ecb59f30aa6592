"""Accelerate's process state with Megalith's process groups, and collectives over the data-parallel replicas.

Accelerate behaves as if Megatron-LM were installed, with and without GPUs.

With Megatron-LM the main process is the last rank, but transformers 5 saves only on rank 0, so that
`model.save_pretrained(folder, is_main_process=accelerator.is_main_process)` would leave an empty folder. Here both
ranks write, one after the other, because a script may also save on rank 0 or on all ranks.
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
from megalith.launch.launcher import end_at_exit, init_distributed, this_process
from megalith.parallel.mesh import build_mesh

REPLICAS = "megalith_replicas"  # the data-parallel axis
CALLS = "megalith_calls"  # the CallOrder, if there are several processes


class _MegatronState(AcceleratorState):
    """AcceleratorState that selects Megatron-LM even without GPUs. Accelerate's own state does not."""

    def __init__(self, *args: Any, megatron_lm_plugin: Any = None, **options: Any):
        is_first = not AcceleratorState._shared_state
        precision = options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if str(precision) == "fp8":
            raise ConfigError(
                'mixed_precision is "fp8", which Accelerate passes to Transformer Engine; for FP8 here set '
                'mixed_precision="bf16" and MegatronLMPlugin(other_megatron_args={"fp8_format": "hybrid"})'
            )
        super().__init__(*args, megatron_lm_plugin=megatron_lm_plugin, **options)
        if is_first and self.distributed_type in (
            DistributedType.MULTI_CPU,
            DistributedType.NO,
            DistributedType.MULTI_GPU,
        ):
            self.distributed_type = DistributedType.MEGATRON_LM
            megatron_lm_plugin.set_mixed_precision(self._mixed_precision)
            self.megatron_lm_plugin = megatron_lm_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type


@contextmanager
def replace_megatron(cpu: bool, timeout: timedelta) -> Iterator[None]:
    """Make Accelerate, inside the block, create an Accelerator as if Megatron-LM were installed."""
    init_process_groups(cpu, timeout)
    before = {
        name: getattr(stock, name)
        for name in ("is_megatron_lm_available", "AcceleratorState", "MegatronLMPlugin")
    }
    after: dict[str, Callable] = {
        "is_megatron_lm_available": lambda: True,
        "AcceleratorState": _MegatronState,
        "MegatronLMPlugin": MegatronLMPlugin,
    }
    for name, value in after.items():
        setattr(stock, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(stock, name, value)


def init_process_groups(cpu: bool, timeout: timedelta) -> None:
    """Create the default process group, with gloo and NCCL on GPUs, before Accelerate creates one with NCCL only."""
    is_initialized = dist.is_initialized()
    if is_initialized and "RANK" not in os.environ:  # by Accelerate's debug_launcher
        return
    process = this_process()
    if process.world_size > 1:  # Accelerate reads it if there are no GPUs
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(process.local_world_size))
    end_at_exit()  # also of a group that the script has created, which the model's groups belong to
    if is_initialized:
        return
    if process.world_size > 1:
        init_distributed(
            pick_device("cpu" if cpu else "cuda", process.local_rank), timeout, mute_other_ranks=False
        )
    else:  # with Megatron-LM Accelerate broadcasts even in a single process
        dist.init_process_group(
            "gloo" if cpu else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1
        )


def track_call_order() -> None:
    """Start checking that all ranks make the same collective calls in the same order. Collective over all ranks."""
    state = AcceleratorState._shared_state
    if CALLS not in state and dist.is_initialized() and dist.get_world_size() > 1:
        state[CALLS] = CallOrder(dist.get_rank(), dist.get_world_size(), clone_store(timedelta(seconds=30)))


def collective_call(name: str) -> AbstractContextManager:
    """Return a context for a call with this name that every rank has to make."""
    order = AcceleratorState._shared_state.get(CALLS)
    return nullcontext() if order is None else order.call(name)


def replica_collective_call(name: str) -> AbstractContextManager:
    """Return a context for a collective over the data-parallel replicas.

    The order of calls is checked (launch/call_order.py) only if every rank is a replica. Otherwise the ranks of a
    replica need not make the call together: the last pipeline stage may gather alone.
    """
    return collective_call(name) if 1 < replicas().size == dist.get_world_size() else nullcontext()


def replicas() -> Axis:
    """Return the data-parallel axis of the prepared model or, before `prepare`, of the plugin's layout.

    The first call creates process groups, so every rank has to make it.
    """
    state = AcceleratorState._shared_state
    plugin, processes = state.get("megatron_lm_plugin"), dist.get_world_size() if dist.is_initialized() else 1
    if REPLICAS not in state and plugin is not None and plugin.data_parallel_size_of(processes) > 1:
        layout = ParallelConfig(
            tensor_model_parallel_size=plugin.tp_degree,
            pipeline_model_parallel_size=plugin.pp_degree,
            context_parallel_size=plugin.context_parallel_size,
        )
        set_data_parallel_axis(build_mesh(layout, processes, PartialState().device.type).dp)
    return state.get(REPLICAS, Axis())


def set_data_parallel_axis(axis: Axis) -> None:
    """Set the data-parallel axis of this process."""
    AcceleratorState._shared_state[REPLICAS] = axis


def _all_gather_tensor(tensor: Tensor) -> Tensor:
    """Concatenate a tensor of all replicas along dim 0. A scalar becomes one row."""
    axis, local = replicas(), (tensor[None] if tensor.dim() == 0 else tensor).detach().contiguous()
    if axis.size == 1:
        return local
    gathered = [torch.empty_like(local) for _ in range(axis.size)]
    dist.all_gather(gathered, local, group=axis.group)
    return torch.cat(gathered)


@verify_operation
def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return a tensor, or nested tensors, of all data-parallel replicas, concatenated along dim 0."""
    return recursively_apply(_all_gather_tensor, tensor, error_on_other_type=True)


def gather_objects(objects: Any) -> list[Any]:
    """Return the members of all replicas' `objects` in one list.

    Raises ConfigError for objects that JSON cannot represent.
    """
    if (unsupported := _not_json(objects)) is not None:
        raise ConfigError(
            f"gather_for_metrics has {unsupported}, but objects are exchanged as JSON, not pickle; use numbers, "
            "strings, None, lists and dictionaries with string keys, and gather tensors separately"
        )
    return [member for members in gather_json(objects, replicas()) for member in members]


def _not_json(value: Any) -> str | None:
    """Describe the first value in an object that JSON cannot represent, or return None if there is none."""
    if isinstance(value, dict):
        keys = (f"a dictionary with the key {key!r}" for key in value if not isinstance(key, str))
        return next(keys, None) or _not_json(list(value.values()))
    if isinstance(value, (list, tuple)):
        return next((part for member in value if (part := _not_json(member)) is not None), None)
    return None if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


@verify_operation
def reduce_over_replicas(tensor: Any, reduction: str) -> Any:
    """Reduce a tensor, or nested tensors, over the data-parallel replicas.

    Args:
        tensor: tensors, in lists and dictionaries too.
        reduction: sum, mean (float32 for integers), max or none.

    Raises:
        ConfigError: unknown reduction.
    """
    if reduction not in ("sum", "mean", "max", "none"):
        raise ConfigError(f"reduce is called with reduction {reduction!r}; use sum, mean, max or none")

    def reduce_tensor(local: Tensor) -> Tensor:
        gathered = _all_gather_tensor(local[None])
        if reduction == "none":
            return local
        if reduction == "max":
            return gathered.amax(0)
        return gathered.sum(0) if reduction == "sum" else gathered.sum(0) / len(gathered)

    return recursively_apply(reduce_tensor, tensor, error_on_other_type=True)


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return each loss averaged over the data-parallel replicas, float32 [number of losses]."""
    mean, axis = torch.stack([loss.detach().float().reshape(()) for loss in losses]), replicas()
    return all_reduce_no_grad(mean, axis) / axis.size


def barrier() -> None:
    """Wait for all processes."""
    if dist.is_initialized():
        with collective_call("wait_for_everyone"):
            dist.barrier()


@cache
def patch_save_pretrained() -> None:
    """Patch PreTrainedModel so that rank 0 and the last rank save. Without the plugin, transformers saves as before."""
    from transformers import PreTrainedModel

    save, decide = PreTrainedModel.save_pretrained, getattr(PreTrainedModel, "should_save_on_this_rank", None)

    @wraps(save)
    def save_pretrained(self: Any, save_directory: str | os.PathLike, *args: Any, **options: Any) -> Any:
        with _exclusive_folder(save_directory):
            return save(self, save_directory, *args, **options)

    PreTrainedModel.save_pretrained = save_pretrained
    if decide is None:  # transformers 4 writes on each rank that passes is_main_process
        return

    @wraps(decide)
    def should_save_on_this_rank(self: Any, is_main_process: bool) -> bool:
        if not _uses_megatron():
            return decide(self, is_main_process)
        return bool(is_main_process) and dist.get_rank() in (0, dist.get_world_size() - 1)

    PreTrainedModel.should_save_on_this_rank = should_save_on_this_rank


def _uses_megatron() -> bool:
    kind = PartialState._shared_state.get("distributed_type")
    return kind == DistributedType.MEGATRON_LM and dist.is_initialized()


@contextmanager
def _exclusive_folder(folder: str | os.PathLike) -> Iterator[None]:
    """Create a folder and lock it against the other ranks of this machine."""
    if not _uses_megatron() or os.path.isfile(folder):  # transformers reports a file
        yield
        return
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems do not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
