"""torch.compile's tracer. Nothing here imports it before something is compiled, because that takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

disable_tracing = torch._disable_dynamo
"""Decorator for functions that compiled code calls eagerly. torch.compiler.disable imports the tracer at once."""


def is_tracer_imported() -> bool:
    """Return True if torch's tracer is imported. If not, nothing is compiled."""
    return "torch._dynamo" in sys.modules


def mark_constant(function: Callable) -> Callable:
    """Make compiled code treat the result as a constant, as torch.compiler.assume_constant_result does."""
    function._dynamo_marked_constant = True
    return function


def maybe_mark_dynamic(x: Tensor, dim: int) -> None:
    """Compile the size of x along `dim` as dynamic. Code that specializes it anyway is not an error."""
    torch._dynamo.maybe_mark_dynamic(x, dim)


def raise_recompile_limit(limit: int) -> None:
    """Let a function be compiled at least `limit` times."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
