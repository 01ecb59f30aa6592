"""State of a run in progress on one rank: its parts, its position, and one step, evaluation or save."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint import DataRecord, RunRecord, Saver, TokenizerRecord
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
from megalith.parallel.fp8_counts import counters, gather_counts
from megalith.parallel.mesh import Mesh
from megalith.remote import StorePath, open_location
from megalith.report.clock import PhaseTimers
from megalith.report.report import PendingStep
from megalith.training.build import Data, build_model, vocabulary_rows
from megalith.training.custom_loop import Optimizer
from megalith.training.replica_check import ReplicaCheck
from megalith.training.skipped_steps import SkippedSteps

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"


class Task:
    """What a run trains for: its data, its loss and further figures of a step. This one is pre-training's."""

    loss: Loss | None = None
    """None: the model's own."""
    evaluation_loss: Loss = CrossEntropy()
    console_metrics: tuple[str, ...] = ()
    """The figures that the console shows."""

    def build_data(self, run: Run) -> Data:
        """The run's data. It is asked for first, when `run` has its configuration, tokenizer, mesh and device alone."""
        if run.config.dpo.enabled:
            raise ConfigError(
                "dpo.enabled is what `megalith dpo` sets; use that, or leave it out to pre-train"
            )
        if run.config.distill.teacher_or_logits is not None:
            raise ConfigError(
                "distill.teacher and distill.logits_dir are what `megalith distill` learns from; use that, or leave "
                "them out"
            )
        is_first = run.mesh.world.rank == 0
        return Data(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp, is_first)

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]] | None:
        """What reads the figures of the step that has its gradients, for metrics.jsonl. Every rank calls it."""
        return None

    def state_files(self, run: Run) -> dict[str, bytes]:
        """What a checkpoint of this moment has of it besides the counters, contents by file name. Every rank calls it;
        those of the first are saved."""
        return {}

    def load_state(self, run: Run, files: Mapping[str, Path]) -> None:
        """Takes what `state_files` gave when the checkpoint that `run` stands at was saved."""

    def evaluate(
        self, run: Run, before: Callable[[int, int], None], stops: Callable[[], str | None]
    ) -> dict[str, float] | None:
        """Figures of held-out data, of a task whose evaluation is no mean loss. Every rank calls it.

        `before` is called ahead of each part with the number done and that of all, `stops` after it: what is true ends
        it, and there are none.
        """
        return None

    def evaluation_metrics(self, run: Run) -> dict[str, float] | None:
        """Of the evaluation that has just ended; None: its loss is a mean over tokens. Every rank calls it."""
        return None


class Run:
    """The pieces and the position of a run. The loop that moves it is the trainer's (trainer.py)."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer | None,
        mesh: Mesh,
        device: torch.device,
        task: Task | None = None,
    ):
        """With the initial weights; `load_run` (resume.py) puts it where a checkpoint stands."""
        self.config, self.tokenizer, self.mesh, self.device = config, tokenizer, mesh, device
        self.output = Path(config.train.output_dir)
        self.saves = open_location(config.run_folder) / CHECKPOINTS
        self.batch_sizes = BatchSizeSchedule.from_config(config.train, mesh.dp.size)
        self.total_steps = self.batch_sizes.iterations(config.train)
        self.task = task or Task()
        self.data = self.task.build_data(self)
        self.notes: list[str] = list(self.data.notes)
        """What the report says first."""
        self.model = build_model(config, mesh, device)
        self.updates = Optimizer(self.model, config.optim, config.train.precision)
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
        self.replicas = None
        if config.runtime.check_weight_hash_across_dp_replicas_interval:
            self.replicas = ReplicaCheck(self.model.chunks, self.model.parameters, mesh)
        self.timers = PhaseTimers(device, config.log.timing_log_level)
        self.log: Callable[[str], None] = lambda text: None
        """Takes a line for the reader of the run's log."""
        self.step = 0  # updates made, skipped ones included
        self.consumed_samples = 0
        self.skipped = SkippedSteps()  # for fp16's overflows; schedules do not count them
        self.totals: dict[str, int | float] = {}  # running ones of the task, kept in checkpoints
        self.left_out: list[list[int]] = []  # ranges of the data's stream, after loss spikes
        self.base: str | None = (
            None  # with adapters: the fingerprint of the weights from init_from; on rank 0
        )
        self.data_files: dict[str, DataRecord] = {}  # of the training data, by prefix
        self.abandoned: list[
            list[int]
        ] = []  # ranges of save numbers in the output folder, of steps gone back from

    def train_step(
        self,
        batches: Iterator[Batch],
        before_update: Callable[[Tensor, Sequence[Batch]], None] = lambda loss, micro_batches: None,
    ) -> PendingStep:
        """Train one step on the mean loss over the global batch.

        `before_update` is called with the step's loss and micro-batches before the optimizer step; it may recompute the
        gradients.
        """
        batch_size = self.batch_sizes.size(self.consumed_samples)
        count = self.data.micro_batches(self.consumed_samples)
        with self.timers("batch-generator"):
            micro_batches = [next(batches) for _ in range(count)]
        interval = self.config.log.log_fp8_interval if self.config.train.fp8_format else 0
        counts = interval > 0 and (self.step + 1) % interval == 0
        for counter in self.counters.values():
            counter.begin_step(counts)
        with self.timers("forward-backward"):
            before_update(self.gradients(micro_batches), micro_batches)
        figures = self.task.step_metrics(self)
        if counts:
            of_task, of_fp8 = figures or dict, gather_counts(self.counters, self.mesh.world)
            figures = lambda: {**of_task(), **of_fp8}  # noqa: E731
        lr = self.schedule.learning_rate(*self.schedule_position)
        weight_decay = self.schedule.weight_decay(*self.schedule_position)
        decoupled = self.schedule.decoupled
        decoupled_lr = decoupled and decoupled.learning_rate(*self.schedule_position)
        log, squares = self.config.log, self.updates.gradient_squares
        is_logged = (self.step + 1) % log.log_interval == 0 or self.step + 1 == self.total_steps
        zeros = squares.count_zeros() if is_logged and log.log_num_zeros_in_grad else None
        with self.timers("optimizer"):
            result = self.updates.step(lr, weight_decay, decoupled_lr)
        work = self.data.work(self.consumed_samples, batch_size)
        self.step += 1
        self.consumed_samples += batch_size
        if self.config.train.precision == "fp16":
            self.skipped.add(result.skipped, batch_size)
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
            mtp_losses=self.model.mtp_losses,
            tallies=self.model.tallies,
            timers=self.timers,
            extra_metrics=figures,
            console_metrics=self.task.console_metrics,
            work=work,
        )

    @property
    def schedule_position(self) -> tuple[int, int]:
        """Steps and samples that moved the schedules of learning rate and weight decay on."""
        return self.step - self.skipped.steps, self.consumed_samples - self.skipped.samples

    def gradients(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Leaves the step's gradients, times the loss scale, in `.grad`; returns its loss."""
        self._seed_fused_dropout()
        return self.model.backward(micro_batches, self.task.loss, loss_scale=self.loss_scale.scale)

    def mean_loss(
        self,
        dataset: SampleDataset | None,
        before: Callable[[int], None] = lambda done: None,
        stops: Callable[[], str | None] = lambda: None,
    ) -> float | None:
        """The mean loss over the evaluation's tokens of `dataset`; None where there is nothing to evaluate.

        `before` is called ahead of each global batch with the number done, `stops` after it: what is true ends it.
        """
        total = self.config.train.eval_iters
        if dataset is None or total == 0:
            return None
        total = min(total, -(-len(dataset) // self.batch_sizes.global_batch_size))
        count = self.batch_sizes.global_batch_size // (self.config.train.micro_batch_size * self.mesh.dp.size)
        loss, tokens = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self.data.evaluation_loader(dataset, self.device) as batches:
            for done in range(total):
                before(done)
                more_loss, more_tokens = self.model.evaluate(
                    [next(batches) for _ in range(count)], self.task.evaluation_loss
                )
                loss, tokens = loss + more_loss, tokens + more_tokens
                if stops():
                    return None
        return (loss / tokens).item()

    def save(self) -> None:
        """Saves this moment, or begins to with `async_save`. A save that fails is logged, and training goes on.

        Raises CheckpointError after `checkpoint.max_failed_saves` failures in a row.
        """
        optimizer = self.optimizer if self.config.checkpoint.save_optim else None
        amaxes = amax_shards(self.model.amaxes, self.mesh.world)
        task_files = self.task.state_files(self)
        self.saver.save(self._record(), self.model.chunks, optimizer, amaxes, task_files)
        self.log_saves()

    def save_last(self, also_new: bool = True) -> Path | StorePath | None:
        """Leaves a checkpoint of this moment, which may be saved already, and returns its folder.

        Without `also_new` it waits for what is being saved, and returns the last folder, if there is one.
        Raises CheckpointError when it cannot be saved.
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
        """Logs how the saves went that have ended; with `wait`, also the one in flight."""
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

    def _record(self) -> RunRecord:
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
        """A GPU kernel's attention dropout is the one user of a random state: it is seeded by each step."""
        if self.device.type == "cuda" and self.config.model.attention_dropout:
            key = f"{self.config.train.seed}/attention dropout/{self.step}/{self.mesh.world.rank}".encode()
            torch.cuda.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))
