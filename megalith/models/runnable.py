"""Layers whose methods can be called through a runner, for example to recompute them or to run them on two half
micro-batches.

A method runs directly unless a runner is plugged in. A runner is a function, the same for all layers, so that layers
share compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

from torch import nn


class Runnable(nn.Module):
    """A module with methods that a runner runs: `runner(method, *args)`. `runner` is a seam."""

    runner: Callable | None = None


def runnable(method: Callable) -> Callable:
    """Decorate a method of a Runnable. If the object has a runner, the runner receives the calls."""

    @wraps(method)
    def run(self: Runnable, *args):
        if self.runner is None:
            return method(self, *args)
        return self.runner(partial(method, self), *args)

    return run


def without_runner(method: Callable) -> Callable:
    """Return the undecorated method of a `runnable`. A subclass calls it from its own method, which has the runner."""
    return method.__wrapped__
