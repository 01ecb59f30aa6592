"""Training on preferences with DPO (`megalith dpo`).

Data are chat data whose samples are pairs. Batch sizes count pairs of rows. A pair has a row of chosen and a row of
rejected answers and is never split across micro-batches or ranks. Log-probabilities of the reference model are computed
for all micro-batches of a step at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megalith.comm.collectives import all_reduce_no_grad, gather_json
from megalith.config import RunConfig, require_run_config
from megalith.errors import ConfigError, DataError
from megalith.rl.auxiliary_models.reference import LogProbs, StepData
from megalith.rl.auxiliary_models.synced_reference import ReferenceTask
from megalith.rl.objectives.answer_batch import answer_fields
from megalith.rl.objectives.preference_loss import (
    SHARP,
    PreferenceBatch,
    PreferenceLoss,
    answer_pairs,
    chosen_counts,
    rank_values,
)
from megalith.rl.objectives.summed_loss_task import SummedLossTask
from megalith.rl.preference_losses.ranked_losses import match_ranks
from megalith.training.run_state import Run
from megalith.training.trainer import TrainingResult
from megalith.training.training_job import train

LIKELIHOOD = ("cpo", "orpo", "sft")
"""Losses that include the likelihood of the chosen answers, averaged over the tokens of the step."""


def train_dpo(config: RunConfig) -> TrainingResult:
    """Train on pairs of a chosen and a rejected answer.

    Args:
        config: run configuration with `dpo.enabled` set.

    Returns:
        The result, as for `megalith.train`.

    Raises:
        ConfigError: if `dpo.enabled` is off. Other errors are the same as for `megalith.train`.
    """
    require_run_config(config, "train_dpo")
    if not config.dpo.enabled:
        raise ConfigError(
            "dpo.enabled is false, so there are no preferences to train on; set dpo.enabled to true"
        )
    return train(config, PreferenceTask())


class PreferenceTask(SummedLossTask, ReferenceTask):
    """DPO task: provides the data, the loss and the metrics."""

    restarts_in_process = False

    console_metrics = ("rewards/accuracies", "rewards/margins")
    loss_name = "preference loss"

    def build_data(self, run: Run) -> PreferenceData:
        self.loss, self.evaluation_loss = (PreferenceLoss(run.config.dpo) for _ in range(2))
        dpo = run.config.dpo
        return PreferenceData(run, self.open_reference(run, dpo) if dpo.needs_reference else None)


def make_preference_batch(rows: np.ndarray, sample_numbers: np.ndarray) -> PreferenceBatch:
    """Collate pairs from ChatDataset, int64 [batch, 2, lines, seq], into 2 · batch rows (`answer_fields`)."""
    return PreferenceBatch(**answer_fields(rows, sample_numbers))


class PreferenceData(StepData):
    """Loads a run's preference pairs and adds the reference model's log-probabilities to each micro-batch."""

    make_chat_batch = staticmethod(make_preference_batch)

    def __init__(self, run: Run, reference: LogProbs | None):
        super().__init__(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp)
        self._run, self._reference = run, reference
        self._needs_nll, self._device = not run.config.dpo.losses.keys().isdisjoint(LIKELIHOOD), run.device
        model = run.config.model
        dropout = {name for name in ("hidden_dropout", "attention_dropout") if getattr(model, name)}
        if dropout and self._reference is not None:
            self.notes.append(
                f"model.{' and model.'.join(sorted(dropout))} adds noise to the policy's log-probabilities but not "
                "to the reference's; TRL turns dropout off for preference training"
            )

    def augment(self, batches: Sequence[PreferenceBatch]) -> list[PreferenceBatch]:
        if self._needs_nll:
            ratio = self._pairs_per_token(batches)
            batches = [replace(batch, pairs_per_token=ratio) for batch in batches]
        if self._run.config.dpo.use_weighting:
            sharp = self._run.model.all_logprobs(batches, SHARP)
            batches = [replace(batch, sharp_logprobs=x) for batch, x in zip(batches, sharp, strict=True)]
        if self._reference is None:
            return list(batches)
        logprobs = self._reference(batches)
        batches = [replace(batch, reference_logprobs=x) for batch, x in zip(batches, logprobs, strict=True)]
        return self._with_partners(batches) if self._run.config.dpo.sorts_pairs else batches

    def _with_partners(self, batches: Sequence[PreferenceBatch]) -> list[PreferenceBatch]:
        """Return the micro-batches with the values of equal rank in the step that `match_ranks` returns. Takes a
        forward pass of the policy.
        """
        if any(batch.values is not None for batch in batches):
            raise DataError(
                f"dpo.loss_type {self._run.config.dpo.loss_type} compares pairs by rank, so pairs cannot be weighted; "
                "remove the key weight from the records, or choose another loss"
            )
        local, present = [], []  # a row per pair: position in the step's stream, and its values
        for batch, logprobs in zip(batches, self._run.model.all_logprobs(batches), strict=True):
            batch = batch.to(self._device)
            is_pair = batch.sequence_tokens[::2] > 0
            rows = batch.sample_numbers[::2]
            positions = [
                rows.repeat_interleave(len(is_pair) // len(rows)),
                torch.arange(len(is_pair)).to(rows),
            ]
            values = rank_values(answer_pairs(batch, logprobs))
            local += torch.cat([torch.stack(positions), values.double()]).T[is_pair].tolist()
            present.append(is_pair)
        step = sorted(pair for part in gather_json(local, self._dp) for pair in part)
        values = torch.tensor([pair[2:] for pair in step], device=self._device).T
        partners = dict(zip((tuple(pair[:2]) for pair in step), match_ranks(*values).T))
        matched = iter([partners[tuple(pair[:2])] for pair in local])
        results = []
        for batch, is_pair in zip(batches, present):
            every = torch.zeros(3, len(is_pair), device=self._device)
            for number in is_pair.nonzero().flatten().tolist():
                every[:, number] = next(matched)
            results.append(replace(batch, partners=every))
        return results

    def _pairs_per_token(self, batches: Sequence[PreferenceBatch]) -> Tensor:
        """Return the number of pairs in a step divided by the number of tokens in their chosen answers, a float32
        scalar.
        """
        counts = torch.stack([chosen_counts(batch) for batch in batches]).sum(0)
        pairs, tokens = all_reduce_no_grad(counts.to(self._device), self._dp)
        return (pairs / tokens.clamp(min=1)).float()
