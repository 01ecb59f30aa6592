"""Generalized advantage estimation (Schulman et al. 2016) over the tokens of completions, and the critic's loss.

Formulas are verl's (`compute_gae_advantage_return`, `compute_value_loss`). The value of a token is the critic's
estimate before the token is sampled: the score at the preceding token. Only the last token of a completion has a
reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.rl.objectives.policy_loss import RolloutBatch
from megalith.rl.objectives.summed_loss import SummedLoss


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return two tensors, the advantages and the returns, float [rows, tokens] each, 0 outside of `mask`.

    δ_t = r_t + γ · V_{t+1} − V_t,  A_t = δ_t + γ · λ · A_{t+1},  return_t = A_t + V_t

    Args:
        rewards: float [rows, tokens].
        values: float [rows, tokens], V.
        mask: bool [rows, tokens], True for the tokens of a row, which come before its padding.
        gamma: discount γ.
        lam: λ. 0 uses the token's reward and the next value, 1 the discounted sum of the rewards.
    """
    values = torch.where(mask, values, 0.0)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    sums, factor, span = torch.where(mask, rewards + gamma * following - values, 0.0), gamma * lam, 1
    # Doubling the span needs a number of operations that grows with the logarithm of the length.
    while span < sums.shape[1]:  # sums of the next `span` δ, each with its power of γ · λ
        sums = sums + factor * torch.nn.functional.pad(sums[:, span:], (0, span))
        factor, span = factor * factor, 2 * span
    return sums, sums + values


def with_gae(
    batches: Sequence[RolloutBatch], values: Sequence[Tensor], gamma: float, lam: float, dp: Axis
) -> list[RolloutBatch]:
    """Return the micro-batches of a rollout batch with whitened advantages, values and returns.

    Collective over all ranks.

    Args:
        batches: this data-parallel rank's micro-batches. Their field `advantages` must hold the rewards of their
            sequences.
        values: the critic's scores, float32 [batch, seq] each.
        gamma, lam: discount γ and λ, as in `gae`.
        dp: the data-parallel axis, over which advantages are whitened.
    """
    estimates = []
    moments = torch.zeros(2, dtype=torch.float64, device=values[0].device)
    for batch, scores in zip(batches, values, strict=True):
        local = batch.to(scores.device)
        mask = local.loss_mask > 0
        rewards = torch.where(mask & ~_continues(local, mask), local.advantages, 0.0)
        advantages, returns = _by_sequence(local, mask, rewards, scores, gamma, lam)
        moments += torch.stack([mask.sum().double(), advantages.sum(dtype=torch.float64)])
        estimates.append((mask, advantages, returns))
    count, total = all_reduce_no_grad(moments, dp)
    mean = total / count.clamp(min=1)
    squares = torch.stack(
        [(advantages[mask].double() - mean).square().sum() for mask, advantages, _ in estimates]
    )
    variance = all_reduce_no_grad(squares.sum(), dp) / (count - 1).clamp(min=1)
    scale = torch.rsqrt(variance + 1e-8)
    results = []
    for batch, scores, (mask, advantages, returns) in zip(batches, values, estimates):
        whitened = torch.where(mask, (advantages - mean) * scale, 0.0).float()
        device, old_values = batch.advantages.device, torch.where(mask, scores, 0.0)
        results.append(
            replace(
                batch,
                advantages=whitened.to(device),
                values=old_values.to(device),
                returns=returns.to(device),
            )
        )
    return results


def _continues(batch: RolloutBatch, mask: Tensor) -> Tensor:
    """Return True for each loss token that has a later loss token in its sequence, bool [batch, seq]."""
    position = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = torch.full((len(batch.sequence_tokens) or 1,), -1, device=mask.device)
    last = last.scatter_reduce(
        0, batch.sequence_ids.flatten(), torch.where(mask, position, -1).flatten(), reduce="amax"
    )
    return position < last[batch.sequence_ids]


def _by_sequence(
    batch: RolloutBatch, mask: Tensor, rewards: Tensor, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute the advantages and returns of each sequence of a packed or padded `batch` with `gae`."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    ids = batch.sequence_ids[mask]
    if not len(ids):
        return advantages, returns
    counts = torch.bincount(ids)  # [sequences]
    longest = int(counts.max())
    # The tokens in the loss of each sequence, from the left, without tool output between them.
    order = torch.argsort(ids, stable=True)
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(ids), device=ids.device) - starts[ids[order]]
    cells = ids[order], column
    table = torch.zeros(3, len(counts), longest, dtype=torch.float32, device=ids.device)
    table[0][cells], table[1][cells], table[2][cells] = rewards[mask][order], values[mask][order], 1.0
    results = gae(table[0], table[1], table[2] > 0, gamma, lam)
    flat = [torch.zeros(len(ids), device=ids.device).index_copy(0, order, each[cells]) for each in results]
    advantages[mask], returns[mask] = flat
    return advantages, returns


class ValueLoss(SummedLoss):
    """Mean over tokens of ½ max((V − return)², (clip(V, V_old ± cliprange_value) − return)²), the loss of PPO's
    critic.
    """

    METRICS = ("tokens", "value_clipped", "values_mean", "returns_mean", "value_error")

    def __init__(self, cliprange_value: float | None):
        self.cliprange_value = cliprange_value

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: RolloutBatch) -> Tensor:
        """Return the sum of the tokens' losses; `logprobs` are the critic's values, float32 [batch, seq]."""
        mask = batch.loss_mask > 0
        values, old, returns = logprobs[mask], batch.values[mask], batch.returns[mask]
        losses, clipped = (values - returns).square(), torch.zeros_like(values, dtype=torch.bool)
        if (bound := self.cliprange_value) is not None:
            bounded = (torch.clamp(values, old - bound, old + bound) - returns).square()
            clipped, losses = bounded > losses, torch.maximum(losses, bounded)
        error = (values.detach() - returns).square()
        self.add_metrics([mask, clipped, values.detach(), returns, error])
        return 0.5 * losses.sum()
