"""Deferred wgrads: what lets a zero-bubble schedule run dgrad and wgrad of a backward pass separately.

A linear's backward pass has two matmuls: dgrad, which the stage before waits for, and wgrad, which nobody does. Here
every linear has a Gemm that puts its wgrads into a list, with the edge of autograd's graph where each belongs; later
the list is run, and accumulates into the parameters' gradients as any backward pass does.

torch.compile does not see through it, so layers are not compiled. Every linear's input is saved until its wgrad runs,
so recomputing a layer gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megalith.models.linear import Linear
from megalith.ops.gemm import DeferredWgrad
from megalith.parallel.seams import plug


class DeferredWgrads:
    """The list of what one backward pass has put off."""

    def __init__(self, modules: Iterable[nn.Module]):
        """Of every Linear in `modules`."""
        self._wgrads: list[DeferredWgrad] = []
        for module in modules:
            for linear in module.modules():
                if isinstance(linear, Linear):
                    plug(linear, "gemm", linear.gemm.deferring(self._wgrads))

    def take(self) -> list[DeferredWgrad]:
        """What has been put off since the last call."""
        taken = list(self._wgrads)
        self._wgrads.clear()
        return taken


def compute(wgrads: list[DeferredWgrad]) -> None:
    """Runs the deferred wgrads of a list."""
    if wgrads:
        torch.autograd.backward([each.weight for each in wgrads], [each.compute() for each in wgrads])
