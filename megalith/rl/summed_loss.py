"""Loss whose logged figures are summed on the device over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.comm.collectives import all_reduce_no_grad
from megalith.models.loss import Loss
from megalith.parallel.mesh import Mesh


class SummedLoss(Loss):
    """A loss that adds up what its FIGURES are made of, on the device, over micro-batches until they are taken."""

    FIGURES: tuple[str, ...]
    """The first is a count."""
    _sums: Tensor | None = None

    def add_figures(self, each: Sequence[Tensor]) -> None:
        """A micro-batch's: of each figure what is to be summed, any shape."""
        sums = torch.stack([x.sum(dtype=torch.float64) for x in each])
        self._sums = sums if self._sums is None else self._sums + sums

    def take_sums(self) -> Tensor | None:
        """Of FIGURES, float64 [figures], since the last call; None where this rank was not asked for a loss."""
        sums, self._sums = self._sums, None
        return sums

    def take_all_sums(self, mesh: Mesh, device: torch.device) -> Tensor:
        """`take_sums` over all ranks, each of which calls it."""
        sums = self.take_sums()
        if sums is None:
            sums = torch.zeros(len(self.FIGURES), dtype=torch.float64, device=device)
        return all_reduce_no_grad(all_reduce_no_grad(sums, mesh.dp), mesh.pp)

    def means(self, sums: Tensor) -> dict[str, float]:
        """Of what was taken: all but the count, over it. Waits for the device."""
        count, *rest = sums.tolist()
        return dict(zip(self.FIGURES[1:], (value / max(count, 1) for value in rest)))
