"""Elementwise steps outside of compiled layers, as one kernel on a GPU: eager, they go through memory several times."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def as_one_kernel(function: Callable, *args):
    """function(*args), of which the first is a tensor: compiled on a GPU, but as a part of what is being compiled."""
    on_gpu = args[0].is_cuda and not torch.compiler.is_compiling()
    return _compiled(function)(*args) if on_gpu else function(*args)


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False)
