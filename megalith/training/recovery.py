"""What the loop does about a bad step: finds where NaN began, repeats the step, or goes back and leaves out its data.

Every rank comes here at the same step, with the same figures (report/health.py), and all do the same about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from megalith.comm.collectives import any_rank, gather_json
from megalith.data.batch import Batch
from megalith.data.order import leave_out
from megalith.errors import TrainingError
from megalith.parallel.data.data_parallel import reshard_parameters
from megalith.parallel.data.nonfinite_gradients import watch_nonfinite_gradients
from megalith.parallel.mesh import Mesh
from megalith.report.health import HealthMonitor, HealthStatus, ReadStep
from megalith.report.report import Report
from megalith.training.resume import open_newest_before, restore
from megalith.training.run_state import Run

NAMED = 3  # parameters in a message
MOST_RETURNS = 3  # to one checkpoint


class FaultHandler:
    """Looks after `run`: `rerun_if_suspect` inside a step, `after_step` behind it."""

    def __init__(self, run: Run, report: Report):
        self._run, self._report = run, report
        self._rerun = run.config.runtime.rerun_bad_steps
        self._most = run.config.runtime.max_bad_steps
        self._health = HealthMonitor(run.config, run.mesh.world)
        self._returns: dict[int, int] = {}  # how often the run went back to a step

    def after_step(self) -> bool:
        """Acts on the steps whose figures have been read since. True: the run stands at an earlier step now.

        Raises TrainingError when too many steps in a row were lost, or spikes come again and again.
        """
        status = self._health.check(self._report.take_read_steps())
        if status.bad_step is not None:
            self._find_origin(status.bad_step)
        if status.too_many_bad_steps:
            raise TrainingError(
                f"NaN or Inf in the loss or the gradients of {self._most} steps in a row, up to step "
                f"{self._run.step} (runtime.max_bad_steps); they changed no weights. events.jsonl names where the "
                "first began; lower optim.lr, or look at the data, and go on from a checkpoint"
            )
        return status.spike is not None and self._go_back(status)

    def rerun_if_suspect(self, loss: Tensor, micro_batches: Sequence[Batch]) -> None:
        """With `rerun_bad_steps`, compute the step's gradients once more if they or its `loss` look wrong."""
        run = self._run
        if not self._rerun:
            return
        first, own_first = self._figures(loss), run.model.local_loss.item()
        if not any_rank(self._looks_wrong(*first), run.mesh.world):
            return
        run.model.parameters.clear_gradients()
        loss = run.gradients(micro_batches)
        second, own_second = self._figures(loss), run.model.local_loss.item()
        again = any_rank(self._looks_wrong(*second), run.mesh.world)
        changed = gather_json(_differ(own_first, own_second), run.mesh.world)
        ranks = [rank for rank, other in enumerate(changed) if other]
        kind = "lasting" if again else "transient"
        where = (
            f"the own loss of rank {', '.join(map(str, ranks))} changed"
            if ranks
            else "no rank's own loss changed"
        )
        what = (
            "it came again: the fault is in the data, the weights or the program"
            if again
            else f"it did not come again ({where}): a passing fault of the hardware; the second result is used"
        )
        self._report.event(
            f"step {run.step + 1} had loss {first[0]:.4g} and gradient norm {first[1]:.4g}, repeated "
            f"{second[0]:.4g} and {second[1]:.4g}: {what}",
            event=f"{kind}_fault",
            step=run.step + 1,
            loss=first[0],
            repeated_loss=second[0],
            ranks=ranks,
        )

    def _figures(self, loss: Tensor) -> tuple[float, float]:
        """Loss and gradient norm; waits for the device."""
        run = self._run
        parameters = [plain for _, plain in run.model.parameters.named if plain.grad is not None]
        norm = run.updates.gradient_squares(parameters).sqrt() / run.loss_scale.scale
        return loss.item(), norm.item()

    def _looks_wrong(self, loss: float, norm: float) -> bool:
        scale = self._run.loss_scale.scale.item()
        return self._health.is_bad_step(loss, not math.isfinite(norm), scale) or self._health.is_loss_spike(
            loss
        )

    def _find_origin(self, lost: ReadStep) -> None:
        """Makes a lost step's passes once more to see whose gradient of what is not finite before they are summed."""
        run = self._run
        start = (lost.step - 1, lost.first_sample, run.device, run.left_out)
        with run.data.train_loader(*start) as batches:
            micro_batches = list(islice(batches, run.data.micro_batches(lost.first_sample)))
        with watch_nonfinite_gradients(run.model.chunks) as watched:
            run.gradients(micro_batches)
        run.task.step_metrics(run)  # these passes count for no step
        run.model.parameters.clear_gradients()
        loss_is_lost = not math.isfinite(run.model.local_loss.item())
        found = gather_json((loss_is_lost, watched.names()), run.mesh.world)
        met = {rank: names for rank, (own, names) in enumerate(found) if own or names}
        ranks = _origins(met, run.mesh)
        self._report.event(
            f"step {lost.step} was skipped for its loss {lost.loss:.4g} and gradient norm {lost.grad_norm:.4g}; "
            + (_tell_origin(ranks, found) if ranks else self._tell_gone(lost)),
            event="lost_step",
            step=lost.step,
            ranks=list(ranks),
            parameters={rank: names[:NAMED] for rank, names in ranks.items()},
        )

    def _tell_gone(self, lost: ReadStep) -> str:
        later = self._run.step - lost.step
        since = f", with the weights of {later} steps later" if later else ""
        return f"repeated{since} everything was finite: a passing fault of the hardware, or of those weights"

    def _go_back(self, status: HealthStatus) -> bool:
        """Loads the last checkpoint from before the spike and leaves the data of its step, and the one before, out."""
        run, spike, before = self._run, status.spike, status.step_before_spike
        spiked = f"step {spike.step} has loss {spike.loss:.4g}, a spike above those before it"
        run.log_saves(wait=True)
        checkpoint = open_newest_before(run, before.step - 1)
        if checkpoint is None:
            self._report.event(
                f"{spiked}; there is no checkpoint from before it, so the run continues",
                event="loss_spike",
                step=spike.step,
                loss=spike.loss,
            )
            self._health.accept_spike(spike)
            return False
        step = checkpoint.manifest.step
        self._returns[step] = self._returns.get(step, 0) + 1
        if self._returns[step] > MOST_RETURNS:
            raise TrainingError(
                f"{spiked}, for the {self._returns[step]}th time from the checkpoint of step {step}, whichever data "
                "was left out; lower optim.lr, or go on from an earlier step"
            )
        left_out = leave_out(run.left_out, before.first_sample, spike.consumed_samples)
        reshard_parameters(run.model.chunks)
        restore(run, checkpoint)
        run.left_out = left_out
        self._health.rewind_history(step)
        self._report.rewind(step)
        self._report.event(
            f"{spiked}: back to step {step}, and on without the samples of steps {before.step} and {spike.step}",
            event="loss_spike",
            step=spike.step,
            loss=spike.loss,
            back_to=step,
            left_out=left_out,
        )
        return True


def _differ(a: float, b: float) -> bool:
    return a != b and not (math.isnan(a) and math.isnan(b))


def _origins(met: dict[int, list[str]], mesh: Mesh) -> dict[int, list[str]]:
    """Of the ranks that met NaN those where it began: ranks that share a model pass it on in their backward passes.

    In each copy of the model these are the ones nearest to the loss, in the last stage and from the earliest layer on.
    """

    def nearness(rank: int) -> tuple[int, int]:
        return mesh.describe(rank).pp, len(met[rank])

    nearest: dict[int, tuple[int, int]] = {}
    for rank in met:
        copy = mesh.describe(rank).dp
        nearest[copy] = max(nearest.get(copy, (0, 0)), nearness(rank))
    return {rank: met[rank] for rank in met if nearness(rank) == nearest[mesh.describe(rank).dp]}


def _tell_origin(ranks: dict[int, list[str]], found: Sequence[tuple[bool, list[str]]]) -> str:
    parts = []
    for rank, names in ranks.items():
        what = ["its loss"] if found[rank][0] else []
        what += [f"the gradient of {', '.join(names[:NAMED])}"] if names else []
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        parts.append(f"on rank {rank} in {' and '.join(what)}{more}")
    return "NaN or Inf began " + ", ".join(parts)
