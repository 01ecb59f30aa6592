"""What this package asks of torch's compiler, without importing it before something is compiled: it takes seconds.

Elementwise steps outside of compiled layers run as one kernel on a GPU: eager, they go through memory several times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def constant(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result: what `function` returns is a constant of compiled code."""
    function._dynamo_marked_constant = True
    return function


def run_eagerly() -> AbstractContextManager:
    """In it, compiled code runs as it was written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def disable_compile(function: Callable) -> Callable:
    """`function` for a hook of modules that are compiled, if any are: it runs as it was written."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


def varies(x: Tensor, dim: int) -> None:
    """Lets compiled code take x with any number of entries along `dim`."""
    if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(x, dim)


def as_one_kernel(function: Callable, *args, sizes_vary: bool = False, rows_vary: bool = False):
    """function(*args), of which the first is a tensor: compiled on a GPU, but as a part of what is being compiled.

    `sizes_vary`: a size that has been another is compiled as any number, and not anew for each; what is like nothing
    that was compiled, after a few of them, runs as it is. `rows_vary`: so do sizes, and dimension 0 of each tensor is
    compiled as any number at once.
    """
    if not _on_gpu(args[0]) or torch.compiler.is_compiling():
        return function(*args)
    if not torch.is_grad_enabled():  # else what needs a gradient would be compiled anew where it needs none
        args = [arg.detach() if isinstance(arg, Tensor) and arg.requires_grad else arg for arg in args]
    if rows_vary:
        for arg in args:
            if isinstance(arg, Tensor):
                torch._dynamo.maybe_mark_dynamic(arg, 0)
    return _compiled(function, None if sizes_vary or rows_vary else False)(*args)


def run_with_breaks(method: partial, *args, dynamic: bool | None = None):
    """A runner of a Runnable whose method is no single graph. Compiled as a module, its graph would break in the code
    that runs any Runnable's methods, of which there is one for all: the compiler then leaves that alone, and with it
    every other layer."""
    return _in_pieces(method.func, dynamic)(*method.args, *args)


@cache
def _in_pieces(function: Callable, dynamic: bool | None) -> Callable:
    return torch.compile(function, dynamic=dynamic)


def compiled_recompute() -> tuple[AbstractContextManager, AbstractContextManager]:
    """torch's contexts of a pass and of its recomputation in compiled code, of which nothing is saved. Without them
    torch 2.11 saves the results of autograd functions, as every matmul and every norm of a GPU is."""
    return create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)


def compiled_save_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """As `compiled_recompute`, but attention's output is saved."""
    return create_selective_checkpoint_contexts(_saves)


compiled_recompute.cache_hash = "megalith.recomputing"  # torch's keys for what it compiles with them
compiled_save_attention.cache_hash = "megalith.saving_attention"


def _saves(context: Any, operator: Any, *args, **kwargs) -> CheckpointPolicy:
    attends = any(part in str(operator) for part in ("scaled_dot_product", "block_attention"))
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@cache
def _compiled(function: Callable, dynamic: bool | None) -> Callable:
    return torch.compile(function, fullgraph=dynamic is False, dynamic=dynamic)
