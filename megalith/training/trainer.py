"""The training loop. `Trainer.train` is the loop, and `Run.train_step` (run_state.py) is one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megalith.checkpoint import list_steps
from megalith.comm.collectives import any_rank
from megalith.config import CheckpointConfig
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.errors import ConfigError
from megalith.launch.heartbeat import Heartbeat
from megalith.launch.in_process import InProcessRestart
from megalith.launch.launcher import TIMEOUT
from megalith.launch.signals import StopSignals
from megalith.launch.stops import Stops
from megalith.planner.layout import build_layout
from megalith.remote import StorePath
from megalith.report.clock import StartupTimer
from megalith.report.console import megatron_evaluation_line
from megalith.report.metrics import perplexity
from megalith.report.report import Report, open_report
from megalith.tables import counted
from megalith.training.growing import GrowingJob
from megalith.training.recovery import FaultHandler
from megalith.training.resume import load_run
from megalith.training.run_snapshots import RunSnapshots
from megalith.training.run_state import Run
from megalith.training.unhealthy_ranks import UnhealthyRanks


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run."""

    step: int
    consumed_samples: int
    loss: float | None  # of the last step
    validation_loss: float | None  # of the last evaluation
    checkpoint: Path | StorePath | None  # the last one saved; None if none was
    ended: str  # reason: a key of runtime.stops.EXIT_CODES, "train_iters" at the run's end
    test_loss: float | None = None  # after training
    validation_figures: Mapping[str, float] | None = None  # metrics of the last evaluation, besides its loss


def _is_saved(run: Run) -> bool:
    """Return True if the run's current step is complete in its folder. False if it is not, or if the folder cannot be
    read.
    """
    with suppress(OSError):
        return run.saves.is_dir() and run.step in list_steps(run.saves)
    return False


class Trainer:
    """The training loop of a run: its steps, evaluations and saves."""

    def __init__(
        self,
        run: Run,
        heartbeat: Heartbeat | None = None,
        signals: StopSignals | None = None,
        startup_timer: StartupTimer | None = None,
        notes: Sequence[str] = (),
        memory: RunSnapshots | None = None,
        restart: InProcessRestart | None = None,
    ):
        """Prepare the training loop. `notes` appear at the start of the report.

        With `memory`, snapshots are taken, and after a `restart` the newest one is restored.
        """
        self.memory, self.restart = memory, restart
        self.run, self.config = run, run.config
        run.notes[:0] = notes
        self.heartbeat = heartbeat or Heartbeat(run.mesh, TIMEOUT)
        self.stops = Stops(run.config.train, run.mesh.world, signals)
        self.validation_loss: float | None = None
        self.validation_figures: Mapping[str, float] | None = None
        self.test_loss: float | None = None
        self.loaded_from = load_run(run, memory)
        self.startup_timer = startup_timer or StartupTimer()
        self.startup_timer.mark("data and model")

    def train(self) -> TrainingResult:
        """Train until the run ends or stops early.

        The last step is saved according to `checkpoint.save_at_end` or, after an early stop,
        `checkpoint.save_when_stopped`. A run that is already complete writes nothing. With `train.skip_train`, only
        evaluate.
        """
        run, config = self.run, self.config
        if config.train.skip_train:
            return self._evaluate_only()
        if self.loaded_from and run.step >= run.total_steps:
            return self._already_complete()
        pipeline = run.model.pipeline
        with (
            open_report(
                config,
                run.notes,
                run.mesh,
                run.device,
                run.step,
                run.total_steps,
                pipeline,
                self.startup_timer,
                run.task.loss_name,
                self.memory is not None and self.memory.restored_step is not None,
            ) as self.report,
            run.saver,
        ):
            run.log = self.report.note
            self.faults = FaultHandler(run, self.report)
            self.unhealthy, self.growing = self._unhealthy_ranks(), self._growing_job()
            if self.loaded_from:
                run.log(
                    f"resuming from {self.loaded_from}: step {run.step}, "
                    f"{counted(run.consumed_samples, 'sample')} consumed"
                )
            self._continue_from_memory()
            ended = None
            while ended is None:  # repeats after a loss spike, from an earlier step
                ended = self._train_steps()
            if self.memory is not None:
                self.memory.wait()
            self.report.end()
            self.report.flush()
            checkpoint = self._save_last(_saves_at_end(ended, config.checkpoint))
            if ended != "train_iters":
                resume = (
                    f"resume with checkpoint.load={config.run_folder}"
                    if checkpoint
                    else "without a checkpoint"
                )
                self.report.event(
                    f"stopped after step {run.step} by {ended}; {resume}",
                    event="stop",
                    step=run.step,
                    reason=ended,
                )
            elif (test_loss := self.mean_loss(run.data.test)) is not None:
                self.test_loss, figures = test_loss, run.task.evaluation_metrics(run)
                figures = {"perplexity": perplexity(test_loss)} if figures is None else figures
                metrics = "".join(f", {name} {value:.4g}" for name, value in figures.items())
                run.log(f"test loss {test_loss:.4f}{metrics}")
        return self._result(checkpoint, ended, self.report.last_loss)

    def _unhealthy_ranks(self) -> UnhealthyRanks | None:
        runtime, interval = self.config.runtime, self.config.log.log_interval
        if not runtime.replace_unhealthy_ranks or self.memory is None or self.restart is None:
            return None
        if runtime.enable_straggler_detection:
            interval = math.gcd(interval, runtime.straggler_interval)
        world = self.run.mesh.world
        return UnhealthyRanks(world, self.restart, self.memory, self.report, self.heartbeat, interval)

    def _growing_job(self) -> GrowingJob | None:
        if self.memory is None or self.restart is None or not self.restart.is_elastic:
            return None
        world = self.run.mesh.world
        return GrowingJob(self.config, world, self.restart, self.memory, self.report, self.heartbeat)

    def _train_steps(self) -> str | None:
        """Train from the current step.

        Returns the reason for stopping, or None if the run was rolled back to an earlier step.
        """
        run, report = self.run, self.report
        with run.data.train_loader(run.step, run.consumed_samples, run.device, run.left_out) as batches:
            self.heartbeat.end_long("training")
            if self.restart is not None:
                self.restart.begin_training()
            while run.step < run.total_steps:
                self.heartbeat.beat(run.step + 1, "training")
                self.stops.before_work()
                report.before_step(run.step + 1)
                report.add(run.train_step(batches, self._before_update))
                stop = self.stops.after_step(run.step)
                if stop or self._is_due(self.config.checkpoint.save_interval) or self._takes_snapshot():
                    report.flush()  # so that faults are detected before the save
                if self.faults.after_step():
                    return None
                if self.stops.stop_reason is None:
                    self._between_steps()
                    if self.unhealthy is not None and run.step < run.total_steps:
                        self.unhealthy.after_step(run.step)
                if (stop := self.stops.stop_reason or stop) and run.step < run.total_steps:
                    return stop
        return "train_iters"

    def _between_steps(self) -> None:
        """Check replicas, evaluate and save if due. Not called if the run must stop immediately.

        Evaluation comes before the save, also at the end of the run. After a kill during the evaluation, the resumed
        run repeats the steps since the last save, and then the evaluation.
        """
        if self._is_due(self.config.runtime.check_weight_hash_across_dp_replicas_interval):
            self._check_replicas()
        if self._is_due(self.config.train.eval_interval) or self.run.step == self.run.total_steps:
            self.evaluate()
        if self._is_due(self.config.checkpoint.save_interval):
            self._check_replicas()
            with self.heartbeat.long_work("saving"):
                self.run.save()
        self.run.log_saves()
        if self._takes_snapshot():
            self.memory.take()
            if self.growing is not None and self.run.step < self.run.total_steps:
                self.growing.after_snapshot(self.run.step)

    def _takes_snapshot(self) -> bool:
        """Return True if a snapshot is due after this step."""
        return self.memory is not None and self._is_due(self.config.checkpoint.memory_interval)

    def _before_update(self, loss: Tensor, micro_batches: Sequence[Batch]) -> None:
        self.faults.rerun_if_suspect(loss, micro_batches)
        if self.memory is not None:
            self.memory.before_update()

    def _continue_from_memory(self) -> None:
        """After a restart from memory, save the step if its save was due but is missing, and take a new snapshot."""
        if self.memory is None or self.memory.restored_step is None:
            return
        run = self.run
        run.log(
            f"continuing from memory: step {run.step}, {counted(run.consumed_samples, 'sample')} consumed"
        )
        if self._is_due(self.config.checkpoint.save_interval):
            is_missing = run.mesh.world.rank == 0 and not _is_saved(run)
            if any_rank(is_missing, run.mesh.world):
                run.save()
        self.memory.take()  # so that every rank has a partner's copy again

    def _save_last(self, also_new: bool) -> Path | StorePath | None:
        if also_new:
            self._check_replicas()
        with self.heartbeat.long_work("saving"):
            return self.run.save_last(also_new)

    def _check_replicas(self) -> None:
        if self.run.replicas is not None:
            self.run.replicas.check(self.run.step)

    def _already_complete(self) -> TrainingResult:
        run = self.run
        if run.mesh.world.rank == 0:
            print(
                f"the run is finished: {self.loaded_from} is at step {run.step} of {run.total_steps}; to continue, "
                "raise train.train_iters or train.train_samples"
            )
        return self._result(self.loaded_from, "train_iters", None)

    def _result(self, checkpoint: Path | StorePath | None, ended: str, loss: float | None) -> TrainingResult:
        run = self.run
        position, evaluated = (run.step, run.consumed_samples), (loss, self.validation_loss)
        return TrainingResult(
            *position, *evaluated, checkpoint, ended, self.test_loss, self.validation_figures
        )

    def _evaluate_only(self) -> TrainingResult:
        """Evaluate the loaded weights on the validation and test data and print the results as Megatron-LM does."""
        run = self.run
        self.report = Report(build_layout(self.config, run.mesh.world.size), run.mesh, run.device, run.step)
        self.validation_figures = self._evaluate_task()
        if self.validation_figures is not None:
            if run.mesh.world.rank == 0:
                print(megatron_evaluation_line(run.step, None, "", self.validation_figures), flush=True)
            return self._result(self.loaded_from, "train_iters", None)
        if run.data.valid is run.data.test is None:
            data = self.config.data
            way_out = "set data.valid_data_path, or data.data_path with shares for them in data.split"
            if data.dataset is not None:
                way_out = f"return a dataset for one of them from data.dataset {data.dataset}"
            raise ConfigError(f"the data has no validation and no test split to evaluate; {way_out}")
        losses = []
        for name, dataset in (("validation", run.data.valid), ("test", run.data.test)):
            losses.append(self.mean_loss(dataset))
            if losses[-1] is None:
                continue
            figures = run.task.evaluation_metrics(run)
            if run.mesh.world.rank == 0:
                where = run.step, losses[-1], f" on {name} set", figures, run.task.loss_name
                print(megatron_evaluation_line(*where), flush=True)
        self.validation_loss, self.test_loss = losses
        return self._result(self.loaded_from, self.stops.stop_reason or "train_iters", None)

    def evaluate(self) -> None:
        """Evaluate and report the results: the mean loss, or the task's own metrics."""
        run = self.run
        self.report.flush()
        loss = self.mean_loss(run.data.valid)
        figures = self._evaluate_task() if loss is None else run.task.evaluation_metrics(run)
        if loss is not None or figures is not None:
            self.validation_loss, self.validation_figures = loss, figures
            self.report.log_evaluation(run.step, loss, figures)

    def _evaluate_task(self) -> dict[str, float] | None:
        """Return the task's evaluation metrics. Returns None if a stop signal interrupts the evaluation."""
        if not self.config.train.eval_iters or self.stops.stop_reason:
            return None
        step, parts = self.run.step, 0

        def before(done: int, total: int) -> None:
            nonlocal parts
            parts = total
            self.heartbeat.beat(step, "evaluating")
            self.stops.before_work()
            self.report.show_evaluation_progress(step, done, total)

        figures = self.run.task.evaluate(self.run, before, self.stops.after_work)
        if parts:
            self.report.show_evaluation_progress(step, parts, parts)
        return figures

    def mean_loss(self, dataset: SampleDataset | None) -> float | None:
        """Return the run's mean loss on `dataset`. Returns None if a stop signal interrupts the evaluation."""
        step, total = self.run.step, self.config.train.eval_iters
        if dataset is None or not total or self.stops.stop_reason:
            return None

        def before(done: int) -> None:
            self.heartbeat.beat(step, "evaluating")
            self.stops.before_work()
            self.report.show_evaluation_progress(step, done, total)

        loss = self.run.mean_loss(dataset, before, self.stops.after_work)
        self.report.show_evaluation_progress(step, total, total)
        return loss

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.run.step % interval == 0


def _saves_at_end(ended: str, checkpoint: CheckpointConfig) -> bool:
    """Return True if a run that ends for this reason, a key of EXIT_CODES, saves its last step."""
    if ended == "train_iters":
        return checkpoint.save_at_end
    when = checkpoint.save_when_stopped
    return when == "always" or (when == "at_exits" and not ended.startswith("SIG"))
