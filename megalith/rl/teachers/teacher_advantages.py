"""A teacher in GRPO (`rl.teacher`): the negative reverse KL divergence of each sampled token, added to its advantage.

    A_t + c · (log π_teacher(t) − log π(t))        c = rl.teacher_coef

The mean over the policy's samples of log π − log π_teacher is the divergence KL(π ‖ π_teacher), so the policy gradient
with these advantages reduces it (on-policy distillation; Agarwal et al. 2024, Lu and Thinking Machines Lab 2025).
log π is the old policy's if the run computes it, otherwise the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.comm.collectives import all_reduce_no_grad, any_rank
from megalith.config.distillation import WITHOUT_ADAPTERS, is_served
from megalith.rl.auxiliary_models.frozen_model import load_frozen
from megalith.rl.auxiliary_models.reference import LogProbs, adapter_free_logprobs
from megalith.rl.objectives.policy_loss import RolloutBatch, without_routes
from megalith.rl.teachers.model_teacher import teacher_config
from megalith.rl.teachers.served_teacher import ServedTeacher
from megalith.training.run_state import Run


class TeacherAdvantages:
    """Adds the teacher's term to the advantages of rollout batches."""

    def __init__(self, run: Run, vocab_size: int):
        """Check the teacher. A model is loaded at the first use.

        Args:
            run: the run.
            vocab_size: number of vocabulary entries that the policy samples from.
        """
        self._run, self._rl, self._vocab_size = run, run.config.rl, vocab_size
        self._teacher = self._open(self._rl.teacher)
        self.mean_divergence: Tensor | None = None
        """Mean of log π − log π_teacher over the last rollout batch's tokens in the loss, a 0-d tensor."""

    def _open(self, name: str) -> LogProbs:
        run, rl = self._run, self._rl
        if name == WITHOUT_ADAPTERS:
            return adapter_free_logprobs(run, rl.temperature, self._vocab_size)
        if is_served(name):
            return ServedTeacher(run, name, rl.teacher_engine, rl.teacher_timeout, "rl.teacher").logprobs
        config, models = teacher_config(run.config, name, "rl.teacher"), []

        def logprobs(batches: Sequence[RolloutBatch]) -> list[Tensor]:
            if not models:
                models.append(load_frozen(config, run.mesh, run.device))
            return models[0].all_logprobs(batches, rl.temperature, self._vocab_size)

        return logprobs

    def add(self, batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
        """Return the micro-batches of a rollout batch with the teacher's term added to the advantages.

        Collective over all ranks.
        """
        teacher, student = self._teacher(without_routes(batches)), self._student(batches)
        sums = torch.zeros(2, dtype=torch.float64, device=self._run.device)
        results = []
        for batch, theirs, ours in zip(batches, teacher, student, strict=True):
            advantages = batch.advantages.to(theirs.device)
            gap = torch.where(batch.loss_mask.to(theirs.device) > 0, theirs - ours.to(theirs.device), 0.0)
            is_compared = ~gap.isnan() & (batch.loss_mask.to(theirs.device) > 0)
            gap = gap.nan_to_num(nan=0.0)
            sums += torch.stack([is_compared.sum().double(), -gap.sum(dtype=torch.float64)])
            total = (advantages + self._rl.teacher_coef * gap).to(batch.advantages.device)
            results.append(replace(batch, advantages=total))
        count, total = all_reduce_no_grad(sums, self._run.mesh.dp)
        self.mean_divergence = total / count.clamp(min=1)
        return results

    def _student(self, batches: Sequence[RolloutBatch]) -> list[Tensor]:
        """Return the policy's log-probabilities: the old policy's, the engine's, or new ones from a forward pass."""
        if batches[0].old_logprobs is not None:
            return [batch.old_logprobs for batch in batches]
        absent = any(batch.rollout_logprobs is None and bool(batch.loss_mask.any()) for batch in batches)
        if any_rank(absent, self._run.mesh.world):
            return self._run.model.all_logprobs(batches, self._rl.temperature, self._vocab_size)
        return [
            torch.zeros_like(batch.advantages) if batch.rollout_logprobs is None else batch.rollout_logprobs
            for batch in batches
        ]
