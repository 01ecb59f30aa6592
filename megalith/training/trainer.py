"""Training: one loop, read top to bottom. `train` is the whole of a run; `Trainer.run` is the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from megalith.bridge.exporter import export_hf
from megalith.bridge.load import tokenizer_notes
from megalith.checkpoint import RunRecord, TokenizerRecord
from megalith.comm.collectives import any_rank
from megalith.config import RunConfig
from megalith.config.rules.overlap_notes import overlap_notes
from megalith.config.rules.run_rules import check_base, offload_notes
from megalith.config.rules.unused import idle_notes
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.launch.hang_watch import open_watch
from megalith.launch.heartbeat import Pulse, longer
from megalith.launch.launcher import TIMEOUT, end_distributed, init_distributed, this_process
from megalith.launch.restart import claimed, failures_kept, pause, this_attempt
from megalith.launch.signals import StopSignals
from megalith.launch.stops import Stops
from megalith.optim.optimizer import set_learning_rate
from megalith.optim.schedule import build_schedule
from megalith.optim.step import optimizer_step
from megalith.parallel.apply import compiles
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.report.measured_step import StartClock
from megalith.report.metrics import perplexity
from megalith.report.out_of_memory import out_of_memory
from megalith.report.report import PendingStep, open_report
from megalith.report.streams import lasting_streams
from megalith.training.build import prepare
from megalith.training.process import prepare_process
from megalith.training.recovery import Faults
from megalith.training.replica_check import ReplicaCheck
from megalith.training.resume import load_run
from megalith.training.run_state import Run


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    consumed_samples: int
    loss: float | None  # of the last step
    validation_loss: float | None  # of the last evaluation
    checkpoint: Path | None  # the last one saved; None where `checkpoint.save_at_end` is off and none was
    ended: str  # why: a key of runtime.stops.EXIT_CODES, "train_iters" at the run's end


def train(config: RunConfig) -> TrainingResult:
    """Trains as `config` says, from its start or from the checkpoint that `checkpoint.load` names.

    Every process of the run calls it; where torchrun or `launch` started several, they find each other first.
    Raises ConfigError, DataError or CheckpointError before anything is written when the run is not possible.
    """
    process, attempt, starting = this_process(), this_attempt(), StartClock()
    time.sleep(pause(attempt))
    starting.mark("imports")
    check_base(config)
    config, tokenizer = prepare(config, process.world_size)
    device = prepare_process(config, process.local_rank)
    config.notes.extend(idle_notes(config) + offload_notes(config, device.type))
    config.notes.extend(overlap_notes(config, compiles(config, device)))
    if process.is_first:  # who prints them
        config.notes.extend(tokenizer_notes(config, tokenizer))
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    output = Path(config.train.output_dir)
    with (
        lasting_streams() if process.is_first else nullcontext(),
        StopSignals(announces=process.is_first) as signals,
        claimed(config, attempt) if process.is_first else nullcontext(False) as goes_on,
        failures_kept(output, attempt, process.rank),
    ):
        init_distributed(device, longer(timeout))
        mesh = build_mesh(
            config.parallel, process.world_size, device.type, has_experts=config.model.num_experts is not None
        )
        if any_rank(goes_on, mesh.world):
            config.checkpoint.load, config.checkpoint.load_optim = str(output), config.checkpoint.save_optim
        trainer, pulse = None, Pulse(mesh, timeout)
        starting.mark("settings and processes")
        try:
            with open_watch(pulse, process, timeout, output):
                trainer = Trainer(config, tokenizer, mesh, device, pulse, signals, starting)
                result = trainer.run()
        except torch.OutOfMemoryError as error:
            made = (trainer.model.chunks, trainer.optimizer) if trainer else ()
            raise out_of_memory(error, config, process.world_size, process.rank, device, *made) from error
        end_distributed()
        exported = output / "hf_model"
        is_exported = result.checkpoint == trainer.loaded_from and exported.exists()
        if (
            process.is_first
            and config.checkpoint.export_hf
            and result.ended == "train_iters"
            and not is_exported
        ):
            export_hf(result.checkpoint, exported, replace=True)
        return result


class Trainer(Run):
    """The loop of a run: its steps, and what comes between them."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer | None,
        mesh: Mesh,
        device: torch.device,
        pulse: Pulse | None = None,
        signals: StopSignals | None = None,
        starting: StartClock | None = None,
    ):
        super().__init__(config, tokenizer, mesh, device)
        self.schedule = build_schedule(config.optim, config.train)
        self.pulse = pulse or Pulse(mesh, TIMEOUT)
        self.stops = Stops(config.train, mesh.world, signals)
        self.replicas = None
        if config.runtime.check_weight_hash_across_dp_replicas_interval:
            self.replicas = ReplicaCheck(self.model.chunks, self.model.parameters, mesh.world, mesh.tied)
        self.faults = Faults(self)
        self.validation_loss: float | None = None
        self.loaded_from = load_run(self)
        self.starting = starting or StartClock()
        self.starting.mark("data and model")

    def run(self) -> TrainingResult:
        """Trains to the end of the run or to an early exit, and leaves a checkpoint (`checkpoint.save_at_end`).

        A run that is over writes nothing.
        """
        config = self.config
        if self.loaded_from and self.step >= self.total_steps:
            return self._nothing_left()
        with (
            open_report(
                config,
                self.mesh,
                self.device,
                self.step,
                self.total_steps,
                self.model.pipeline,
                self.starting,
            ) as self.report,
            self.saver,
        ):
            if self.loaded_from:
                self.report.note(
                    f"going on from {self.loaded_from}: step {self.step}, {self.consumed_samples} samples consumed"
                )
            ended = None
            while ended is None:  # again where a loss spike has sent the run back to an earlier step
                ended = self._train_on()
            if ended == "train_iters" and self.step % config.train.eval_interval:
                self.evaluate(self.data.valid)
            self.report.end()
            checkpoint = self.save_last(ended != "train_iters" or config.checkpoint.save_at_end)
            if ended != "train_iters":
                self.report.event(
                    f"stopped after step {self.step} by {ended}; go on with checkpoint.load={self.output}",
                    event="stop",
                    step=self.step,
                    reason=ended,
                )
            elif (test_loss := self.mean_loss(self.data.test)) is not None:
                self.report.note(f"test loss {test_loss:.4f}, perplexity {perplexity(test_loss):.2f}")
        return TrainingResult(
            self.step, self.consumed_samples, self.report.last_loss, self.validation_loss, checkpoint, ended
        )

    def _train_on(self) -> str | None:
        """Trains from where the run stands. Returns why it ended; None when it stands at an earlier step now."""
        start = (self.step, self.consumed_samples, self.device, self.left_out)
        with self.data.train_loader(*start) as batches:
            self.pulse.settle("training")
            while self.step < self.total_steps:
                self.pulse.beat(self.step + 1, "training")
                self.stops.before_work()
                self.report.before_step(self.step + 1)
                self.train_step(batches)
                stop = self.stops.after_step(self.step)
                if stop or self._is_due(self.config.checkpoint.save_interval):
                    self.report.flush()  # what is saved has been judged
                if self.faults.look_after():
                    return None
                if self.stops.hurry is None:
                    self._between_steps()
                if (stop := self.stops.hurry or stop) and self.step < self.total_steps:
                    return stop
        return "train_iters"

    def _between_steps(self) -> None:
        """What the intervals ask for; a run that is to end in a hurry saves and does nothing else.

        Evaluates first: a run that is killed meanwhile makes the steps since the last save again, and evaluates again.
        """
        if self._is_due(self.config.runtime.check_weight_hash_across_dp_replicas_interval):
            self.replicas.check(self.step)
        if self._is_due(self.config.train.eval_interval):
            self.evaluate(self.data.valid)
        if self._is_due(self.config.checkpoint.save_interval):
            self.save()
        self.tell_of_saves()

    def _nothing_left(self) -> TrainingResult:
        if self.mesh.world.rank == 0:
            print(
                f"nothing is left to train: {self.loaded_from} is step {self.step}, and the run's length is "
                f"{self.total_steps} steps; to go on, raise it (train.train_iters, or train.train_samples)"
            )
        return TrainingResult(self.step, self.consumed_samples, None, None, self.loaded_from, "train_iters")

    def train_step(self, batches: Iterator[Batch]) -> None:
        """One update, by the gradient of the mean loss over the global batch."""
        self.report.clock.start()
        batch_size = self.batch_sizes.size(self.consumed_samples)
        micro_batches = [next(batches) for _ in range(self.batch_sizes.micro_batches(self.consumed_samples))]
        loss = self.faults.second_try(self.gradients(micro_batches), micro_batches)
        lr = self.schedule.learning_rate(self.step, self.consumed_samples)
        weight_decay = self.schedule.weight_decay(self.step, self.consumed_samples)
        set_learning_rate(self.optimizer, lr, weight_decay)
        result = optimizer_step(
            self.optimizer,
            self.loss_scale,
            self.config.optim.clip_grad,
            lambda parameters: self.gradient_squares(parameters) + self.model.overflow(),
        )
        self.model.end_step(result.skipped)
        self.model.parameters.clear_gradients()
        self.step += 1
        self.consumed_samples += batch_size
        self.report.clock.stop()
        self.report.add(
            PendingStep(
                step=self.step,
                consumed_samples=self.consumed_samples,
                batch_size=batch_size,
                lr=lr,
                loss=loss,
                grad_norm=result.grad_norm,
                skipped=result.skipped,
                loss_scale=result.loss_scale,
                tallies=self.model.tallies,
            )
        )

    def evaluate(self, dataset: SampleDataset | None) -> None:
        """The mean loss over the evaluation's tokens, reported and kept."""
        self.report.flush()
        loss = self.mean_loss(dataset)
        if loss is not None:
            self.validation_loss = loss
            self.report.evaluation(self.step, loss)

    def mean_loss(self, dataset: SampleDataset | None) -> float | None:
        """The mean loss over the evaluation's tokens of `dataset`; None where there is nothing to evaluate, and where
        a stop signal breaks it off."""
        total = self.config.train.eval_iters
        if dataset is None or total == 0 or self.stops.hurry:
            return None
        count = self.batch_sizes.global_batch_size // (self.config.train.micro_batch_size * self.mesh.dp.size)
        loss, tokens = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self.data.evaluation_loader(dataset, self.device) as batches:
            for done in range(total):
                self.pulse.beat(self.step, "evaluating")
                self.stops.before_work()
                self.report.evaluating(self.step, done, total)
                more_loss, more_tokens = self.model.evaluate([next(batches) for _ in range(count)])
                loss, tokens = loss + more_loss, tokens + more_tokens
                if self.stops.after_work():
                    break
        self.report.evaluating(self.step, total, total)
        return None if self.stops.hurry else (loss / tokens).item()

    def save(self) -> None:
        """Saves this moment, or begins to with `async_save`. A save that fails is told, and training goes on."""
        self.report.flush()
        if self.replicas is not None:
            self.replicas.check(self.step)
        tokenizer = self.tokenizer
        record = RunRecord(
            step=self.step,
            consumed_samples=self.consumed_samples,
            config=self.config.to_tree(),
            loss_scale=self.loss_scale.state(),
            left_out=self.left_out,
            abandoned=self.abandoned,
            base=self.base,
            data=self.data_files,
            tokenizer=tokenizer
            and TokenizerRecord(fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size),
        )
        optimizer = self.optimizer if self.config.checkpoint.save_optim else None
        with self.pulse.long_work("saving"):
            self.saver.save(record, self.model.chunks, optimizer, self.fp8_boxes())
        self.tell_of_saves()

    def save_last(self, also_new: bool = True) -> Path | None:
        """Leaves a checkpoint of this moment, which may be saved already, and returns its folder.

        Without `also_new` it waits for what is being saved, and returns the last folder, if there is one.
        Raises CheckpointError when it cannot be saved.
        """
        with self.pulse.long_work("saving"):
            self.tell_of_saves(wait=True)
        if also_new and not self._is_saved():
            self.save()
            with self.pulse.long_work("saving"):
                self.tell_of_saves(wait=True)
        last = self.saver.last
        if last is not None and last.error is not None:
            raise last.error
        return last and last.folder

    def _is_saved(self) -> bool:
        last = self.saver.last
        return last is not None and last.error is None and last.moment == (self.step, self.consumed_samples)

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.step % interval == 0
