"""Deferred weight gradients, which let a zero-bubble schedule run dgrad and wgrad separately.

A linear's backward pass has two matmuls: dgrad, which the previous stage waits for, and wgrad, which no stage waits
for. Here every linear has a Gemm that appends its wgrads to a list, together with the autograd edge that each belongs
to. Running the list later accumulates into the parameters' gradients as any backward pass does.

torch.compile cannot trace through this, so layers are not compiled. Every linear's input is saved until its wgrad has
run, so recomputing a layer saves no memory.
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
