"""Corrections for the difference between the engine's and the trained policy, over a whole rollout batch.

With d = log π_old − log π_rollout of each token:

    rejection       tokens and sequences whose divergence is out of bounds leave the loss and its divisor
                    (rl.rollout_rs)
    normalization   the bounded weights exp(d) are divided by their mean (rl.rollout_is_batch_normalize)

The formulas are from verl 0.9.1's rollout_corr_helper.py, decoupled mode. In its bypass mode (rl.old_logprobs:
rollout), the loss itself multiplies each token by `accepted_tokens` of the trained policy, and its divisor also counts
the rejected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.config import RlConfig
from megalith.config.rules.rejection import rejection_criteria
from megalith.rl.objectives.policy_loss import RolloutBatch, accepted_tokens, divisor, mismatch_weights
from megalith.rl.objectives.sequences import Sequences


def correct_batches(
    rl: RlConfig, steps: Sequence[Sequence[RolloutBatch]], dp: Axis, device: torch.device
) -> tuple[list[RolloutBatch], float]:
    """Return the micro-batches of a rollout batch with their corrections. Collective over all ranks.

    Args:
        rl: section `rl` of the configuration.
        steps: this data-parallel rank's micro-batches of each step, with log-probabilities of engine and old policy.
        dp: the data-parallel group.
        device: device of the sums.

    Returns:
        The micro-batches of all steps, and the fraction of rejected tokens.
    """
    flat = [batch for step in steps for batch in step]
    weights = _normalized_weights(rl, flat, dp, device) if rl.normalizes_mismatch else None
    if weights is not None:
        flat = [replace(batch, mismatch=each) for batch, each in zip(flat, weights)]
    if rl.rollout_rs is None:
        return flat, 0.0
    tokens = sum(batch.loss_mask.sum(dtype=torch.float64).to(device) for batch in flat)
    flat = [_without_rejected(rl, batch) for batch in flat]
    kept = sum(batch.loss_mask.sum(dtype=torch.float64).to(device) for batch in flat)
    tokens, kept = all_reduce_no_grad(torch.stack([tokens, kept]), dp).tolist()
    batches, results = iter(flat), []
    for step in steps:
        results += _with_entropy_weights(rl, [next(batches) for _ in step], dp, device)
    return results, 1 - kept / max(tokens, 1)


def _rollout_logprobs(batch: RolloutBatch) -> Tensor:
    """Return the engine's log-probabilities.

    For a batch without them, such as one of empty rows, return the old policy's.
    """
    old, rollout = batch.old_logprobs, batch.rollout_logprobs
    return old if rollout is None else rollout.to(old.device)


def _without_rejected(rl: RlConfig, batch: RolloutBatch) -> RolloutBatch:
    criteria = rejection_criteria(rl.rollout_rs, rl.rollout_rs_threshold)
    gap = batch.old_logprobs - _rollout_logprobs(batch)
    sequences = Sequences.from_batch(batch.to(gap.device))
    keeps = sequences.mask & accepted_tokens(criteria, gap, sequences)
    counts = sequences.sums(keeps.to(gap.dtype))[: len(batch.sequence_tokens)].to(batch.sequence_tokens)
    return replace(batch, loss_mask=batch.loss_mask * keeps.to(batch.loss_mask), sequence_tokens=counts)


def _normalized_weights(
    rl: RlConfig, batches: Sequence[RolloutBatch], dp: Axis, device: torch.device
) -> list[Tensor]:
    """Return the bounded weights divided by their mean over the tokens, or over the sequences for sequence-level
    weights.
    """
    by_sequence = rl.mismatch_mode.startswith("sequence")
    weights, sums = [], torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        local = batch.to(batch.old_logprobs.device)
        sequences = Sequences.from_batch(local)
        each = mismatch_weights(rl, local.old_logprobs, _rollout_logprobs(local), sequences)
        counted = sequences.tokens > 0 if by_sequence else sequences.mask
        values = torch.where(counted, sequences.means(each) if by_sequence else each, 0.0)
        sums += torch.stack([values.sum(dtype=torch.float64), counted.sum().double()]).to(device)
        weights.append(each)
    total, count = all_reduce_no_grad(sums, dp).tolist()
    mean = total / max(count, 1)
    return [each / mean for each in weights] if mean > 1e-8 else weights


def _with_entropy_weights(
    rl: RlConfig, batches: list[RolloutBatch], dp: Axis, device: torch.device
) -> list[RolloutBatch]:
    """Return a step's micro-batches with entropy weights. With them, the entropy bonus is a mean over the tokens that
    are not rejected.
    """
    if all(batch.entropy_weights is None for batch in batches):
        return batches
    counts = [
        torch.stack([divisor(rl, tokens), tokens.sum(dtype=torch.float64)])
        for tokens in (batch.sequence_tokens for batch in batches)
    ]
    total, tokens = all_reduce_no_grad(torch.stack(counts).sum(0).to(device), dp).tolist()
    weight = (total or 1.0) / max(tokens, 1)
    return [
        replace(batch, entropy_weights=torch.full_like(batch.entropy_weights, weight)) for batch in batches
    ]
