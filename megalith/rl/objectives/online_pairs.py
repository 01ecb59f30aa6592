"""The completion pairs of online DPO: which one is preferred, and the log-ratio of the other one.

A forward pass before each step computes the policy's log-ratios to the reference over the whole step, so that the loss
of a pair does not depend on the micro-batches of its completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megalith.comm.collectives import all_reduce_no_grad
from megalith.rl.objectives.policy_loss import RolloutBatch
from megalith.rl.objectives.sequences import Sequences
from megalith.training.run_state import Run


def completion_sums(
    run: Run,
    batches: Sequence[RolloutBatch],
    owners_by_batch: Sequence[Sequence[int]],
    values_by_batch: Sequence[Tensor],
    completions: int,
) -> Tensor:
    """Return, for each completion, the sum of values over its tokens in the loss, float64 [completions].

    Collective over all ranks.

    Args:
        run: the run.
        batches: this data-parallel rank's micro-batches.
        owners_by_batch: index of the completion that each sequence of a micro-batch belongs to.
        values_by_batch: float [batch, seq] per micro-batch; NaN counts as 0.
        completions: number of completions, over all ranks.
    """
    sums = torch.zeros(completions, dtype=torch.float64, device=run.device)
    for batch, owners, values in zip(batches, owners_by_batch, values_by_batch, strict=True):
        if not owners:
            continue
        per_sequence = Sequences.from_batch(batch.to(run.device)).sums(values.nan_to_num(nan=0.0)).double()
        sums.index_add_(0, torch.tensor(owners, device=run.device), per_sequence[: len(owners)])
    return all_reduce_no_grad(sums, run.mesh.dp)


def preferred(rewards: np.ndarray) -> np.ndarray:
    """Return, for each pair, 1 for the completion with the larger reward and −1 for the other, float64 [groups, 2].

    If both rewards are equal, the first completion is preferred. An absent reward counts as smaller than any other.
    """
    first, second = np.nan_to_num(rewards, nan=-np.inf).T
    signs = np.where(first >= second, 1.0, -1.0)
    return np.stack([signs, -signs], axis=1)


def with_pairs(
    run: Run,
    batches: Sequence[RolloutBatch],
    owners_by_batch: Sequence[Sequence[int]],
    logprobs: Sequence[Tensor],
    rewards: np.ndarray,
) -> list[RolloutBatch]:
    """Return a step's micro-batches with the signs of `preferred` as advantages, and with the partners' log-ratios.

    Args:
        run: the run.
        batches: this data-parallel rank's micro-batches, with the reference's log-probabilities.
        owners_by_batch: the completion of each sequence of each micro-batch, counted over the rollout batch.
        logprobs: the policy's log-probabilities, float32 [batch, seq] per micro-batch.
        rewards: float64 [groups, 2] of the rollout batch, NaN where absent.
    """
    gaps = [ours - batch.reference_logprobs for ours, batch in zip(logprobs, batches, strict=True)]
    ratios = completion_sums(run, batches, owners_by_batch, gaps, rewards.size)
    partners = ratios.unflatten(0, (-1, 2)).flip(1).flatten()
    signs = torch.from_numpy(preferred(rewards)).flatten()
    results = []
    for batch, owners in zip(batches, owners_by_batch):
        index = torch.tensor(list(owners) or [0])
        sequence_ids = batch.sequence_ids.cpu()
        in_loss = batch.loss_mask.cpu() > 0
        fields = {
            name: torch.where(in_loss, values.cpu()[index].float()[sequence_ids], 0.0).to(batch.labels.device)
            for name, values in (("advantages", signs), ("partners", partners))
        }
        results.append(replace(batch, **fields))
    return results
