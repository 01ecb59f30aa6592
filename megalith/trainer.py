"""Training: one loop, read top to bottom. `train` is the whole of a run; `Trainer.run` is the loop."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from megalith.bridge.exporter import export_hf
from megalith.bridge.families import family_for
from megalith.bridge.load import begin_from, with_init_from
from megalith.build import Data, build_model, build_run_tokenizer, complete, vocabulary_rows
from megalith.checkpoint import (
    Checkpoint,
    RunRecord,
    Saver,
    TokenizerRecord,
    load_model,
    load_optimizer,
    open_checkpoint,
    state_boxes,
)
from megalith.comm import summed
from megalith.config import ModelConfig, RunConfig
from megalith.config.batch import BatchSizeSchedule
from megalith.config.rules import check_training, data_parallel_size, offload_notes
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError
from megalith.hardware import pick_device
from megalith.optim.loss_scale import build_loss_scale
from megalith.optim.optimizer import build_optimizer, set_learning_rate
from megalith.optim.schedule import build_schedule
from megalith.optim.step import optimizer_step, sum_of_squares
from megalith.parallel.gradients import GradientSquares
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.pipeline_rules import check_pipeline
from megalith.parallel.tied_embedding import copies
from megalith.runtime.launch import end_distributed, init_distributed, this_process
from megalith.runtime.lock import OutputLock, check_output_dir
from megalith.runtime.metrics import perplexity
from megalith.runtime.out_of_memory import out_of_memory
from megalith.runtime.process import prepare_process
from megalith.runtime.report import PendingStep, open_report

# Settings of the model that give weights another meaning, while the tensors would fit.
SAME_FUNCTION = (
    "num_attention_heads",
    "query_groups",
    "head_dim",
    "mlp_activation",
    "layernorm_zero_centered_gamma",
    "scale_embeddings",
    "rotary_percent",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


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

    Every process of the run calls it; where torchrun or `launch` started several, they find each other first.
    Raises ConfigError, DataError or CheckpointError before anything is written when the run is not possible.
    """
    process = this_process()
    config, tokenizer = prepare(config, process.world_size)
    device = pick_device(config.runtime.device, process.local_rank)
    config.notes.extend(offload_notes(config, device.type))
    prepare_process(config, device)
    with claimed(config) if process.is_first else nullcontext():
        init_distributed(device)
        mesh = build_mesh(
            config.parallel, process.world_size, device.type, has_experts=config.model.num_experts is not None
        )
        trainer = None
        try:
            trainer = Trainer(config, tokenizer, mesh, device)
            result = trainer.run()
        except torch.OutOfMemoryError as error:
            made = (trainer.model.chunks, trainer.optimizer) if trainer else ()
            raise out_of_memory(error, config, process.world_size, process.rank, device, *made) from error
        end_distributed()
        if process.is_first and config.checkpoint.export_hf:
            export_hf(result.checkpoint, Path(config.train.output_dir) / "hf_model", replace=True)
        return result


def prepare(config: RunConfig, world_size: int) -> tuple[RunConfig, Tokenizer | None]:
    """The configuration with what it left to the tokenizer and the data, found possible; and the tokenizer.

    Raises ConfigError where it cannot be trained on `world_size` processes; what is only unwise becomes a note.
    """
    config = with_init_from(config)
    tokenizer = build_run_tokenizer(config)
    config = complete(config, tokenizer)
    check_training(config, world_size)
    if config.checkpoint.export_hf:
        family_for(config.model)  # there has to be one
    dp = data_parallel_size(config.parallel, world_size)
    warnings = check_pipeline(config, BatchSizeSchedule.from_config(config.train, dp).all_micro_batches)
    config.notes.extend(warnings)
    return config, tokenizer


@contextmanager
def claimed(config: RunConfig) -> Iterator[None]:
    """The output folder, for this run alone."""
    with OutputLock(config.train.output_dir):
        check_output_dir(config.train.output_dir, config.checkpoint.load)
        yield


class Trainer:
    """A run in progress on this rank: what it is made of, and where in the run it stands."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None, mesh: Mesh, device: torch.device):
        self.config, self.tokenizer, self.mesh, self.device = config, tokenizer, mesh, device
        self.output = Path(config.train.output_dir)
        self.batch_sizes = BatchSizeSchedule.from_config(config.train, mesh.dp.size)
        self.total_steps = config.train.train_iters or self.batch_sizes.iterations_for_samples(
            config.train.train_samples
        )
        self.schedule = build_schedule(config.optim, config.train)
        self.data = Data(config, self.batch_sizes, self.total_steps, tokenizer, mesh.dp)
        self.model = build_model(config, mesh, device)
        self.optimizer = build_optimizer(self.model.parameters.named, config.optim)
        self.loss_scale = build_loss_scale(config.train.precision, config.optim, device)
        self.gradient_squares = GradientSquares(
            self.model.parameters, mesh.world, sum_of_squares, copies(self.model.chunks, mesh.pp), device
        )
        self.saver = Saver(
            self.output / "checkpoints",
            mesh.world,
            unpadded_rows=vocabulary_rows(config),
            write_tokenizer=tokenizer.save if tokenizer else None,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            background=config.checkpoint.async_save,
        )
        self.step = 0  # updates made, skipped ones included
        self.consumed_samples = 0
        self.validation_loss: float | None = None
        self.loaded_from = self._load()
        if self.loaded_from is None and config.model.init_from is not None:
            rows = vocabulary_rows(config)
            begin_from(config.model.init_from, self.model.chunks, rows, config.train.seed, mesh.world)

    def run(self) -> TrainingResult:
        """Trains to the end of the run or to an early exit; always leaves a checkpoint."""
        config, started = self.config, time.monotonic()
        with (
            open_report(
                config, self.mesh, self.device, self.step, self.total_steps, self.model.pipeline
            ) as self.report,
            self.data.train_loader(self.step, self.consumed_samples, self.device) as batches,
            self.saver,
        ):
            if self.loaded_from:
                self.report.note(
                    f"going on from {self.loaded_from}: step {self.step}, {self.consumed_samples} samples consumed"
                )
            ended = "train_iters"
            while self.step < self.total_steps:
                self.report.before_step(self.step + 1)
                self.train_step(batches)
                if self.step % config.train.eval_interval == 0:
                    self.evaluate(self.data.valid)
                if config.checkpoint.save_interval and self.step % config.checkpoint.save_interval == 0:
                    self.save()
                self._tell_of_saves()
                if reason := self._exit_reason(started):
                    ended = reason
                    break
            if self.step % config.train.eval_interval:
                self.evaluate(self.data.valid)
            self.report.end()
            checkpoint = self.save_last()
            if ended != "train_iters":
                self.report.note(
                    f"stopped after step {self.step} by {ended}; go on with checkpoint.load={self.output}"
                )
            elif (test_loss := self.mean_loss(self.data.test)) is not None:
                self.report.note(f"test loss {test_loss:.4f}, perplexity {perplexity(test_loss):.2f}")
        return TrainingResult(
            self.step, self.consumed_samples, self.report.last_loss, self.validation_loss, checkpoint, ended
        )

    def train_step(self, batches: Iterator[Batch]) -> None:
        """One update, by the gradient of the mean loss over the global batch."""
        self.report.clock.start()
        batch_size = self.batch_sizes.size(self.consumed_samples)
        micro_batches = [next(batches) for _ in range(self.batch_sizes.micro_batches(self.consumed_samples))]
        self._seed_fused_dropout()
        loss = self.model.backward(micro_batches, self.loss_scale.scale)
        lr = self.schedule.learning_rate(self.step, self.consumed_samples)
        weight_decay = self.schedule.weight_decay(self.step, self.consumed_samples)
        set_learning_rate(self.optimizer, lr, weight_decay)
        result = optimizer_step(
            self.optimizer, self.loss_scale, self.config.optim.clip_grad, self.gradient_squares
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
        """The mean loss over the evaluation's tokens of `dataset`; None where there is nothing to evaluate."""
        if dataset is None or self.config.train.eval_iters == 0:
            return None
        count = self.batch_sizes.global_batch_size // (self.config.train.micro_batch_size * self.mesh.dp.size)
        loss, tokens = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self.data.evaluation_loader(dataset, self.device) as batches:
            for _ in range(self.config.train.eval_iters):
                more_loss, more_tokens = self.model.evaluate([next(batches) for _ in range(count)])
                loss, tokens = loss + more_loss, tokens + more_tokens
        return (loss / tokens).item()

    def save(self) -> None:
        """Saves this moment, or begins to with `async_save`. A save that fails is told, and training goes on."""
        self.report.flush()
        tokenizer = self.tokenizer
        record = RunRecord(
            step=self.step,
            consumed_samples=self.consumed_samples,
            config=self.config.to_tree(),
            loss_scale=self.loss_scale.state(),
            tokenizer=tokenizer
            and TokenizerRecord(fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size),
        )
        optimizer = self.optimizer if self.config.checkpoint.save_optim else None
        self.saver.save(record, self.model.chunks, optimizer)
        self._tell_of_saves()

    def save_last(self) -> Path:
        """Leaves a checkpoint of this moment, which may be saved already, and returns its folder.

        Raises CheckpointError when it cannot be saved.
        """
        self._tell_of_saves(wait=True)
        if not self._is_saved():
            self.save()
            self._tell_of_saves(wait=True)
        if self.saver.last.error is not None:
            raise self.saver.last.error
        return self.saver.last.folder

    def _is_saved(self) -> bool:
        last = self.saver.last
        return last is not None and last.error is None and last.moment == (self.step, self.consumed_samples)

    def _tell_of_saves(self, wait: bool = False) -> None:
        for saved in self.saver.finished(wait):
            self.report.note(str(saved))

    def _seed_fused_dropout(self) -> None:
        """A GPU kernel's attention dropout is the one user of a random state: it starts anew from each step."""
        if self.device.type == "cuda" and self.config.model.attention_dropout:
            key = f"{self.config.train.seed}/attention dropout/{self.step}/{self.mesh.world.rank}".encode()
            torch.cuda.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))

    def _exit_reason(self, started: float) -> str | None:
        limits = self.config.train
        if self.step >= self.total_steps:
            return None
        if limits.exit_interval and self.step % limits.exit_interval == 0:
            return "exit_interval"
        if limits.exit_duration_in_mins and self.step % self.config.log.log_interval == 0:
            over = torch.tensor(
                time.monotonic() - started > 60 * limits.exit_duration_in_mins, device=self.device
            )
            if summed(over.float(), self.mesh.world, "max").item():  # one rank's clock decides for all
                return "exit_duration_in_mins"
        return None

    def _load(self) -> Path | None:
        settings, world = self.config.checkpoint, self.mesh.world
        if settings.load is None:
            return None
        parts = ("model", "optimizer") if settings.load_optim else ("model",)
        boxes = state_boxes(self.model.chunks, self.optimizer, vocabulary_rows(self.config))
        checkpoint = open_checkpoint(settings.load, parts, world=world, boxes=boxes)
        if checkpoint is None:
            if not Path(settings.load).resolve().is_relative_to(self.output.resolve()):
                raise CheckpointError(
                    f"there is no checkpoint in {settings.load}, which checkpoint.load names; only the run's own "
                    f"folder {self.output} may be empty, at the first start: correct the path, or leave it out"
                )
            return None
        _check_same_function(checkpoint, self.config.model)
        record, rows = checkpoint.manifest, vocabulary_rows(self.config)
        if self.tokenizer and record.tokenizer and record.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise CheckpointError(
                f"{checkpoint.folder} was trained with another tokenizer ({record.tokenizer.vocab_size} entries, "
                f"fingerprint {record.tokenizer.fingerprint[:12]}) than this run's ({self.tokenizer.vocab_size}, "
                f"{self.tokenizer.fingerprint[:12]}); use the one in {checkpoint.tokenizer_folder}"
            )
        load_model(checkpoint, self.model.chunks, rows, world)
        if settings.load_optim:
            load_optimizer(checkpoint, self.optimizer, rows, self.model.chunks, world)
        self.loss_scale.load_state(record.loss_scale)
        self.step, self.consumed_samples = record.step, record.consumed_samples
        return checkpoint.folder


def _check_same_function(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Refuses weights whose tensors would fit, but which were trained to be used in another way."""
    trained = RunConfig.from_tree(checkpoint.manifest.config).model
    for name in SAME_FUNCTION:
        before, now = getattr(trained, name), getattr(model, name)
        if before != now:
            raise CheckpointError(
                f"{checkpoint.folder} was trained with {name} {before}, but this run's model has {now}; its weights "
                "would mean something else: load it with the model configuration that it was saved with"
            )
