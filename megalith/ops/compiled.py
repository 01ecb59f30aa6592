"""Elementwise steps outside of compiled layers, as one kernel on a GPU: eager, they go through memory several times."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def as_one_kernel(function: Callable, *args, sizes_vary: bool = False):
    """function(*args), of which the first is a tensor: compiled on a GPU, but as a part of what is being compiled.

    `sizes_vary`: a size that has been another is compiled as any number, and not anew for each; what is like nothing
    that was compiled, after a few of them, runs as it is.
    """
    on_gpu = args[0].is_cuda and not torch.compiler.is_compiling()
    return _compiled(function, None if sizes_vary else False)(*args) if on_gpu else function(*args)


@cache
def _compiled(function: Callable, dynamic: bool | None) -> Callable:
    return torch.compile(function, fullgraph=dynamic is False, dynamic=dynamic)
