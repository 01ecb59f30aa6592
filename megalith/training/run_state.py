"""State of a run on one rank: its components, its position, and one step, evaluation or save."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.load import stored_dtypes
from megalith.checkpoint import DataRecord, RunRecord, Saver, TokenizerRecord
from megalith.checkpoint.read import Checkpoint
from megalith.checkpoint.state import amax_shards
from megalith.checkpoint.steps import CHECKPOINTS
from megalith.config import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.io import replace_file
from megalith.models.loss import CrossEntropy, Loss
from megalith.optim.schedule import build_schedule
from megalith.parallel.data.layer_norms import LayerNorms
from megalith.parallel.fp8_counts import counters, gather_counts
from megalith.parallel.mesh import Mesh
from megalith.parallel.model_spec import LOSSES
from megalith.parallel.pipeline.schedules import fitting_micro_batches
from megalith.parallel.pipeline.stages import schedule_kind
from megalith.parallel.shards import LocalShard
from megalith.remote import StorePath, open_location
from megalith.report.clock import PhaseTimers
from megalith.report.console import LM_LOSS
from megalith.report.report import PendingStep
from megalith.training.build import build_model, vocabulary_rows
from megalith.training.custom_loop import Optimizer
from megalith.training.dynamic_fine_tuning import DynamicFineTuning
from megalith.training.gradient_noise import read_noise
from megalith.training.replica_check import ReplicaCheck
from megalith.training.run_datasets import Data
from megalith.training.skipped_steps import SkippedSteps

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"


class Task:
    """Training task of a run: its data, loss and metrics. This class is pre-training; post-training tasks derive from
    it.

    Methods that take a run are called by every rank.
    """

    loss: Loss | None = None
    """Training loss. None: the model's own."""
    evaluation_loss: Loss = CrossEntropy()
    restarts_in_process: bool = True
    """True if another run can be built with the same task object, so that ranks can restart in their processes."""
    console_metrics: tuple[str, ...] = ()
    """Names of the step metrics that the console shows."""
    loss_name: str = LM_LOSS
    """Name of the training loss in log lines."""

    def console_line(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Return the step's log line if the task formats it.

        None means that the usual lines are logged, once per log interval.
        """
        return None

    def build_data(self, run: Run) -> Data:
        """Build the run's data. Called before the other methods, when `run` has only its configuration, tokenizer, mesh
        and device.
        """
        chat = run.config.chat
        if chat is not None and not run.config.sft.enabled:
            raise ConfigError(
                f"{chat.name}.enabled requires `megalith {chat.name}`; use that command, or leave "
                f"{chat.name}.enabled out to pre-train"
            )
        if run.config.distill.teacher_or_logits is not None:
            raise ConfigError(
                "distill.teacher and distill.logits_dir require `megalith distill`; use that command, or leave "
                "these settings out to pre-train"
            )
        if run.config.sft.enabled and run.config.sft.loss_type == "dft":
            self.loss = DynamicFineTuning(LOSSES["gpt", run.config.train.calculate_per_token_loss]())
        is_first = run.mesh.world.rank == 0
        return Data(
            run.config,
            run.batch_sizes,
            run.total_steps,
            run.tokenizer,
            run.mesh.dp,
            is_first,
            run.mesh.dp_cp,
        )

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]] | None:
        """Return a function that returns the current step's metrics for metrics.jsonl, or None if there are none.

        Called once gradients are ready.
        """
        return None

    def state_files(self, run: Run) -> dict[str, bytes]:
        """Return the task's files for a checkpoint, by name. Only rank 0's are saved."""
        files = run.data.state_files(run.consumed_samples, run.left_out)
        for note in run.data.stream_notes():
            run.log(f"note: {note}")
        return files

    def load_state(self, run: Run, files: Mapping[str, Path]) -> None:
        """Restore the state that `state_files` returned when the checkpoint was saved."""
        run.data.load_state(files)

    def parts(self, run: Run) -> dict[str, Mapping[str, LocalShard]]:
        """Return the shards of additional models, keyed by checkpoint part."""
        return {}

    def load_parts(self, run: Run, checkpoint: Checkpoint, with_optimizer: bool) -> None:
        """Restore the shards that `parts` returned when the checkpoint was saved."""

    def end_step(self, run: Run) -> None:
        """Do the task's work at the end of a step, after its update. `run.step` already counts the step."""

    def evaluate(
        self, run: Run, before: Callable[[int, int], None], stops: Callable[[], str | None]
    ) -> dict[str, float] | None:
        """Evaluate on held-out data, for tasks whose evaluation is not a mean loss.

        Args:
            run: the run.
            before: called before each chunk of the evaluation, with the number of finished chunks and the total number.
            stops: called after each chunk; a true result ends the evaluation without metrics.

        Returns:
            Metrics by name. None means the task has no such evaluation, or it was stopped.
        """
        return None

    def evaluation_metrics(self, run: Run) -> dict[str, float] | None:
        """Return the metrics of the evaluation that has just ended.

        None means that the loss, a mean over tokens, is the only metric.
        """
        return None


def _is_due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


class Run:
    """Components and position of a run. `Trainer` (trainer.py) advances it."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer | None,
        mesh: Mesh,
        device: torch.device,
        task: Task | None = None,
    ):
        """Build a run with initial weights. `load_run` (resume.py) restores a checkpoint, and fills a frozen base."""
        self.config, self.tokenizer, self.mesh, self.device = config, tokenizer, mesh, device
        self.output = Path(config.train.output_dir)
        self.saves = open_location(config.run_folder) / CHECKPOINTS
        self.batch_sizes = BatchSizeSchedule.from_config(config.train, mesh.dp.size)
        self.total_steps = self.batch_sizes.iterations(config.train)
        self.task = task or Task()
        self.data = self.task.build_data(self)
        self.notes: list[str] = list(self.data.notes)
        """Notes at the start of the report."""
        has_frozen_base = config.lora.rank is not None
        self.model = build_model(config, mesh, device, stored_dtypes(config) if has_frozen_base else None)
        self.updates = Optimizer(self.model, config.adapter_optim, config.train.precision)
        self.optimizer, self.loss_scale = self.updates.optimizer, self.updates.loss_scale
        self.schedule = build_schedule(config.optim, config.train)
        self.saver = Saver(
            self.saves,
            mesh.world,
            unpadded_rows=vocabulary_rows(config),
            write_tokenizer=tokenizer.save if tokenizer else None,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            background=config.checkpoint.async_save,
            max_failures=config.checkpoint.max_failed_saves,
        )
        self.counters = counters(self.model.chunks)
        self._norms: LayerNorms | None = None
        self.replicas = None
        if config.runtime.check_weight_hash_across_dp_replicas_interval:
            self.replicas = ReplicaCheck(self.model.chunks, self.model.parameters, mesh)
        self.timers = PhaseTimers(device, config.log.timing_log_level)
        self.log: Callable[[str], None] = lambda text: None
        """Writes a line to the run's log."""
        self.step = 0  # updates made, skipped ones included
        self.consumed_samples = 0
        self.skipped = SkippedSteps()  # fp16 overflows, excluded from schedules
        self.totals: dict[str, int | float] = {}  # running totals of the task, stored in checkpoints
        self.left_out: list[list[int]] = []  # ranges of the data stream skipped after loss spikes
        self.base: str | None = None  # with adapters, on rank 0: fingerprint of the weights from init_from
        self.base_values: dict[str, Tensor] | None = (
            None  # of lora.modules_to_save, once a reference has been computed
        )
        self.data_files: dict[str, DataRecord] = {}  # identity of the training data, by prefix
        # Ranges of save numbers in the output folder that this run has gone back from.
        self.abandoned: list[list[int]] = []

    def train_step(
        self,
        batches: Iterator[Batch],
        before_update: Callable[[Tensor, Sequence[Batch]], None] = lambda loss, micro_batches: None,
    ) -> PendingStep:
        """Train one step on the mean loss over the global batch.

        Args:
            batches: iterator of micro-batches.
            before_update: called with the step's loss and micro-batches before the optimizer step; may recompute the
                gradients.

        Returns:
            The step's metrics, partly on the device.
        """
        batch_size = self.batch_sizes.size(self.consumed_samples)
        count = self.data.micro_batches(self.consumed_samples)
        with self.timers("batch-generator"):
            micro_batches = [next(batches) for _ in range(count)]
        log, number = self.config.log, self.step + 1
        noise_samples = self._noise_samples(count) if _is_due(log.log_gradient_noise_interval, number) else 0
        if noise_samples:
            noise = self._squares_of_first(micro_batches, noise_samples)
        interval = log.log_fp8_interval if self.config.train.fp8_format else 0
        counts_fp8 = interval > 0 and (self.step + 1) % interval == 0
        for counter in self.counters.values():
            counter.begin_step(counts_fp8)
        with self.timers("forward-backward"):
            before_update(self.gradients(micro_batches), micro_batches)
        metrics = self.task.step_metrics(self)
        if counts_fp8:
            task_metrics, fp8_counts = metrics or dict, gather_counts(self.counters, self.mesh.world)
            metrics = lambda: {**task_metrics(), **fp8_counts}  # noqa: E731
        lr = self.schedule.learning_rate(*self.schedule_position)
        weight_decay = self.schedule.weight_decay(*self.schedule_position)
        decoupled = self.schedule.decoupled
        decoupled_lr = decoupled and decoupled.learning_rate(*self.schedule_position)
        squares = self.updates.gradient_squares
        is_logged = (self.step + 1) % log.log_interval == 0 or self.step + 1 == self.total_steps
        zeros = squares.count_zeros() if is_logged and log.log_num_zeros_in_grad else None
        logs_norms = _is_due(log.log_norms_interval, number)
        if logs_norms:
            norms, loss_scale = self._layer_norms(), self.loss_scale.scale
            before, gradient_norms = norms.weights(), norms.gradients() / loss_scale
        with self.timers("optimizer"):
            result = self.updates.step(lr, weight_decay, decoupled_lr)
        if logs_norms:
            metrics = self._with_norms(metrics, norms, gradient_norms, norms.updates(before))
        if noise_samples:
            other_metrics, sizes = metrics or dict, (noise_samples, batch_size)
            metrics = lambda: {**other_metrics(), **read_noise(noise, result.grad_norm, *sizes)}  # noqa: E731
        work = self.data.work(self.consumed_samples, batch_size)
        self.step += 1
        self.consumed_samples += batch_size
        if self.config.train.precision == "fp16":
            self.skipped.add(result.skipped, batch_size)
        self.task.end_step(self)
        return PendingStep(
            step=self.step,
            consumed_samples=self.consumed_samples,
            batch_size=batch_size,
            lr=lr,
            loss=self.model.logged_loss,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            num_zeros=zeros,
            params_norm=squares.weight_squares().sqrt() if is_logged and log.log_params_norm else None,
            max_attention_logit=result.max_attention_logit,
            output_z_loss=self.model.output_z_loss,
            mtp_losses=self.model.mtp_losses,
            tallies=self.model.tallies,
            timers=self.timers,
            extra_metrics=metrics,
            console_metrics=self.task.console_metrics,
            console_line=self.task.console_line,
            token_counts=work,
        )

    def _noise_samples(self, micro_batches: int) -> int:
        """Return the smaller batch size of the gradient noise scale, or 0 if the step has too few micro-batches."""
        parallel, train = self.config.parallel, self.config.train
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage
        fewest = fitting_micro_batches(schedule_kind(parallel), self.mesh.pp.size, 1, group)
        return fewest * train.micro_batch_size * self.mesh.dp.size if fewest < micro_batches else 0

    def _squares_of_first(self, micro_batches: Sequence[Batch], samples: int) -> Tensor:
        """Return the squared gradient norm over the first `samples` of the step, a float32 scalar."""
        count = samples // (self.config.train.micro_batch_size * self.mesh.dp.size)
        self.gradients(micro_batches[:count])
        plain = [plain for _, plain in self.model.parameters.named if plain.grad is not None]
        squares = self.updates.gradient_squares(plain) / self.loss_scale.scale.square()
        self.task.step_metrics(self)  # discards the metrics of these passes
        self.model.parameters.clear_gradients()
        self.model.forget_logits()
        return squares

    def _layer_norms(self) -> LayerNorms:
        if self._norms is None:
            self._norms = self.updates.layer_norms()
        return self._norms

    @staticmethod
    def _with_norms(
        metrics: Callable[[], dict[str, Any]] | None, norms: LayerNorms, gradients: Tensor, updates: Tensor
    ) -> Callable[[], dict[str, Any]]:
        """Return a function that returns a step's metrics, including the gradient and update norms per layer."""
        return lambda: {
            **(metrics or dict)(),
            **{f"gradient_norm/{layer}": value for layer, value in norms.named(gradients).items()},
            **{f"update_norm/{layer}": value for layer, value in norms.named(updates).items()},
        }

    @property
    def schedule_position(self) -> tuple[int, int]:
        """Number of steps and of samples by which the schedules of learning rate and weight decay have advanced."""
        return self.step - self.skipped.steps, self.consumed_samples - self.skipped.samples

    def gradients(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Compute the step's gradients, multiplied by the loss scale, into `.grad`. Returns the loss."""
        self._seed_fused_dropout()
        return self.model.backward(micro_batches, self.task.loss, loss_scale=self.loss_scale.scale)

    def mean_loss(
        self,
        dataset: SampleDataset | None,
        before: Callable[[int], None] = lambda done: None,
        stops: Callable[[], str | None] = lambda: None,
    ) -> float | None:
        """Return the mean loss over the tokens of an evaluation on `dataset`, with the averaged weights if there are
        any. None if there is nothing to evaluate or the evaluation was stopped.

        `before` is called before each global batch with the number of finished batches. `stops` is called after it; a
        true result ends the evaluation.
        """
        total = self.config.train.eval_iters
        if dataset is None or total == 0:
            return None
        total = min(total, -(-len(dataset) // self.batch_sizes.global_batch_size))
        loss, tokens = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self.data.evaluation_loader(dataset, self.device) as batches, self.updates.averaged_weights():
            for done in range(total):
                before(done)
                count = self.data.evaluation_micro_batches(dataset, done)
                more_loss, more_tokens = self.model.evaluate(
                    [next(batches) for _ in range(count)], self.task.evaluation_loss
                )
                loss, tokens = loss + more_loss, tokens + more_tokens
                if stops():
                    return None
        return (loss / tokens).item()

    def save(self) -> None:
        """Save a checkpoint, or start a background save with `async_save`. A failed save is logged and training
        continues.

        Raises CheckpointError after `checkpoint.max_failed_saves` consecutive failures.
        """
        optimizer = self.optimizer if self.config.checkpoint.save_optim else None
        amaxes = amax_shards(self.model.amaxes, self.mesh.world)
        task_files = self.task.state_files(self)
        parts = {**amaxes, **self.task.parts(self)}
        self.saver.save(self.record(), self.model.chunks, optimizer, parts, task_files)
        self.log_saves()

    def save_last(self, also_new: bool = True) -> Path | StorePath | None:
        """Ensure that the current state is saved. Returns its folder.

        Without `also_new`, wait for the save in progress and return the last folder, if any. Raises CheckpointError if
        saving fails.
        """
        self.log_saves(wait=True)
        if also_new and not self._is_saved():
            self.save()
            self.log_saves(wait=True)
        last = self.saver.last
        if last is not None and last.error is not None:
            raise last.error
        return last and last.folder

    def log_saves(self, wait: bool = False) -> None:
        """Log the results of completed saves; with `wait`, wait for the save in progress."""
        for saved in self.saver.completed_saves(wait):
            self.log(str(saved))
            if self.config.checkpoint.megatron_tracker and self.mesh.world.rank == 0 and saved.error is None:
                self._write_tracker(saved.moment[0])

    def _write_tracker(self, step: int) -> None:
        tracker = open_location(self.config.run_folder) / MEGATRON_TRACKER
        try:
            tracker.write(str(step)) if isinstance(tracker, StorePath) else replace_file(tracker, str(step))
        except OSError as error:
            self.log(f"warning: {tracker} could not be written: {error}")

    def _is_saved(self) -> bool:
        last = self.saver.last
        return last is not None and last.error is None and last.moment == (self.step, self.consumed_samples)

    def restore_record(self, record: RunRecord) -> None:
        """Restore the state in `record`. Tensors, the task's files and `abandoned` are not part of it."""
        self.loss_scale.load_state(record.loss_scale)
        self.step, self.consumed_samples = record.step, record.consumed_samples
        self.skipped = SkippedSteps(record.skipped_steps, record.skipped_samples)
        self.totals, self.left_out = dict(record.counters), record.left_out

    def record(self) -> RunRecord:
        """Return the state other than tensors, to be saved in a checkpoint."""
        tokenizer = self.tokenizer
        return RunRecord(
            step=self.step,
            consumed_samples=self.consumed_samples,
            skipped_steps=self.skipped.steps,
            skipped_samples=self.skipped.samples,
            config=self.config.to_tree(),
            loss_scale=self.loss_scale.state(),
            counters=dict(self.totals),
            left_out=self.left_out,
            abandoned=self.abandoned,
            base=self.base,
            data=self.data_files,
            tokenizer=tokenizer
            and TokenizerRecord(fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size),
        )

    def _seed_fused_dropout(self) -> None:
        """Seed the random state for each step. Only the attention dropout of GPU kernels uses it."""
        if self.device.type == "cuda" and self.config.model.attention_dropout:
            key = f"{self.config.train.seed}/attention dropout/{self.step}/{self.mesh.world.rank}".encode()
            torch.cuda.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))
