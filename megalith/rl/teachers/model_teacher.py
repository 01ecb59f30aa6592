"""Teachers in the run's layout: a frozen model in memory, or the run's own model without its adapters.

The teacher processes the micro-batches of a step first, without its output matrix. The student's pass then computes the
logits of both models chunk by chunk (ops/distillation_loss.py), so that neither's full logits exist. With distill.top_k
the teacher's most likely entries are computed at once instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.stored_logits import digests_of
from megalith.errors import ConfigError
from megalith.models.loss import FusedHeadLoss, Loss
from megalith.ops.distillation_loss import linear_top_logprobs
from megalith.parallel.mesh import Mesh
from megalith.parallel.parallel_model import ParallelModel
from megalith.planner.counts import count_parameters
from megalith.rl.auxiliary_models.frozen_model import frozen_config, load_frozen
from megalith.rl.auxiliary_models.reference import without_adapters
from megalith.rl.teachers.teacher import Prediction
from megalith.training.run_state import Run


class ModelTeacher:
    """A teacher in the run's layout. It predicts hidden states, or the top-k entries."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, path: str | None = None):
        """Check the model in the folder `path`, by default distill.teacher. It is loaded at the first use."""
        self.run, self._distill = teacher_config(config, path or config.distill.teachers[0]), config.distill
        self._mesh, self._device = mesh, device
        self._loaded: ParallelModel | None = None
        self._recorder = _HiddenRecorder()

    @property
    def note(self) -> str:
        count = count_parameters(self.run.model).total
        return f"the memory estimate excludes the teacher ({count:,} parameters, fp32)"

    def predict(self, batches: Sequence[Batch]) -> list[Prediction]:
        if self._distill.top_k is not None:
            top = self.top_entries(batches, min(self._distill.top_k, self.run.model.vocab_size))
            return [Prediction(None, *each) for each in top] or [Prediction()] * len(batches)
        with self._active() as model:
            model.evaluate(batches, self._recorder)
        return [Prediction(hidden) for hidden in self._recorder.take() or [None] * len(batches)]

    def top_entries(self, batches: Sequence[Batch], k: int) -> list[tuple[Tensor, Tensor]]:
        """Return, for each micro-batch, the k most likely entries, int64 [batch, seq, k], and log-probabilities,
        float32 [batch, seq, k + 1]. Empty except on the last pipeline stage.
        """
        recorder = _TopKRecorder(k, self._distill.temperature)
        with self._active() as model:
            model.evaluate(batches, recorder)
        return recorder.predictions

    def stored_predictions(self, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for each micro-batch the top entries, their log-probabilities and the samples' digests, as stored on
        disk.

        Empty except on the last pipeline stage.
        """
        top = self.top_entries(batches, min(self._distill.logits_top_k, self.run.model.vocab_size))
        return [(*each, digests_of(batch).to(self._device)) for each, batch in zip(top, batches)]

    @property
    def output(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's shards of the output matrix and its bias.

        Call it on the last stage, after the first forward pass.
        """
        return self._recorder.output

    @property
    def softcap(self) -> float | None:
        return self.run.model.final_logit_softcapping

    def _active(self) -> AbstractContextManager[ParallelModel]:
        """Return a context manager in which the model acts as the teacher. The first call loads it."""
        if self._loaded is None:
            self._loaded = load_frozen(self.run, self._mesh, self._device)
        return nullcontext(self._loaded)


class AdapterFreeTeacher(ModelTeacher):
    """The run's own model without its LoRA adapters, used as a teacher. It needs no additional memory."""

    note = "the teacher is the model without its adapters"

    def __init__(self, run: Run):
        self.run, self._distill, self._trained = run.config, run.config.distill, run
        self._mesh, self._device, self._recorder = run.mesh, run.device, _HiddenRecorder()

    def _active(self) -> AbstractContextManager[ParallelModel]:
        return without_adapters(self._trained)


def teacher_config(config: RunConfig, path: str, setting: str = "distill.teacher") -> RunConfig:
    """Return the run configuration of the teacher in `path`, in the student's layout. Raise ConfigError if it is
    incompatible."""
    teacher = frozen_config(config, path, setting)
    model, student = teacher.model, config.model
    if model.model_type != "gpt":
        raise ConfigError(
            f"{setting} {path} has model_type {model.model_type}, but the student predicts next "
            "tokens; use a decoder-only teacher"
        )
    if (model.vocab_size, model.padded_vocab_size) != (student.vocab_size, student.padded_vocab_size):
        raise ConfigError(
            f"{setting} {path} has a vocabulary of {model.vocab_size} and the student one of "
            f"{student.vocab_size}, but their predictions are compared entry by entry; use a teacher with the same "
            "tokenizer"
        )
    max_positions = model.max_position_embeddings
    if model.learns_positions and max_positions < config.data.seq_length:
        raise ConfigError(
            f"{setting} {path} has {max_positions} learned positions, but data.seq_length is "
            f"{config.data.seq_length}; reduce data.seq_length to the teacher's"
        )
    return teacher


class _Recorder(Loss):
    """Base of losses that only record the outputs of a forward pass."""

    def weights(self, batch: Batch) -> Tensor:
        return batch.loss_mask

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def fused_head_loss(self, batch: Batch) -> FusedHeadLoss:
        return self._record

    _record: Callable


class _HiddenRecorder(_Recorder):
    """Records the final hidden states of each forward pass, in order, and one copy of the output layer."""

    def __init__(self) -> None:
        self.output: tuple[Tensor, Tensor | None] | None = None
        self._hidden: list[Tensor] = []

    def take(self) -> list[Tensor]:
        hidden, self._hidden = self._hidden, []
        return hidden

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


class _TopKRecorder(_Recorder):
    """Records the top-k entries and their log-probabilities after each token of full micro-batches, in order."""

    def __init__(self, k: int, temperature: float) -> None:
        self._k, self._temperature = k, temperature
        self.predictions: list[tuple[Tensor, Tensor]] = []

    def observe(self, logprobs: Tensor, indices: Tensor, batch: Batch) -> None:
        self.predictions.append((indices, logprobs))

    def _record(
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
        top_k = linear_top_logprobs(
            hidden, weight, min(self._k, vocab_size), vocab_size, softcap, self._temperature, **shard
        )
        return *top_k, torch.zeros((), device=hidden.device)
