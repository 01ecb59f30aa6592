"""Wrappers of torch's compiler, which is imported only when something is compiled, because the import takes seconds.

Element-wise operations outside of compiled layers are compiled to one kernel on a GPU; run eagerly, each operation
would read and write memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from megalith.compat.dynamo import is_tracer_imported, maybe_mark_dynamic

INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per element


def run_eagerly() -> AbstractContextManager:
    """Return a context manager in which compiled code runs eagerly."""
    if not is_tracer_imported():  # nothing has been compiled
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def disable_compile(function: Callable) -> Callable:
    """Exclude `function` from compilation. For hooks of compiled modules."""
    return torch.compiler.disable(function) if is_tracer_imported() else function


def mark_dynamic(x: Tensor, dim: int) -> None:
    """Mark dimension `dim` of x as dynamic, so that compiled code accepts any size."""
    if is_tracer_imported() and not torch.compiler.is_compiling():
        maybe_mark_dynamic(x, dim)


def as_one_kernel(function: Callable, *args, sizes_vary: bool = False, rows_vary: bool = False):
    """Run function(*args) compiled on a GPU. Within code that is being compiled, inline it.

    The first argument must be a tensor. By default, the function is compiled for every new size. With `sizes_vary`, a
    dimension becomes dynamic when its size changes, and after a few variants the function runs eagerly. `rows_vary`
    does the same, but dimension 0 of each tensor is dynamic from the start.
    """
    if not _on_gpu(args[0]) or torch.compiler.is_compiling():
        return function(*args)
    if not torch.is_grad_enabled():  # avoids a second compilation for inputs that require gradients
        args = [arg.detach() if isinstance(arg, Tensor) and arg.requires_grad else arg for arg in args]
    if rows_vary:
        for arg in args:
            if isinstance(arg, Tensor):
                maybe_mark_dynamic(arg, 0)
    return _compiled(function, None if sizes_vary or rows_vary else False)(*args)


def run_with_breaks(method: partial, *args, dynamic: bool | None = None):
    """Compile and run a Runnable's method outside of its module. For methods whose graph has breaks.

    If the method were compiled as part of its module, the graph would break in the code that all Runnables share. The
    compiler would then skip that code for all other layers too.
    """
    return _in_pieces(method.func, dynamic)(*method.args, *args)


@cache
def _in_pieces(function: Callable, dynamic: bool | None) -> Callable:
    return torch.compile(function, dynamic=dynamic)


def compiled_recompute() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return torch's context managers for a compiled forward pass that saves nothing, and for its recomputation.

    Without them, torch 2.11 saves the results of autograd functions, such as matmuls and norms on a GPU.
    """
    return create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)


def compiled_save_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return context managers like `compiled_recompute`, for a forward pass that saves only the attention output."""
    return create_selective_checkpoint_contexts(_saves)


compiled_recompute.cache_hash = "megalith.recomputing"  # torch's cache keys of code compiled with them
compiled_save_attention.cache_hash = "megalith.saving_attention"


def _saves(context: Any, operator: Any, *args, **kwargs) -> CheckpointPolicy:
    attends = any(part in str(operator) for part in ("scaled_dot_product", "block_attention"))
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE


def depend_on(x: Tensor, grad: Tensor) -> Tensor:
    """Return x as if it depended on `grad`. torch then compiles the uses of x into the backward pass."""
    zero = grad.flatten()[0].view(INT_DTYPES[grad.itemsize]) & 0
    return (x.view(INT_DTYPES[x.itemsize]) + zero.to(INT_DTYPES[x.itemsize])).view(x.dtype)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@cache
def _compiled(function: Callable, dynamic: bool | None) -> Callable:
    return torch.compile(function, fullgraph=dynamic is False, dynamic=dynamic)
