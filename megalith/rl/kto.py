"""Training on answers that are marked as desirable or undesirable (`megalith kto`; Ethayarajh et al. 2024).

An answer's log-ratio to the reference, r, is compared with a baseline z:

    loss = desirable_weight · (1 − σ(β · (r − z)))       of a desirable answer
           undesirable_weight · (1 − σ(β · (z − r)))     of an undesirable one

With kto, z estimates the KL divergence from the reference: the mean log-ratio of mismatched answers, each prompt with
an answer of another record, over the whole step, and at least 0. It has no gradient. With apo_zero_unpaired, z is 0.

With bco (Jung et al. 2024) the loss is −log σ(±β · (r − z)), and z is the mean of r over all answers of the run so far,
including the current step, without gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import RunConfig, require_run_config
from megalith.config.preferences import KtoConfig
from megalith.errors import ConfigError
from megalith.rl.auxiliary_models.reference import LogProbs, StepData
from megalith.rl.auxiliary_models.synced_reference import ReferenceTask
from megalith.rl.objectives.answer_batch import AnswerBatch, answer_fields
from megalith.rl.objectives.sequences import Sequences
from megalith.rl.objectives.summed_loss import SummedLoss
from megalith.rl.objectives.summed_loss_task import SummedLossTask
from megalith.training.run_state import Run
from megalith.training.trainer import TrainingResult
from megalith.training.training_job import train

SHIFT_SUM, SHIFT_COUNT = "bco_log_ratios", "bco_answers"  # counters of a checkpoint


def train_kto(config: RunConfig) -> TrainingResult:
    """Train on answers that are marked as desirable or undesirable.

    Args:
        config: run configuration with `kto.enabled` set.

    Returns:
        The result, as for `megalith.train`.

    Raises:
        ConfigError: if `kto.enabled` is off. Other errors are the same as for `megalith.train`.
    """
    require_run_config(config, "train_kto")
    if not config.kto.enabled:
        raise ConfigError(
            "kto.enabled is false, so there are no marked answers to train on; set kto.enabled to true"
        )
    return train(config, KtoTask())


@dataclass
class KtoBatch(AnswerBatch):
    """A micro-batch of answers. `values` are their labels: 1 for desirable ones, 0 for undesirable ones."""

    reference_logprobs: Tensor | None = None  # float32 [batch, seq]
    baseline: Tensor | None = None  # float32 scalar, z; None: 0


class KtoLoss(SummedLoss):
    """Mean loss of the step's answers with the settings of section `kto`."""

    METRICS = (
        "answers", "desirable", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl"
    )  # fmt: skip

    def __init__(self, kto: KtoConfig):
        self.kto = kto

    def denominator(self, batch: KtoBatch) -> Tensor:
        return (batch.sequence_tokens > 0).sum().double()

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: KtoBatch) -> Tensor:
        kto, sequences = self.kto, Sequences.from_batch(batch)
        present = sequences.tokens > 0  # [sequences]
        ratios = sequences.sums(logprobs - batch.reference_logprobs)
        desirable = sequences.means(batch.values) > 0.5
        baseline = torch.zeros((), device=ratios.device) if batch.baseline is None else batch.baseline
        signs = torch.where(desirable, 1.0, -1.0)
        weights = torch.where(desirable, kto.desirable_weight, kto.undesirable_weight)
        logits = kto.beta * signs * (ratios - baseline)
        losses = weights * (-logsigmoid(logits) if kto.loss_type == "bco" else 1 - torch.sigmoid(logits))
        chosen, rejected = present & desirable, present & ~desirable
        rewards, logps = kto.beta * ratios.detach(), sequences.sums(logprobs.detach())
        metrics = [rewards * chosen, rewards * rejected, logps * chosen, logps * rejected, baseline * present]
        self.add_metrics([present, chosen, *metrics])
        return torch.where(present, losses, 0.0).sum()

    def means(self, sums: Tensor) -> dict[str, float]:
        """Return means over desirable (chosen) and undesirable (rejected) answers, under TRL's names."""
        answers, chosen, *rest = sums.tolist()
        counts = {"chosen": chosen, "rejected": answers - chosen, "kl": answers}
        metrics = {
            name: value / max(counts[name.rpartition("/")[2]], 1)
            for name, value in zip(self.METRICS[2:], rest)
        }
        if self.kto.loss_type == "bco":
            metrics["delta"] = self.kto.beta * metrics.pop("kl")
        margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics | {"rewards/margins": margin, "desirable": chosen / max(answers, 1)}


class KtoTask(SummedLossTask, ReferenceTask):
    """Task of KTO: its data, loss and metrics."""

    restarts_in_process = False

    console_metrics = ("rewards/margins", "kl")
    loss_name = "preference loss"

    def build_data(self, run: Run) -> KtoData:
        self.loss, self.evaluation_loss = (KtoLoss(run.config.kto) for _ in range(2))
        if run.config.kto.loss_type == "bco":
            self.console_metrics = ("rewards/margins", "delta")
        return KtoData(run, self.open_reference(run, run.config.kto))


def make_kto_batch(rows: np.ndarray, sample_numbers: np.ndarray) -> KtoBatch:
    """Collate answers (`answer_fields`). If the samples have mismatched answers, every second row and sequence is a
    mismatched answer.
    """
    return KtoBatch(**answer_fields(rows, sample_numbers))


def alternate_rows(batch: KtoBatch, first: int) -> KtoBatch:
    """Return the rows and sequences first, first + 2, … of a micro-batch."""
    names = [item.name for item in fields(KtoBatch) if item.name not in ("sequence_tokens", "baseline")]
    rows = {name: None if batch[name] is None else batch[name][first::2] for name in names}
    rows["sequence_ids"] = rows["sequence_ids"] // 2
    return replace(batch, **rows, sequence_tokens=batch.sequence_tokens[first::2])


class KtoData(StepData):
    """A run's marked answers, in micro-batches with the reference model's log-probabilities and the baseline."""

    make_chat_batch = staticmethod(make_kto_batch)

    def __init__(self, run: Run, reference: LogProbs):
        super().__init__(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp)
        self._run, self._reference = run, reference
        self._needs_kl, self._needs_shift = run.config.kto.needs_kl, run.config.kto.loss_type == "bco"

    def augment(self, batches: Sequence[KtoBatch]) -> list[KtoBatch]:
        return self._augment(batches, is_training=True)

    def augment_evaluation(self, batches: Sequence[KtoBatch]) -> list[KtoBatch]:
        """Return micro-batches for evaluation. Their answers do not count in bco's mean log-ratio."""
        return self._augment(batches, is_training=False)

    def _augment(self, batches: Sequence[KtoBatch], is_training: bool) -> list[KtoBatch]:
        baseline = None
        if self._needs_kl:
            baseline = self._divergence([alternate_rows(batch, 1) for batch in batches])
            batches = [alternate_rows(batch, 0) for batch in batches]
        logprobs = self._reference(batches)
        if self._needs_shift:
            if is_training:
                self._count(self._log_ratios(batches, self._run.model.all_logprobs(batches), logprobs))
            baseline = self._shift()
        return [
            replace(batch, reference_logprobs=x, baseline=baseline)
            for batch, x in zip(batches, logprobs, strict=True)
        ]

    def _divergence(self, batches: Sequence[KtoBatch]) -> Tensor:
        """Return the mean log-ratio of the step's mismatched answers, or 0 if it is negative: a float32 scalar."""
        policy, reference = self._run.model.all_logprobs(batches), self._reference(batches)
        total, count = self._log_ratios(batches, policy, reference)
        return (total / count.clamp(min=1)).clamp(min=0).float()

    def _log_ratios(
        self, batches: Sequence[KtoBatch], policy: Sequence[Tensor], reference: Sequence[Tensor]
    ) -> Tensor:
        """Return the sum of the step's log-ratios and the number of its answers, float64 [2]."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._run.device)
        for batch, ours, theirs in zip(batches, policy, reference, strict=True):
            batch = batch.to(self._run.device)
            ratios = Sequences.from_batch(batch).sums(ours - theirs)
            sums += torch.stack([ratios.sum(dtype=torch.float64), (batch.sequence_tokens > 0).sum().double()])
        return all_reduce_no_grad(sums, self._dp)

    def _count(self, sums: Tensor) -> None:
        """Add a step's sums to the run's sums in `totals`, which checkpoints contain."""
        totals = self._run.totals
        for name, value in zip((SHIFT_SUM, SHIFT_COUNT), sums.tolist()):
            totals[name] = totals.get(name, 0) + value

    def _shift(self) -> Tensor:
        """Return the mean log-ratio of all answers of the run so far, a float32 scalar."""
        totals = self._run.totals
        return torch.tensor(totals.get(SHIFT_SUM, 0) / max(totals.get(SHIFT_COUNT, 0), 1)).to(
            self._run.device
        )
