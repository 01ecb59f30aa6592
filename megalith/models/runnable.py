"""Layers and parts of layers whose methods a runner may run, for example recomputed or on two half micro-batches.

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
    """Decorate a method of a Runnable: if the object has a runner, calls go to the runner."""

    @wraps(method)
    def run(self: Runnable, *args):
        if self.runner is None:
            return method(self, *args)
        return self.runner(partial(method, self), *args)

    return run


def without_runner(method: Callable) -> Callable:
    """Return the method that `runnable` decorated. A subclass calls it from its own method, which has the runner."""
    return method.__wrapped__
