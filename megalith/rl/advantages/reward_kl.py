"""The KL divergence from the reference as part of the reward (`rl.use_kl_in_reward`), as in RLOO and verl.

    r − beta · Σ_t (log π_old(t) − log π_ref(t))        over a completion's tokens in the loss

The sum needs forward passes, so the advantages of a rollout batch are computed again from these rewards, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megalith.comm.collectives import all_reduce_no_grad
from megalith.rl.advantages.advantages import apply_estimator
from megalith.rl.objectives.online_pairs import completion_sums
from megalith.rl.objectives.policy_loss import RolloutBatch
from megalith.training.run_state import Run


@dataclass(frozen=True)
class BatchRewards:
    """Rewards of a rollout batch: arrays [groups, completions per group]."""

    total: np.ndarray  # float64, weighted sums; NaN where absent
    lengths: np.ndarray  # int, tokens of each completion


def with_reward_kl(
    run: Run,
    batches: Sequence[RolloutBatch],
    owners_by_batch: Sequence[Sequence[int]],
    rewards: BatchRewards,
) -> tuple[list[RolloutBatch], float]:
    """Return the micro-batches of a rollout batch with advantages computed from the rewards minus the KL.

    Collective over all ranks.

    Args:
        run: the run.
        batches: this data-parallel rank's micro-batches, with the log-probabilities of the old policy, or of the
            engine, and of the reference.
        owners_by_batch: index of the completion that each sequence of a micro-batch belongs to, counted over the
            rollout batch.
        rewards: rewards of the rollout batch.

    Returns:
        The micro-batches, and the mean KL per token.
    """
    gaps = []
    for batch in batches:
        old = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
        gaps.append(old.to(run.device) - batch.reference_logprobs.to(run.device))
    kl = completion_sums(run, batches, owners_by_batch, gaps, rewards.total.size).tolist()
    tokens = sum(batch.loss_mask.sum(dtype=torch.float64).to(run.device) for batch in batches)
    tokens = all_reduce_no_grad(tokens, run.mesh.dp).item()
    rl, shape = run.config.rl, rewards.total.shape
    total = rewards.total - rl.beta * np.array(kl).reshape(shape)
    values = apply_estimator(rl, total, rewards.lengths).flatten()
    results = []
    for batch, owners in zip(batches, owners_by_batch):
        per_sequence = torch.tensor(values[list(owners)] if owners else [0.0], dtype=torch.float32)
        advantages = torch.where(
            batch.loss_mask > 0, per_sequence.to(batch.labels.device)[batch.sequence_ids], 0.0
        )
        results.append(replace(batch, advantages=advantages))
    return results, sum(kl) / max(tokens, 1)
