"""`megalith distill`: a run that learns from a larger model's predictions, by the trainer's own loop.

The teacher is a second model in the run's layout, frozen and in the run's precision. A step's micro-batches go through
it first, without its output matrix; the student's pass then makes both models' logits chunk by chunk
(ops/distillation_loss.py), so that neither's exist whole. Data are those of `megalith train`, or of `megalith sft`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.load import begin_from, with_init_from
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.data.loader import Loader
from megalith.errors import ConfigError, DataError
from megalith.models.loss import Loss, OutputLoss
from megalith.ops.distillation_loss import Taught, linear_distillation
from megalith.parallel.mesh import Mesh
from megalith.parallel.parallel_model import LOSSES, ParallelModel
from megalith.planner.counts import count_parameters
from megalith.rl.objective import SummedLoss
from megalith.rl.reference import StepData
from megalith.training.build import Data, build_model, complete, vocabulary_rows
from megalith.training.run_state import Run, Task
from megalith.training.trainer import TrainingResult, train

STUDENTS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
            "recompute_saves_attention", "distribute_saved_activations", "cpu_offloading_num_layers",
            "tp_comm_overlap", "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split", "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers")  # fmt: skip
"""Settings of section parallel that are about a backward pass, or the student's own layers."""


def train_distilled(config: RunConfig) -> TrainingResult:
    """Trains on a teacher's predictions, as `megalith.train` does on a dataset's tokens; raises as it does."""
    if config.distill.teacher is None:
        raise ConfigError(
            "distill.teacher is not set, so there is nobody to learn from; name a model's folder"
        )
    return train(config, DistillationTask())


@dataclass
class TaughtBatch(Batch):
    """A micro-batch with the end of the teacher's pass over this rank's tokens, as its output matrix reads it; None
    where that is another pipeline stage."""

    told: Tensor | None = None


class DistillationTask(Task):
    """What the trainer's loop needs to know of distillation."""

    shown = ("divergence",)

    def begin(self, run: Run) -> TaughtData:
        teacher = Teacher(run.config, run.mesh, run.device)
        self.loss = DistillationLoss(run.config, teacher)
        return TaughtData(run, teacher)

    def figures(self, run: Run) -> Callable[[], dict[str, Any]]:
        sums = self.loss.take_all_sums(run.mesh, run.device)
        return lambda: self.loss.means(sums)


class Teacher:
    """The model that is learned from."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device):
        self.run = teacher_config(config)
        self._mesh, self._device = mesh, device
        self._model: ParallelModel | None = None  # until it is first asked
        self.asked = _Ends()

    def told(self, batches: Sequence[Batch]) -> list[Tensor | None]:
        """Of each micro-batch what the output matrix reads; None off the last pipeline stage."""
        self._model = self._model or self._load()
        self._model.evaluate(batches, self.asked)
        return self.asked.take() or [None] * len(batches)

    @property
    def output(self) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of its output matrix and of the bias behind it, once it was asked; the last stage's."""
        return self.asked.output

    @property
    def softcap(self) -> float | None:
        return self.run.model.final_logit_softcapping

    def _load(self) -> ParallelModel:
        run, model = self.run, build_model(self.run, self._mesh, self._device)
        rows = vocabulary_rows(run)
        begin_from(
            run.model.init_from, model.chunks, rows, run.train.seed, self._mesh.world, run.checkpoint.trust
        )
        return model


def teacher_config(config: RunConfig) -> RunConfig:
    """The run of the teacher: its weights in the layout of the student. Raises ConfigError where they cannot be."""
    path, given = config.distill.teacher, config.parallel
    parallel = {name: getattr(given, name) for name in given.model_fields_set - set(STUDENTS)}
    tree = {
        "model": {
            "init_from": path,
            "make_vocab_size_divisible_by": config.model.make_vocab_size_divisible_by,
        },
        "parallel": parallel,
        "data": {"seq_length": config.data.seq_length},
        "train": {
            name: getattr(config.train, name)
            for name in ("micro_batch_size", "global_batch_size", "precision", "seed")
        },
        "checkpoint": {"trust": config.checkpoint.trust},
        "runtime": {"compile": config.runtime.compile, "device": config.runtime.device},
    }
    try:
        found = complete(with_init_from(RunConfig.from_tree(tree)), None)
    except (ConfigError, DataError) as error:
        raise ConfigError(f"distill.teacher {path}: {error}") from error
    model, student = found.model, config.model
    if model.model_type != "gpt":
        raise ConfigError(
            f"distill.teacher {path} has model_type {model.model_type}, which does not predict the next token from "
            "those before it, as the student does; take a teacher that continues a text"
        )
    if (model.vocab_size, model.padded_vocab_size) != (student.vocab_size, student.padded_vocab_size):
        raise ConfigError(
            f"distill.teacher {path} has a vocabulary of {model.vocab_size} and the student one of "
            f"{student.vocab_size}, but their predictions are compared entry by entry; take a teacher of the same "
            "tokenizer"
        )
    longest = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and longest < config.data.seq_length:
        raise ConfigError(
            f"distill.teacher {path} has {longest} learned positions, but data.seq_length is "
            f"{config.data.seq_length}; shorten the sequences to the teacher's"
        )
    return found


class _Ends(Loss):
    """Keeps what the output matrix reads in each pass, in order, and that matrix with its bias."""

    def __init__(self) -> None:
        self.output: tuple[Tensor, Tensor | None] | None = None
        self._ends: list[Tensor] = []

    def take(self) -> list[Tensor]:
        ends, self._ends = self._ends, []
        return ends

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def by_output(self, batch: Batch) -> OutputLoss:
        return self._keep

    def _keep(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *_args, bias: Tensor | None = None, **_shard
    ) -> tuple[Tensor, None, Tensor]:
        self._ends.append(hidden)
        if self.output is None:  # a sharded one is gone after the pass
            self.output = tuple(
                x if x is None else x.detach().to(hidden.dtype, copy=True) for x in (weight, bias)
            )
        nothing = torch.zeros(labels.shape, device=labels.device)
        return nothing, None, nothing.sum()


class DistillationLoss(SummedLoss):
    """(1 − α) · cross-entropy + α · T² · divergence of each token, with the weights of pre-training's loss."""

    FIGURES = ("tokens", "lm_loss", "divergence")

    def __init__(self, config: RunConfig, teacher: Teacher):
        self.distill, self._teacher = config.distill, teacher
        self._plain = LOSSES["gpt", config.train.calculate_per_token_loss]()

    def denominator(self, batch: Batch) -> Tensor | float:
        return self._plain.denominator(batch)

    def weights(self, batch: Batch) -> Tensor:
        return self._plain.weights(batch)

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {"weights": self.weights(batch)}

    def by_output(self, batch: TaughtBatch) -> OutputLoss:
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
            told, how = (batch.told, *self._teacher.output, self._teacher.softcap), self.distill
            taught = Taught(*told, how.kd_ratio, how.temperature, how.divergence)
            given = (tokens["weights"], taught, vocab_size, softcap, scale)
            total, logprobs, divergences = linear_distillation(hidden, weight, labels, *given, **shard)
            return logprobs, divergences, total

        return loss

    def observe(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> None:
        mask = batch.loss_mask
        self.add_figures([mask, -logprobs * mask, entropy * mask])


class TaughtData(StepData):
    """A run's data, in micro-batches with the end of the teacher's pass."""

    def __init__(self, run: Run, teacher: Teacher):
        super().__init__(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp)
        self._teacher = teacher
        count = count_parameters(teacher.run.model).total
        self.notes.append(
            f"the teacher's {count:,} parameters, in fp32, are on the devices too, not in the memory expected"
        )

    def evaluation_loader(self, dataset: SampleDataset, device: torch.device) -> Loader:
        """Without the teacher: what is evaluated is the cross-entropy."""
        return Data.evaluation_loader(self, dataset, device)

    def completed(self, batches: Sequence[Batch]) -> list[TaughtBatch]:
        told = self._teacher.told(batches)
        return [
            TaughtBatch(*(getattr(batch, field.name) for field in fields(Batch)), x)
            for batch, x in zip(batches, told, strict=True)
        ]
