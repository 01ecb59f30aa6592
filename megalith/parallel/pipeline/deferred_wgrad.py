"""Deferred weight gradients: in a zero-bubble schedule, dgrad and wgrad run separately.

A linear's backward pass has two matmuls: dgrad, which the previous stage waits for, and wgrad, which no stage waits
for. Here every linear gets a Gemm that appends its wgrads to a list, together with the autograd edge of the weight.
Running the list later accumulates into the parameters' gradients as any backward pass does.

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
    """Stores the wgrad computations that backward passes have deferred."""

    def __init__(self, modules: Iterable[nn.Module]):
        """Defer the wgrads of every Linear in `modules`."""
        self._wgrads: list[DeferredWgrad] = []
        for module in modules:
            for linear in module.modules():
                if isinstance(linear, Linear):
                    plug(linear, "gemm", linear.gemm.with_deferred_wgrads(self._wgrads))

    def take(self) -> list[DeferredWgrad]:
        """Return the wgrads deferred since the last call."""
        taken = list(self._wgrads)
        self._wgrads.clear()
        return taken


def compute_wgrads(wgrads: list[DeferredWgrad]) -> None:
    """Compute deferred wgrads and accumulate them into the parameters' gradients."""
    if wgrads:
        torch.autograd.backward([each.weight for each in wgrads], [each.compute() for each in wgrads])
