"""Tasks with a `SummedLoss`: the metrics of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalith.rl.objectives.summed_loss import SummedLoss
from megalith.training.run_state import Run, Task


class SummedLossTask(Task):
    """A task that logs the means of its loss's metrics."""

    loss: SummedLoss
    evaluation_loss: SummedLoss

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]]:
        sums = self.loss.reduce_sums(run.mesh, run.device)
        return lambda: self.loss.means(sums)

    def evaluation_metrics(self, run: Run) -> dict[str, float]:
        return self.evaluation_loss.means(self.evaluation_loss.reduce_sums(run.mesh, run.device))
