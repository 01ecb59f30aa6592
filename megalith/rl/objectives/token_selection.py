"""Selects, over a whole step, the tokens that the loss treats differently.

Before a step, a forward pass computes the policy's log-probabilities and entropies of all its tokens. The choice is
made on all of them at once, so it is the same in every layout:

    high entropy   entropy ≥ the (1 − rl.top_entropy_quantile) quantile; the policy loss omits other tokens
    selected       the choice of a SelectiveLoss (KL-Cov, Clip-Cov)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_gather_replicated
from megalith.config import RlConfig
from megalith.rl.losses.grpo_loss import load_loss
from megalith.rl.losses.selective_loss import SelectiveLoss, StepTokens
from megalith.rl.objectives.policy_loss import RolloutBatch


def selects_tokens(rl: RlConfig) -> bool:
    """Return True if the loss needs `select_tokens` before each step."""
    return rl.top_entropy_quantile < 1 or isinstance(load_loss(rl.loss_type), SelectiveLoss)


def select_tokens(
    rl: RlConfig,
    batches: Sequence[RolloutBatch],
    logprobs: Sequence[Tensor],
    entropies: Sequence[Tensor],
    seed: int,
    dp: Axis = Axis(),  # noqa: B008 (immutable)
) -> list[RolloutBatch]:
    """Return the micro-batches of a step with the masks of selected tokens.

    Args:
        rl: section `rl` of the configuration.
        batches: this rank's micro-batches, equal in number and shape on every rank. With n ranks, the i-th micro-batch
            of a rank is micro-batch i · n + rank of the step.
        logprobs: the policy's log-probabilities, float32 [batch, seq] per micro-batch.
        entropies: the entropies of the policy's distributions, float32 [batch, seq] per micro-batch.
        seed: seed of random choices, the same on every rank.
        dp: the data-parallel group.
    """
    device = logprobs[0].device
    columns = [
        torch.stack([each.to(device) for each in column])
        for column in (
            [batch.loss_mask for batch in batches],
            logprobs,
            [_old_logprobs(rl, batch, current) for batch, current in zip(batches, logprobs)],
            [batch.advantages for batch in batches],
            entropies,
        )
    ]
    local = torch.stack(columns, dim=-1)  # [micro-batches, batch, seq, columns]
    table = all_gather_replicated(
        local[:, None].contiguous(), dp, 1
    )  # [micro-batches, ranks, batch, seq, columns]
    mask = table[..., 0] > 0
    tokens = StepTokens(*table[mask].double()[:, 1:].unbind(-1), seed)
    chosen: dict[str, Tensor] = {}
    loss = load_loss(rl.loss_type)
    is_empty = not len(tokens.logprobs)
    if isinstance(loss, SelectiveLoss):
        chosen["selected"] = mask if is_empty else _at(mask, loss.select(rl, tokens))
    share = None
    if rl.top_entropy_quantile < 1:
        chosen["high_entropy"] = mask if is_empty else _at(mask, _high_entropy(rl, tokens.entropies))
        share = chosen["high_entropy"].sum() / mask.sum().clamp(min=1)
    results = []
    for number, batch in enumerate(batches):
        fields = {name: x[number, dp.rank].to(batch.loss_mask.device) for name, x in chosen.items()}
        if (
            share is not None and batch.entropy_weights is not None
        ):  # the mean over the tokens of high entropy
            fields["entropy_weights"] = batch.entropy_weights / share.to(batch.entropy_weights.device)
        results.append(replace(batch, **fields))
    return results


def _high_entropy(rl: RlConfig, entropies: Tensor) -> Tensor:
    """Return the indices of the tokens whose entropy is at least the quantile."""
    return (entropies >= _quantile(entropies, 1 - rl.top_entropy_quantile)).nonzero().flatten()


def _old_logprobs(rl: RlConfig, batch: RolloutBatch, logprobs: Tensor) -> Tensor:
    old = batch.old_logprobs
    if old is None and rl.old_logprobs == "rollout":
        old = batch.rollout_logprobs
    if old is None:
        return logprobs
    old = old.to(logprobs.device)
    return torch.where(old.isnan(), logprobs, old)


def _at(mask: Tensor, indices: Tensor) -> Tensor:
    """Return a bool tensor of `mask`'s shape that is True at `indices`, which count only the True elements of
    `mask`.
    """
    flat = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    flat[mask.flatten().nonzero().flatten()[indices]] = True
    return flat.view(mask.shape)


def _quantile(values: Tensor, fraction: float) -> Tensor:
    """Return the quantile with linear interpolation, for any number of values (torch.quantile takes at most 2²⁴)."""
    ordered, position = values.sort().values, fraction * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)
