"""Distillation (`megalith distill`): trains on the predictions of one or several larger models.

The data are the same as for `megalith train` or `megalith sft`. In a fraction of the samples, answers sampled from the
student replace the answers in the data (on_policy.py). Before each step, the teacher processes the step's micro-batches
(teachers/). The student's pass then computes the divergence chunk by chunk (ops/distillation_loss.py).

`megalith teacher-logits` stores the predictions of a teacher for every sample (data/stored_logits.py). The student then
reads them in any layout, without a second model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megalith.comm.collectives import all_gather_replicated, gather_json
from megalith.config import RunConfig, require_run_config
from megalith.config.distillation import WITHOUT_ADAPTERS, is_served
from megalith.config.train import BatchSizeSchedule
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.data.loader import Loader
from megalith.data.stored_logits import StoredLogits
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.launch.launcher import end_distributed, init_distributed, this_process
from megalith.models.loss import FusedHeadLoss
from megalith.ops.distillation_loss import (
    TeacherOutput,
    TeacherTargets,
    TopLogProbs,
    linear_distillation,
)
from megalith.parallel.mesh import Mesh
from megalith.parallel.model_spec import LOSSES
from megalith.planner.memory_choices import with_auto
from megalith.report.report import TokenCounts
from megalith.rl.auxiliary_models.reference import StepData
from megalith.rl.objectives.summed_loss import SummedLoss
from megalith.rl.sampling.on_policy import StudentSamples
from megalith.rl.teachers.model_teacher import AdapterFreeTeacher, ModelTeacher
from megalith.rl.teachers.served_teacher import ServedTeacher
from megalith.rl.teachers.several_teachers import SeveralTeachers
from megalith.rl.teachers.stored_teacher import StoredTeacher, logits_record
from megalith.rl.teachers.teacher import Teacher
from megalith.training.build import build_run_mesh, prepare
from megalith.training.process import detect_machine, prepare_process
from megalith.training.run_datasets import Data
from megalith.training.run_state import Run, Task
from megalith.training.trainer import TrainingResult
from megalith.training.training_job import train


def require_teacher(config: RunConfig) -> None:
    """Raise ConfigError if the run has neither a teacher nor stored predictions."""
    if config.distill.teacher_or_logits is None:
        raise ConfigError(
            "distill.teacher is not set; set distill.teacher to a model's folder, or distill.logits_dir to a folder "
            "of stored predictions"
        )


def train_distilled(config: RunConfig) -> TrainingResult:
    """Train on a teacher's predictions.

    Args:
        config: run configuration with `distill.teacher` or `distill.logits_dir`.

    Returns:
        The result, as for `megalith.train`.

    Raises:
        ConfigError: if there is no teacher; other errors as for `megalith.train`.
    """
    require_run_config(config, "train_distilled")
    require_teacher(config)
    return train(config, DistillationTask())


def store_logits(config: RunConfig) -> None:
    """Write the teacher's predictions for the run's samples to `distill.logits_dir`. Samples already in it are skipped.

    Collective over all processes of the run, in any layout. Raises ConfigError and DataError in the same cases as
    `megalith.train`.
    """
    distill = config.distill
    if distill.teacher is None or distill.logits_dir is None:
        raise ConfigError(
            f"distill.teacher is {distill.teacher} and distill.logits_dir {distill.logits_dir}, but storing "
            "predictions needs a teacher and a folder; set both settings"
        )
    process = this_process()
    config, tokenizer, _ = prepare(config, process.world_size)
    device = prepare_process(config, process.local_rank)
    init_distributed(device)
    try:
        config, _ = with_auto(config, process.world_size, detect_machine(config, device))
        mesh = build_run_mesh(config, process.world_size, device.type)
        write_logits(config, tokenizer, mesh, device)
    finally:
        end_distributed()


def write_logits(config: RunConfig, tokenizer: Tokenizer | None, mesh: Mesh, device: torch.device) -> None:
    """Store predictions like `store_logits`, in a process group that is already initialized."""
    sizes = BatchSizeSchedule.from_config(config.train, mesh.dp.size)
    steps = sizes.iterations(config.train)
    data, teacher = Data(config, sizes, steps, tokenizer, mesh.dp), ModelTeacher(config, mesh, device)
    is_first = mesh.tp.rank == mesh.cp.rank == mesh.dp.rank == 0
    writes = is_first and mesh.pp.rank == mesh.pp.size - 1
    local = (
        StoredLogits.create(config.distill.logits_dir, logits_record(config)).samples
        if mesh.world.rank == 0
        else 0
    )
    existing, total = gather_json(local, mesh.world)[0], sizes.samples_for_iterations(steps)
    step = next((step for step in range(steps + 1) if sizes.samples_for_iterations(step) >= existing), steps)
    consumed = sizes.samples_for_iterations(step)
    if existing < total and consumed != existing:
        raise ConfigError(
            f"distill.logits_dir {config.distill.logits_dir} has predictions of {existing:,} samples, but no step of "
            f"this run ends at that sample (the next one ends at {consumed:,}); use the train.global_batch_size that "
            "the folder was started with"
        )
    folder = StoredLogits(config.distill.logits_dir) if writes else None
    if writes and existing:
        print(f"predictions of {existing:,} of {total:,} samples are in {folder.folder}", flush=True)
    with data.train_loader(step, consumed, device) as batches:
        for number in range(step, steps):
            micro_batches = [next(batches) for _ in range(data.micro_batches(consumed))]
            consumed = sizes.samples_for_iterations(number + 1)
            predictions = teacher.stored_predictions(micro_batches)
            gathered = [
                torch.cat([all_gather_replicated(x, mesh.dp) for x in each]) for each in zip(*predictions)
            ]
            if folder is not None:
                folder.append(*gathered)
                if (number + 1) % config.log.log_interval == 0 or number + 1 == steps:
                    print(f"predictions of {consumed:,} of {total:,} samples in {folder.folder}", flush=True)


@dataclass
class DistillationBatch(Batch):
    """A micro-batch with the teacher's hidden states or stored predictions. Only the last pipeline stage has these."""

    teacher_hidden: Tensor | None = None  # float [..., hidden], the input of the teacher's output matrix
    indices: Tensor | None = None  # int32 [batch, seq, k]
    logprobs: Tensor | None = None  # float32 [batch, seq, k + 1]


class DistillationTask(Task):
    """Distillation task: provides the data, the loss and the metrics."""

    restarts_in_process = False

    console_metrics = ("divergence",)

    def build_data(self, run: Run) -> DistillationData:
        teacher = open_teacher(run)
        self.loss = DistillationLoss(run.config, teacher)
        return DistillationData(run, teacher)

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]]:
        sums, sampling = self.loss.reduce_sums(run.mesh, run.device), run.data.sampling_metrics()
        return lambda: {**self.loss.means(sums), **sampling}


def open_teacher(run: Run) -> Teacher:
    """Return the run's teacher, or an object that combines several. Raise ConfigError if one is unusable."""
    distill = run.config.distill
    if distill.logits_dir is not None:
        return StoredTeacher(run)
    teachers = [_open_one(run, name) for name in distill.teachers]
    return SeveralTeachers(run, teachers) if distill.teacher_data else teachers[0]


def _open_one(run: Run, name: str) -> Teacher:
    distill = run.config.distill
    if name == WITHOUT_ADAPTERS:
        return AdapterFreeTeacher(run)
    if is_served(name):
        return ServedTeacher(run, name, distill.teacher_engine, distill.teacher_timeout, "distill.teacher")
    return ModelTeacher(run.config, run.mesh, run.device, name)


class DistillationLoss(SummedLoss):
    """(1 − α) · cross-entropy + α · T² · divergence per token. Tokens have the same weights as in pre-training."""

    METRICS = ("tokens", "lm_loss", "divergence")

    def __init__(self, config: RunConfig, teacher: Teacher):
        self.distill, self._teacher = config.distill, teacher
        self._cross_entropy = LOSSES["gpt", config.train.calculate_per_token_loss]()

    def denominator(self, batch: Batch) -> Tensor | float:
        return self._cross_entropy.denominator(batch)

    def weights(self, batch: Batch) -> Tensor:
        return self._cross_entropy.weights(batch)

    def tokens(self, batch: DistillationBatch) -> dict[str, Tensor]:
        tokens = {"weights": self.weights(batch), "indices": batch.indices, "logprobs": batch.logprobs}
        return {name: tensor for name, tensor in tokens.items() if tensor is not None}

    def fused_head_loss(self, batch: DistillationBatch) -> FusedHeadLoss:
        def loss(
            hidden: Tensor,
            weight: Tensor,
            labels: Tensor,
            tokens: Mapping[str, Tensor],
            vocab_size: int,
            softcap: float | None,
            scale: Tensor | None,
            **shard,
        ) -> tuple[Tensor, Tensor, Tensor]:
            distill = self.distill
            if batch.indices is not None:
                indices = tokens["indices"].long() - shard.get("first", 0)
                teacher = TopLogProbs(indices, tokens["logprobs"])
            else:
                teacher = TeacherOutput(batch.teacher_hidden, *self._teacher.output, self._teacher.softcap)
            settings = (distill.kd_ratio, distill.temperature, distill.divergence, distill.mixture)
            target = TeacherTargets(teacher, *settings)
            arguments = (tokens["weights"], target, vocab_size, softcap, scale)
            total, logprobs, divergences = linear_distillation(hidden, weight, labels, *arguments, **shard)
            return logprobs, divergences, total

        return loss

    def observe(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> None:
        mask = batch.loss_mask
        self.add_metrics([mask, -logprobs * mask, entropy * mask])


class DistillationData(StepData):
    """Loads a run's data and adds the teacher's outputs to each micro-batch."""

    def __init__(self, run: Run, teacher: Teacher):
        super().__init__(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp)
        self._teacher = teacher
        self._samples = StudentSamples(run) if run.config.distill.on_policy_fraction else None
        self.notes.append(teacher.note)

    def evaluation_loader(self, dataset: SampleDataset, device: torch.device) -> Loader:
        """Return a loader whose batches lack the teacher's outputs: evaluation uses the cross-entropy."""
        return Data.evaluation_loader(self, dataset, device)

    def augment(self, batches: Sequence[Batch]) -> list[DistillationBatch]:
        if self._samples is not None:
            batches = self._samples.replace(batches)
        return [
            DistillationBatch(
                **{item.name: batch[item.name] for item in fields(Batch)},
                teacher_hidden=prediction.teacher_hidden,
                indices=prediction.indices,
                logprobs=prediction.logprobs,
            )
            for batch, prediction in zip(batches, self._teacher.predict(batches), strict=True)
        ]

    def work(self, consumed_samples: int, batch_size: int) -> TokenCounts | None:
        """Return the token counts of the current step, including the student's sampled answers."""
        if self._samples is not None and self._samples.work is not None:
            return self._samples.work
        return super().work(consumed_samples, batch_size)

    def sampling_metrics(self) -> dict[str, float]:
        """Return the sampling metrics of the current step, empty if the student does not sample."""
        return {} if self._samples is None else dict(self._samples.metrics)
