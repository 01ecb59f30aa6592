"""Training: one loop, read top to bottom. `train` is the whole of a run; `Trainer.run` is the loop."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalith.build import Data, build_model, build_run_tokenizer, complete, vocabulary_rows
from megalith.checkpoint import (
    RunRecord,
    TokenizerRecord,
    load_model,
    load_optimizer,
    open_checkpoint,
    save_checkpoint,
)
from megalith.config import RunConfig
from megalith.config.batch import BatchSizeSchedule
from megalith.config.rules import check_training
from megalith.data.dataset import SampleDataset
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, TrainingError
from megalith.hardware import device_kind, pick_device
from megalith.optim.loss_scale import build_loss_scale
from megalith.optim.optimizer import build_optimizer, set_learning_rate
from megalith.optim.schedule import build_schedule
from megalith.optim.step import optimizer_step
from megalith.runtime.console import open_console
from megalith.runtime.lock import OutputLock, check_output_dir
from megalith.runtime.metrics import MetricsWriter, perplexity
from megalith.runtime.process import prepare_process
from megalith.runtime.profile import StepProfiler
from megalith.runtime.report import PendingStep, Report
from megalith.runtime.sinks import open_sinks
from megalith.runtime.summary import print_summary


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    consumed_samples: int
    loss: float | None  # of the last step
    validation_loss: float | None  # of the last evaluation
    checkpoint: Path  # the last one saved
    ended: str  # why: "train_iters", "exit_interval" or "exit_duration_in_mins"


def train(config: RunConfig) -> TrainingResult:
    """Trains as `config` says, from its start or from the checkpoint that `checkpoint.load` names.

    Raises ConfigError, DataError or CheckpointError before anything is written when the run is not possible.
    """
    tokenizer = build_run_tokenizer(config)
    config = complete(config, tokenizer)
    check_training(config)
    device = pick_device(config.runtime.device)
    prepare_process(config, device)
    with OutputLock(config.train.output_dir):
        check_output_dir(config.train.output_dir, config.checkpoint.load)
        try:
            return Trainer(config, tokenizer, device).run()
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"out of memory on {device}: {str(error).splitlines()[0]}; lower train.micro_batch_size or "
                "data.seq_length, or set parallel.recompute_granularity to full"
            ) from error


class Trainer:
    """A run in progress: what it is made of, and where in the run it stands."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None, device: torch.device):
        self.config, self.tokenizer, self.device = config, tokenizer, device
        self.output = Path(config.train.output_dir)
        self.batch_sizes = BatchSizeSchedule.from_config(config.train, data_parallel_size=1)
        self.total_steps = config.train.train_iters or self.batch_sizes.iterations_for_samples(
            config.train.train_samples
        )
        self.schedule = build_schedule(config.optim, config.train)
        self.data = Data(config, self.batch_sizes, self.total_steps, tokenizer)
        self.model = build_model(config, device)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optim)
        self.loss_scale = build_loss_scale(config.train.precision, config.optim, device)
        self.step = 0  # updates made, skipped ones included
        self.consumed_samples = 0
        self.validation_loss: float | None = None
        self.loaded_from = self._load()

    def run(self) -> TrainingResult:
        """Trains to the end of the run or to an early exit; always leaves a checkpoint."""
        config, started = self.config, time.monotonic()
        (self.output / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        self._print_start()
        with (
            MetricsWriter(self.output, self.step, open_sinks(config, self.step)) as metrics,
            open_console(self.total_steps, config.log.log_interval) as console,
            StepProfiler(self.output, self._profiled_steps(), console.note) as profiler,
            self.data.train_loader(self.step, self.consumed_samples, self.device) as batches,
        ):
            self.report = Report(config, self.device, metrics, console)
            saved_at, ended = None, "train_iters"
            while self.step < self.total_steps:
                profiler.before_step(self.step + 1)
                self.train_step(batches)
                if self.step % config.train.eval_interval == 0:
                    self.evaluate(self.data.valid)
                if config.checkpoint.save_interval and self.step % config.checkpoint.save_interval == 0:
                    saved_at = self.save()
                if reason := self._exit_reason(started):
                    ended = reason
                    break
            if self.step % config.train.eval_interval:
                self.evaluate(self.data.valid)
            checkpoint = saved_at if saved_at and saved_at.name.endswith(f"{self.step:08d}") else self.save()
            if ended != "train_iters":
                console.note(
                    f"stopped after step {self.step} by {ended}; go on with checkpoint.load={self.output}"
                )
            elif (test_loss := self._mean_loss(self.data.test)) is not None:
                console.note(f"test loss {test_loss:.4f}, perplexity {perplexity(test_loss):.2f}")
        return TrainingResult(
            self.step, self.consumed_samples, self.report.last_loss, self.validation_loss, checkpoint, ended
        )

    def train_step(self, batches) -> None:
        """One update: the gradient of the mean loss over the global batch, micro-batch by micro-batch."""
        self.report.clock.start()
        batch_size = self.batch_sizes.size(self.consumed_samples)
        micro_batches = [next(batches) for _ in range(self.batch_sizes.micro_batches(self.consumed_samples))]
        tokens = max(1.0, sum(batch.loss_mask.sum().item() for batch in micro_batches))  # on the host
        self._seed_fused_dropout()
        self.model.train()
        loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            loss_sum = self._loss_sum(batch.to(self.device))
            (loss_sum * (self.loss_scale.scale / tokens)).backward()
            loss += loss_sum.detach()
        lr = self.schedule.learning_rate(self.step, self.consumed_samples)
        weight_decay = self.schedule.weight_decay(self.step, self.consumed_samples)
        set_learning_rate(self.optimizer, lr, weight_decay)
        result = optimizer_step(self.optimizer, self.loss_scale, self.config.optim.clip_grad)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.consumed_samples += batch_size
        self.report.clock.stop()
        self.report.add(
            PendingStep(
                step=self.step,
                consumed_samples=self.consumed_samples,
                batch_size=batch_size,
                lr=lr,
                loss=loss / tokens,
                grad_norm=result.grad_norm,
                skipped=result.skipped,
                loss_scale=result.loss_scale,
            )
        )

    def evaluate(self, dataset: SampleDataset | None) -> None:
        """The mean loss over the evaluation's tokens, reported and kept."""
        loss = self._mean_loss(dataset)
        if loss is not None:
            self.validation_loss = loss
            self.report.evaluation(self.step, loss)

    def save(self) -> Path:
        """Writes a checkpoint of this moment; returns its folder."""
        self.report.flush()
        config, tokenizer = self.config.checkpoint, self.tokenizer
        record = RunRecord(
            step=self.step,
            consumed_samples=self.consumed_samples,
            config=self.config.to_tree(),
            loss_scale=self.loss_scale.state(),
            tokenizer=tokenizer
            and TokenizerRecord(fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size),
        )
        folder = save_checkpoint(
            self.output / "checkpoints",
            record,
            self.model,
            self.optimizer if config.save_optim else None,
            unpadded_rows=vocabulary_rows(self.config),
            write_tokenizer=tokenizer.save if tokenizer else None,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
        )
        self.report.console.note(f"saved {folder}")
        return folder

    def _loss_sum(self, batch) -> Tensor:
        return self.model(
            batch.tokens,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
            sample_numbers=batch.sample_numbers,
        )

    def _mean_loss(self, dataset: SampleDataset | None) -> float | None:
        if dataset is None or self.config.train.eval_iters == 0:
            return None
        self.report.flush()
        self.model.eval()
        loss, tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        with torch.no_grad(), self.data.evaluation_loader(dataset, self.device) as batches:
            for batch in batches:
                tokens += batch.loss_mask.sum().item()
                loss += self._loss_sum(batch.to(self.device))
        return loss.item() / max(1.0, tokens)

    def _seed_fused_dropout(self) -> None:
        """A GPU kernel's attention dropout is the one user of a random state: it starts anew from each step."""
        if self.device.type == "cuda" and self.config.model.attention_dropout:
            key = f"{self.config.train.seed}/attention dropout/{self.step}".encode()
            torch.cuda.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))

    def _profiled_steps(self) -> range:
        log = self.config.log
        return range(log.profile_step_start, log.profile_step_end) if log.profile else range(0)

    def _exit_reason(self, started: float) -> str | None:
        limits = self.config.train
        if self.step >= self.total_steps:
            return None
        if limits.exit_interval and self.step % limits.exit_interval == 0:
            return "exit_interval"
        if limits.exit_duration_in_mins and time.monotonic() - started > 60 * limits.exit_duration_in_mins:
            return "exit_duration_in_mins"
        return None

    def _load(self) -> Path | None:
        settings = self.config.checkpoint
        if settings.load is None:
            return None
        parts = ("model", "optimizer") if settings.load_optim else ("model",)
        checkpoint = open_checkpoint(settings.load, parts)
        if checkpoint is None:
            return None
        record, rows = checkpoint.manifest, vocabulary_rows(self.config)
        if self.tokenizer and record.tokenizer and record.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise CheckpointError(
                f"{checkpoint.folder} was trained with another tokenizer ({record.tokenizer.vocab_size} entries, "
                f"fingerprint {record.tokenizer.fingerprint[:12]}) than this run's ({self.tokenizer.vocab_size}, "
                f"{self.tokenizer.fingerprint[:12]}); use the one in {checkpoint.tokenizer_folder}"
            )
        load_model(checkpoint, self.model, rows)
        if settings.load_optim:
            load_optimizer(checkpoint, self.optimizer, rows)
        self.loss_scale.load_state(record.loss_scale)
        self.step, self.consumed_samples = record.step, record.consumed_samples
        return checkpoint.folder

    def _print_start(self) -> None:
        print_summary(self.config, device_kind(self.device))
        for note in self.config.notes:
            print(f"note: {note}")
        if self.loaded_from:
            print(
                f"going on from {self.loaded_from}: step {self.step}, {self.consumed_samples} samples consumed"
            )
