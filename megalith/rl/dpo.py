"""`megalith dpo`: a run that is trained on preferences, by the trainer's own loop.

Data are chat data whose samples are pairs: a unit of the batch sizes is two rows, one of chosen answers and one of the
rejected ones, which no micro-batch and no rank takes apart. The reference's log-probabilities are made a step at a
time, for all of its micro-batches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from megalith.config import RunConfig, require_run_config
from megalith.data.batch import Batch
from megalith.data.chat.chat_dataset import make_chat_batch
from megalith.errors import ConfigError
from megalith.rl.preference_loss import PreferenceBatch, PreferenceLoss
from megalith.rl.reference import StepData, reference_logprobs
from megalith.training.run_state import Run, Task
from megalith.training.trainer import TrainingResult, train


def train_dpo(config: RunConfig) -> TrainingResult:
    """Trains on pairs of a chosen and a rejected answer, as `megalith.train` does on a dataset; raises as it does."""
    require_run_config(config, "train_dpo")
    if not config.dpo.enabled:
        raise ConfigError("dpo.enabled is off, so there are no preferences to train on; turn it on")
    return train(config, PreferenceTask())


class PreferenceTask(Task):
    """What the trainer's loop needs to know of DPO."""

    console_metrics = ("rewards/accuracies", "rewards/margins")

    def build_data(self, run: Run) -> PreferenceData:
        self.loss, self.evaluation_loss = (PreferenceLoss(run.config.dpo) for _ in range(2))
        return PreferenceData(run)

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]]:
        sums = self.loss.take_all_sums(run.mesh, run.device)
        return lambda: self.loss.means(sums)

    def evaluation_metrics(self, run: Run) -> dict[str, float]:
        return self.evaluation_loss.means(self.evaluation_loss.take_all_sums(run.mesh, run.device))


def make_preference_batch(rows: np.ndarray, sample_numbers: np.ndarray) -> PreferenceBatch:
    """A PreferenceBatch of int64 rows [batch, 2, 4, seq] (ChatDataset) and their places in the stream, int64 [batch].

    It has 2 · batch rows of tokens, and as many sequences for each unit as the one with the most has.
    """
    batch, each, _, seq = rows.shape
    flat: Batch = make_chat_batch(
        rows.reshape(batch * each, 4, seq), (sample_numbers[:, None] * each + np.arange(each)).reshape(-1)
    )
    documents = rows[:, :, 3]  # [batch, 2, seq]
    most = int(documents.max()) + 1
    pairs = np.arange(batch)[:, None, None] * most + documents
    numbers = torch.from_numpy((pairs * each + np.arange(each)[:, None]).reshape(batch * each, seq))
    tokens = torch.zeros(batch * most * each)
    tokens.index_add_(0, numbers.flatten(), flat.loss_mask.flatten())
    inherited = {item.name: flat[item.name] for item in fields(Batch)}
    return PreferenceBatch(**inherited, numbers=numbers, sequence_tokens=tokens)


class PreferenceData(StepData):
    """A run's pairs, in micro-batches with the reference's log-probabilities."""

    make_chat_batch = staticmethod(make_preference_batch)

    def __init__(self, run: Run):
        super().__init__(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp)
        self._reference = reference_logprobs(run)
        model = run.config.model
        if dropout := {name for name in ("hidden_dropout", "attention_dropout") if getattr(model, name)}:
            self.notes.append(
                f"model.{' and model.'.join(sorted(dropout))} blur the policy's log-probabilities, and not the "
                "reference's, which is without dropout; TRL turns dropout off for preferences"
            )

    def completed(self, batches: Sequence[PreferenceBatch]) -> list[PreferenceBatch]:
        found = self._reference(batches)
        return [replace(batch, reference_logprobs=x) for batch, x in zip(batches, found, strict=True)]
