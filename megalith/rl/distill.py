"""Distillation (`megalith distill`): training on the predictions of a larger model.

The teacher is a second model in the run's layout and precision, frozen. The micro-batches of a step go through it
first, without its output matrix. The student's pass then computes the logits of both models chunk by chunk
(ops/distillation_loss.py), so that neither's full logits exist. Data are those of `megalith train` or `megalith sft`.

Alternatively, `megalith teacher-logits` stores the teacher's predictions for every sample (data/stored_logits.py).
The student then reads them in any layout, without a second model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megalith.comm.collectives import all_gather_replicated, gather_json
from megalith.config import RunConfig, require_run_config
from megalith.config.rl import DistillConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.data.loader import Loader
from megalith.data.stored_logits import LogitsRecord, StoredLogits, digests_of
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.launch.launcher import end_distributed, init_distributed, this_process
from megalith.models.loss import FusedHeadLoss, Loss
from megalith.ops.distillation_loss import (
    TeacherOutput,
    TeacherTargets,
    TopLogProbs,
    linear_distillation,
    linear_top_logprobs,
)
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.model_spec import LOSSES
from megalith.parallel.parallel_model import ParallelModel
from megalith.planner.counts import count_parameters
from megalith.planner.layout import with_auto
from megalith.rl.frozen_model import frozen_config, load_frozen
from megalith.rl.reference import StepData
from megalith.rl.summed_loss import SummedLoss
from megalith.training.build import prepare
from megalith.training.process import detect_machine, prepare_process
from megalith.training.run_datasets import Data
from megalith.training.run_state import Run, Task
from megalith.training.trainer import TrainingResult, train


def require_teacher(config: RunConfig) -> None:
    """Raise ConfigError if the run has neither a teacher nor stored predictions."""
    if config.distill.teacher_or_logits is None:
        raise ConfigError(
            "distill.teacher is not set; set it to a model's folder, or set distill.logits_dir to a folder of stored "
            "predictions"
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
    """Write the teacher's predictions for the run's samples to `distill.logits_dir`, resuming after those it has.

    Every process of the run calls it, in any layout. Raises ConfigError and DataError as `megalith.train` does.
    """
    distill = config.distill
    if distill.teacher is None or distill.logits_dir is None:
        raise ConfigError(
            f"distill.teacher is {distill.teacher} and distill.logits_dir {distill.logits_dir}, but storing "
            "predictions needs a teacher and a folder; set both"
        )
    process = this_process()
    config, tokenizer, _ = prepare(config, process.world_size)
    device = prepare_process(config, process.local_rank)
    init_distributed(device)
    try:
        config, _ = with_auto(config, process.world_size, detect_machine(config, device))
        experts = config.model.num_experts is not None
        mesh = build_mesh(config.parallel, process.world_size, device.type, has_experts=experts)
        write_logits(config, tokenizer, mesh, device)
    finally:
        end_distributed()


def write_logits(config: RunConfig, tokenizer: Tokenizer | None, mesh: Mesh, device: torch.device) -> None:
    """Store predictions like `store_logits`, in a process group that is already initialized."""
    sizes = BatchSizeSchedule.from_config(config.train, mesh.dp.size)
    steps = sizes.iterations(config.train)
    data, teacher = Data(config, sizes, steps, tokenizer, mesh.dp), Teacher(config, mesh, device)
    is_first = mesh.tp.rank == mesh.cp.rank == mesh.dp.rank == 0
    writes = is_first and mesh.pp.rank == mesh.pp.size - 1
    local = (
        StoredLogits.create(config.distill.logits_dir, _record(config)).samples if mesh.world.rank == 0 else 0
    )
    existing, total = gather_json(local, mesh.world)[0], sizes.samples_for_iterations(steps)
    step = next((step for step in range(steps + 1) if sizes.samples_for_iterations(step) >= existing), steps)
    consumed = sizes.samples_for_iterations(step)
    if existing < total and consumed != existing:
        raise ConfigError(
            f"distill.logits_dir {config.distill.logits_dir} has predictions of {existing:,} samples, which is inside "
            f"a step of this run (to {consumed:,}); use the train.global_batch_size that it was started with"
        )
    folder = StoredLogits(config.distill.logits_dir) if writes else None
    if writes and existing:
        print(f"predictions of {existing:,} of {total:,} samples are in {folder.folder}", flush=True)
    with data.train_loader(step, consumed, device) as batches:
        for number in range(step, steps):
            micro_batches = [next(batches) for _ in range(data.micro_batches(consumed))]
            consumed = sizes.samples_for_iterations(number + 1)
            predictions = teacher.predictions(micro_batches)
            gathered = [
                torch.cat([all_gather_replicated(x, mesh.dp) for x in each]) for each in zip(*predictions)
            ]
            if folder is not None:
                folder.append(*gathered)
                if (number + 1) % config.log.log_interval == 0 or number + 1 == steps:
                    print(f"predictions of {consumed:,} of {total:,} samples in {folder.folder}", flush=True)


def _record(config: RunConfig) -> LogitsRecord:
    """Return the description of this run's folder of predictions."""
    distill = config.distill
    return LogitsRecord(
        teacher=distill.teacher,
        vocab_size=config.model.vocab_size,
        seq_length=config.data.seq_length,
        top_k=min(distill.logits_top_k, config.model.vocab_size),
        temperature=distill.temperature,
    )


@dataclass
class DistillationBatch(Batch):
    """A micro-batch with the teacher's hidden states, or with its stored predictions. None on other pipeline stages."""

    teacher_hidden: Tensor | None = None  # float [..., hidden], the input of the teacher's output matrix
    indices: Tensor | None = None  # int32 [batch, seq, k]
    logprobs: Tensor | None = None  # float32 [batch, seq, k + 1]


class DistillationTask(Task):
    """Task of distillation: its data, loss and metrics."""

    restarts_in_process = False

    console_metrics = ("divergence",)

    def build_data(self, run: Run) -> DistillationData:
        stored = run.config.distill.logits_dir is not None
        teacher = StoredTeacher(run) if stored else Teacher(run.config, run.mesh, run.device)
        self.loss = DistillationLoss(run.config, teacher)
        return DistillationData(run, teacher)

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]]:
        sums = self.loss.reduce_sums(run.mesh, run.device)
        return lambda: self.loss.means(sums)


class Teacher:
    """The teacher as a model in memory."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device):
        self.run, self._distill = teacher_config(config), config.distill
        self._mesh, self._device = mesh, device
        self._model: ParallelModel | None = None  # loaded at the first use
        self._recorder = _HiddenRecorder()

    @property
    def note(self) -> str:
        count = count_parameters(self.run.model).total
        return f"the memory estimate excludes the teacher ({count:,} parameters, fp32)"

    def targets(self, batches: Sequence[Batch]) -> list[tuple]:
        """Return the teacher's hidden states of each micro-batch; None except on the last pipeline stage."""
        self._model = self._model or self._load()
        self._model.evaluate(batches, self._recorder)
        return [(end,) for end in self._recorder.take() or [None] * len(batches)]

    def predictions(self, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the top-k entries, their log-probabilities and digests of the samples per micro-batch, as they are
        stored.

        Empty except on the last pipeline stage.
        """
        self._model, recorder = self._model or self._load(), _TopKRecorder(self._distill)
        self._model.evaluate(batches, recorder)
        return [
            (*each, digests_of(batch).to(self._device)) for each, batch in zip(recorder.predictions, batches)
        ]

    @property
    def output(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's shard of the output matrix and its bias after the first pass; on the last stage."""
        return self._recorder.output

    @property
    def softcap(self) -> float | None:
        return self.run.model.final_logit_softcapping

    def _load(self) -> ParallelModel:
        return load_frozen(self.run, self._mesh, self._device)


class StoredTeacher:
    """The teacher as stored predictions."""

    def __init__(self, run: Run):
        config, self._stored = run.config, StoredLogits(run.config.distill.logits_dir)
        self._reads = run.mesh.pp.rank == run.mesh.pp.size - 1
        stored, record = self._stored.record, _record(config)
        for name, setting in (
            ("vocab_size", "the model's vocabulary"),
            ("seq_length", "data.seq_length"),
            ("temperature", "distill.temperature"),
        ):
            theirs, ours = getattr(stored, name), getattr(record, name)
            if theirs != ours:
                raise ConfigError(
                    f"distill.logits_dir {config.distill.logits_dir} was written with {name} {theirs}, but {setting} "
                    f"is {ours}; use the value of the predictions, or store others"
                )
        self.note = (
            f"predictions of {stored.teacher} for {self._stored.samples:,} samples: top {stored.top_k:,} entries per "
            "token, and the sum of the others"
        )

    def targets(self, batches: Sequence[Batch]) -> list[tuple]:
        """Return (None, top-k indices, log-probabilities) of each micro-batch; () except on the last stage."""
        return [(None, *self._stored.read(batch)) if self._reads else () for batch in batches]


def teacher_config(config: RunConfig) -> RunConfig:
    """Return the run configuration of the teacher, in the student's layout. Raise ConfigError if it is incompatible."""
    path = config.distill.teacher
    teacher = frozen_config(config, path, "distill.teacher")
    model, student = teacher.model, config.model
    if model.model_type != "gpt":
        raise ConfigError(
            f"distill.teacher {path} has model_type {model.model_type}, which does not predict next tokens as the "
            "student does; use a decoder-only teacher"
        )
    if (model.vocab_size, model.padded_vocab_size) != (student.vocab_size, student.padded_vocab_size):
        raise ConfigError(
            f"distill.teacher {path} has a vocabulary of {model.vocab_size} and the student one of "
            f"{student.vocab_size}, but their predictions are compared entry by entry; use a teacher with the same "
            "tokenizer"
        )
    max_positions = model.max_position_embeddings
    if model.learns_positions and max_positions < config.data.seq_length:
        raise ConfigError(
            f"distill.teacher {path} has {max_positions} learned positions, but data.seq_length is "
            f"{config.data.seq_length}; reduce data.seq_length to the teacher's"
        )
    return teacher


class _HiddenRecorder(Loss):
    """A Loss that only records: the final hidden states of each pass, in order, and one copy of the output layer."""

    def __init__(self) -> None:
        self.output: tuple[Tensor, Tensor | None] | None = None
        self._hidden: list[Tensor] = []

    def take(self) -> list[Tensor]:
        hidden, self._hidden = self._hidden, []
        return hidden

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def fused_head_loss(self, batch: Batch) -> FusedHeadLoss:
        return self._record

    def _record(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *_args, bias: Tensor | None = None, **_shard
    ) -> tuple[Tensor, None, Tensor]:
        self._hidden.append(hidden)
        if self.output is None:  # copied because a sharded matrix is freed after the pass
            self.output = tuple(
                x if x is None else x.detach().to(hidden.dtype, copy=True) for x in (weight, bias)
            )
        zeros = torch.zeros(labels.shape, device=labels.device)
        return zeros, None, zeros.sum()


class _TopKRecorder(Loss):
    """Records the top-k entries after each token of full micro-batches and their log-probabilities, in order."""

    def __init__(self, distill: DistillConfig) -> None:
        self._distill, self.predictions = distill, []

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def fused_head_loss(self, batch: Batch) -> FusedHeadLoss:
        return self._top_k

    def observe(self, logprobs: Tensor, indices: Tensor, batch: Batch) -> None:
        self.predictions.append((indices, logprobs))

    def _top_k(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens: Mapping[str, Tensor],
        vocab_size: int,
        softcap: float | None,
        scale: Tensor | None,
        **shard,
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, temperature = min(self._distill.logits_top_k, vocab_size), self._distill.temperature
        top_k = linear_top_logprobs(hidden, weight, k, vocab_size, softcap, temperature, **shard)
        return *top_k, torch.zeros((), device=hidden.device)


class DistillationLoss(SummedLoss):
    """(1 − α) · cross-entropy + α · T² · divergence per token, with the weights of the pre-training loss."""

    METRICS = ("tokens", "lm_loss", "divergence")

    def __init__(self, config: RunConfig, teacher: Teacher | StoredTeacher):
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
    """A run's data, in micro-batches with the teacher's outputs."""

    def __init__(self, run: Run, teacher: Teacher | StoredTeacher):
        super().__init__(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp)
        self._teacher = teacher
        self.notes.append(teacher.note)

    def evaluation_loader(self, dataset: SampleDataset, device: torch.device) -> Loader:
        """Load without the teacher: evaluation uses the cross-entropy."""
        return Data.evaluation_loader(self, dataset, device)

    def augment(self, batches: Sequence[Batch]) -> list[DistillationBatch]:
        outputs = self._teacher.targets(batches)
        names = [
            item.name for item in fields(DistillationBatch) if item.name not in Batch.__dataclass_fields__
        ]
        return [
            DistillationBatch(
                **{item.name: batch[item.name] for item in fields(Batch)}, **dict(zip(names, predictions))
            )
            for batch, predictions in zip(batches, outputs, strict=True)
        ]
