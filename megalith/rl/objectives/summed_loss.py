"""Base of losses that sum their metrics on the device over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.comm.collectives import all_reduce_no_grad
from megalith.models.loss import Loss
from megalith.parallel.mesh import Mesh


class SummedLoss(Loss):
    """A loss that accumulates its METRICS on the device over micro-batches until `take_sums` is called."""

    METRICS: tuple[str, ...]
    """Names of the metrics. The first metric is a count, by which all others are divided."""
    _sums: Tensor | None = None

    def add_metrics(self, values: Sequence[Tensor]) -> None:
        """Accumulate a micro-batch's metrics: one tensor of any shape per metric, which is summed."""
        sums = torch.stack([x.sum(dtype=torch.float64) for x in values])
        self._sums = sums if self._sums is None else self._sums + sums

    def take_sums(self) -> Tensor | None:
        """Return and clear the sums, float64 [metrics]; None if this rank has computed no loss since the last call."""
        sums, self._sums = self._sums, None
        return sums

    def reduce_sums(self, mesh: Mesh, device: torch.device) -> Tensor:
        """Return `take_sums` summed over the data-parallel and pipeline groups. Collective over all ranks."""
        sums = self.take_sums()
        if sums is None:
            sums = torch.zeros(len(self.METRICS), dtype=torch.float64, device=device)
        return all_reduce_no_grad(all_reduce_no_grad(sums, mesh.dp), mesh.pp)

    def means(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics other than the count, divided by the count. Synchronizes with the device."""
        count, *rest = sums.tolist()
        return dict(zip(self.METRICS[1:], (value / max(count, 1) for value in rest)))
