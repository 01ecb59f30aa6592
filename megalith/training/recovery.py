"""Recovery from bad steps: locates NaN, reruns a suspect step, or rolls back and skips the data of a loss spike.

All ranks reach this code at the same step with the same metrics (report/health.py) and take the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from megalith.comm.collectives import any_rank, gather_json
from megalith.data.batch import Batch
from megalith.data.order import skip_range
from megalith.errors import TrainingError
from megalith.parallel.data.data_parallel import reshard_parameters
from megalith.parallel.data.nonfinite_gradients import watch_nonfinite_gradients
from megalith.parallel.mesh import Mesh
from megalith.report.health import HealthMonitor, HealthStatus, ReadStep
from megalith.report.report import Report
from megalith.tables import counted
from megalith.training.resume import open_newest_before, restore
from megalith.training.run_state import Run

MAX_NAMES = 3  # parameters named in a message
MAX_RETURNS = 3  # to the same checkpoint


class FaultHandler:
    """Handles faults of `run`. The training loop calls `rerun_if_suspect` during a step and `after_step` after it."""

    def __init__(self, run: Run, report: Report):
        self._run, self._report = run, report
        self._rerun = run.config.runtime.rerun_bad_steps
        self._max_bad_steps = run.config.runtime.max_bad_steps
        self._health = HealthMonitor(run.config, run.mesh.world)
        self._return_counts: dict[int, int] = {}  # returns to each checkpoint, by step

    def after_step(self) -> bool:
        """Handle faults in the steps whose metrics have arrived since the last call.

        Returns True if the run has been rolled back to a checkpoint.

        Raises TrainingError after too many consecutive bad steps, or if spikes recur.
        """
        status = self._health.check(self._report.take_read_steps())
        if status.bad_step is not None:
            self._find_origin(status.bad_step)
        if status.too_many_bad_steps:
            raise TrainingError(
                f"NaN or Inf in the loss or the gradients of {self._max_bad_steps} consecutive "
                f"steps up to step {self._run.step} (runtime.max_bad_steps); these steps changed "
                "no weights. events.jsonl names the origin of the first; lower optim.lr, or "
                "check the data, and resume from a checkpoint"
            )
        return status.spike is not None and self._roll_back(status)

    def rerun_if_suspect(self, loss: Tensor, micro_batches: Sequence[Batch]) -> None:
        """Recompute the step's gradients if they or its `loss` look wrong and `rerun_bad_steps` is set."""
        run = self._run
        if not self._rerun:
            return
        first, first_local = self._loss_and_norm(loss), run.model.local_loss.item()
        if not any_rank(self._is_suspect(*first), run.mesh.world):
            return
        run.model.parameters.clear_gradients()
        run.model.forget_logits()
        loss = run.gradients(micro_batches)
        second, second_local = self._loss_and_norm(loss), run.model.local_loss.item()
        again = any_rank(self._is_suspect(*second), run.mesh.world)
        changed = gather_json(_differs(first_local, second_local), run.mesh.world)
        ranks = [rank for rank, other in enumerate(changed) if other]
        kind = "lasting" if again else "transient"
        where = (
            f"the local loss of rank {', '.join(map(str, ranks))} changed"
            if ranks
            else "no rank's local loss changed"
        )
        diagnosis = (
            "the fault recurred: its cause is the data, the weights or the program"
            if again
            else f"the fault did not recur ({where}): a transient hardware fault; the second result is used"
        )
        self._report.event(
            f"step {run.step + 1} had loss {first[0]:.4g} and gradient norm {first[1]:.4g}, repeated "
            f"{second[0]:.4g} and {second[1]:.4g}: {diagnosis}",
            event=f"{kind}_fault",
            step=run.step + 1,
            loss=first[0],
            repeated_loss=second[0],
            ranks=ranks,
        )

    def _loss_and_norm(self, loss: Tensor) -> tuple[float, float]:
        """Return the loss and the gradient norm. Waits for the device."""
        run = self._run
        parameters = [plain for _, plain in run.model.parameters.named if plain.grad is not None]
        norm = run.updates.gradient_squares(parameters).sqrt() / run.loss_scale.scale
        return loss.item(), norm.item()

    def _is_suspect(self, loss: float, norm: float) -> bool:
        scale = self._run.loss_scale.scale.item()
        return self._health.is_bad_step(loss, not math.isfinite(norm), scale) or self._health.is_loss_spike(
            loss
        )

    def _find_origin(self, lost: ReadStep) -> None:
        """Repeat a bad step to find the ranks and parameters with non-finite gradients before reduction."""
        run = self._run
        start = (lost.step - 1, lost.first_sample, run.device, run.left_out)
        with run.data.train_loader(*start) as batches:
            micro_batches = list(islice(batches, run.data.micro_batches(lost.first_sample)))
        with watch_nonfinite_gradients(run.model.chunks) as watched:
            run.gradients(micro_batches)
        run.task.step_metrics(run)  # discards the metrics of these passes
        run.model.parameters.clear_gradients()
        run.model.forget_logits()
        loss_is_lost = not math.isfinite(run.model.local_loss.item())
        findings = gather_json((loss_is_lost, watched.names()), run.mesh.world)
        affected = {rank: names for rank, (loss, names) in enumerate(findings) if loss or names}
        ranks = _origins(affected, run.mesh)
        self._report.event(
            f"step {lost.step} was skipped because of its loss {lost.loss:.4g} and gradient norm {lost.grad_norm:.4g}; "
            + (_describe_origin(ranks, findings) if ranks else self._describe_transient(lost)),
            event="lost_step",
            step=lost.step,
            ranks=list(ranks),
            parameters={rank: names[:MAX_NAMES] for rank, names in ranks.items()},
        )

    def _describe_transient(self, lost: ReadStep) -> str:
        later = self._run.step - lost.step
        weights = f" with the weights of {counted(later, 'step')} later" if later else ""
        return f"when repeated{weights}, everything was finite: a transient hardware fault, or a fault of those weights"

    def _roll_back(self, status: HealthStatus) -> bool:
        """Load the last checkpoint before the loss spike, and skip the data of the spike's step and of the step
        before it.
        """
        run, spike, before = self._run, status.spike, status.step_before_spike
        spiked = f"step {spike.step} has loss {spike.loss:.4g}, a spike above the preceding mean"
        run.log_saves(wait=True)
        checkpoint = open_newest_before(run, before.step - 1)
        if checkpoint is None:
            self._report.event(
                f"{spiked}; there is no earlier checkpoint, so the run continues",
                event="loss_spike",
                step=spike.step,
                loss=spike.loss,
            )
            self._health.accept_spike(spike)
            return False
        step = checkpoint.manifest.step
        self._return_counts[step] = self._return_counts.get(step, 0) + 1
        if self._return_counts[step] > MAX_RETURNS:
            raise TrainingError(
                f"{spiked}, for the {self._return_counts[step]}th time after the checkpoint of step {step}, although "
                "different data was skipped each time; lower optim.lr, or resume from an earlier step"
            )
        left_out = skip_range(run.left_out, before.first_sample, spike.consumed_samples)
        reshard_parameters(run.model.chunks)
        restore(run, checkpoint)
        run.left_out = left_out
        self._health.rewind_history(step)
        self._report.rewind(step)
        self._report.event(
            f"{spiked}: going back to step {step} and skipping the samples of steps {before.step} and {spike.step}",
            event="loss_spike",
            step=spike.step,
            loss=spike.loss,
            back_to=step,
            left_out=left_out,
        )
        return True


def _differs(a: float, b: float) -> bool:
    return a != b and not (math.isnan(a) and math.isnan(b))


def _origins(affected: dict[int, list[str]], mesh: Mesh) -> dict[int, list[str]]:
    """Return the ranks of `affected` in which NaN first appeared.

    Backward passes spread NaN to the other ranks that share a model. In each replica, NaN began on the ranks nearest to
    the loss: in the last affected pipeline stage, the ranks with the most affected parameters.
    """

    def nearness(rank: int) -> tuple[int, int]:
        return mesh.describe(rank).pp, len(affected[rank])

    nearest: dict[int, tuple[int, int]] = {}
    for rank in affected:
        replica = mesh.describe(rank).dp
        nearest[replica] = max(nearest.get(replica, (0, 0)), nearness(rank))
    return {
        rank: names for rank, names in affected.items() if nearness(rank) == nearest[mesh.describe(rank).dp]
    }


def _describe_origin(ranks: dict[int, list[str]], findings: Sequence[tuple[bool, list[str]]]) -> str:
    parts = []
    for rank, names in ranks.items():
        sources = ["its loss"] if findings[rank][0] else []
        sources += [f"the gradient of {', '.join(names[:MAX_NAMES])}"] if names else []
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        parts.append(f"on rank {rank} in {' and '.join(sources)}{more}")
    return "NaN or Inf began " + ", ".join(parts)
