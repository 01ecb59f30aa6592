"""Parts of a layer whose methods can be run in another way, for example recomputed or as two half batches.

A method runs its formula directly unless a runner is plugged in. A runner is a function, and every layer has the same
one, so that all layers share compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

from torch import nn


class Runnable(nn.Module):
    """A part of a layer, of which methods can be run another way: `runner(method, *args)`. A seam."""

    runner: Callable | None = None


def runnable(method: Callable) -> Callable:
    """A method of a Runnable that its runner runs, where it has one."""

    @wraps(method)
    def run(self: Runnable, *args):
        if self.runner is None:
            return method(self, *args)
        return self.runner(partial(method, self), *args)

    return run


def without_runner(method: Callable) -> Callable:
    """Return what was decorated with `runnable`, for a subclass whose own method calls it and has the runner."""
    return method.__wrapped__
