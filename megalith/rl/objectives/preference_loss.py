"""The loss of a step of preference training: the mean over its pairs of the weighted losses in `dpo.loss_type`.

The losses of a pair are in preference_losses/, and their formulas in docs/preference.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.config.extensions import PREFERENCE_LOSSES
from megalith.config.load_extension import load_extension
from megalith.config.preferences import DpoConfig
from megalith.rl.objectives.answer_batch import AnswerBatch
from megalith.rl.objectives.sequences import Sequences
from megalith.rl.objectives.summed_loss import SummedLoss
from megalith.rl.preference_losses.answer_pairs import AnswerPairs
from megalith.rl.preference_losses.divergences import divergence_scores
from megalith.rl.preference_losses.ranked_losses import match_ranks
from megalith.rl.preference_losses.shared_length import within_shorter

SHARP = 0.5
"""Temperature of the log-probabilities from which `policy_weights` computes Σ p²."""


@dataclass
class PreferenceBatch(AnswerBatch):
    """A micro-batch of pairs: sequences 2k (chosen) and 2k + 1 (rejected). `values` are the pairs' weights."""

    reference_logprobs: Tensor | None = None  # float32 [batch, seq]
    # float32 scalar, pairs of the step / tokens of its chosen answers; None: those of this micro-batch
    pairs_per_token: Tensor | None = None
    partners: Tensor | None = None  # float32 [3, pairs], see AnswerPairs; None: those of this micro-batch
    sharp_logprobs: Tensor | None = (
        None  # float32 [batch, seq], at temperature SHARP; None: unless dpo.use_weighting
    )


class PreferenceLoss(SummedLoss):
    """Loss of a step with the settings of section `dpo`, for `ParallelModel.backward` on micro-batches of
    PreferenceBatch."""

    METRICS = (
        "pairs",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def __init__(self, dpo: DpoConfig):
        self.dpo = dpo

    def denominator(self, batch: PreferenceBatch) -> Tensor:
        weights = pair_weights(batch)
        present = batch.sequence_tokens[::2] > 0
        return (present if weights is None else weights).sum().double()

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: PreferenceBatch) -> Tensor:
        pairs, present = answer_pairs(batch, logprobs, self.dpo), batch.sequence_tokens[::2] > 0  # [pairs]
        if self.dpo.sorts_pairs and pairs.partners is None:
            partners = match_ranks(*rank_values(pairs)[:, present])
            pairs = replace(
                pairs, partners=partners.new_zeros(3, len(present)).masked_scatter(present, partners)
            )
        rewards = [
            self.dpo.beta * pairs.chosen_ratios.detach(),
            self.dpo.beta * pairs.rejected_ratios.detach(),
        ]
        if self.dpo.uses_mean_rewards:
            rewards = [rewards[0] / pairs.chosen_tokens, rewards[1] / pairs.rejected_tokens]
        margins, answers = rewards[0] - rewards[1], (pairs.chosen_logps, pairs.rejected_logps)
        self.add_metrics([present, *rewards, margins > 0, margins, *(x.detach() for x in answers)])
        losses = torch.where(present, preference_losses(self.dpo, pairs), 0.0)
        if self.dpo.use_weighting:
            losses = losses * policy_weights(batch, logprobs.detach())
        weights = pair_weights(batch)
        return losses.sum() if weights is None else (losses * weights).sum()


def answer_pairs(batch: PreferenceBatch, logprobs: Tensor, dpo: DpoConfig | None = None) -> AnswerPairs:
    """Return the AnswerPairs of a micro-batch: log-probabilities and log ratios, summed over each answer.

    Args:
        batch: the micro-batch.
        logprobs: log-probabilities of the policy, float32 [batch, seq].
        dpo: settings of the divergence and of the weights of long answers. None means the defaults.
    """
    sequences, reference = Sequences.from_batch(batch), batch.reference_logprobs
    logps = sequences.sums(logprobs)  # [sequences]
    log_ratios = logps
    if reference is not None:
        gaps = logprobs - reference
        if dpo is not None and dpo.ld_alpha is not None:
            is_shared = within_shorter(sequences.mask, sequences.sequence_ids, sequences.tokens)
            gaps = torch.where(is_shared, gaps, dpo.ld_alpha * gaps)
        log_ratios = sequences.sums(gaps)
    counts, ratio = sequences.tokens.clamp(min=1), batch.pairs_per_token
    if ratio is None:
        pairs, tokens = chosen_counts(batch)
        ratio = pairs / tokens.clamp(min=1)
    by_answer = (x.unflatten(0, (-1, 2)).T for x in (logps, log_ratios, counts))  # [2, pairs] each
    partners = getattr(batch, "partners", None)  # a caller's own batch may have no such field
    pairs = AnswerPairs(*itertools.chain(*by_answer), ratio.to(logps), partners)
    if dpo is None or dpo.f_divergence_type == "reverse_kl":
        return pairs
    scores = tuple(divergence_scores(dpo, ratios) for ratios in (pairs.chosen_ratios, pairs.rejected_ratios))
    return replace(pairs, scores=scores)


def rank_values(pairs: AnswerPairs) -> Tensor:
    """Return the arguments of `match_ranks`, [4, pairs], without gradient."""
    margins = (pairs.chosen_logps - pairs.rejected_logps).detach()
    chosen, rejected = pairs.chosen_ratios.detach(), pairs.rejected_ratios.detach()
    return torch.stack([chosen, rejected, margins - (chosen - rejected), margins])


def pair_weights(batch: PreferenceBatch) -> Tensor | None:
    """Return the weight of each pair, float32 [pairs], 0 for padding, or None if all have weight 1.

    Batches created by callers may lack the field with the weights.
    """
    values = getattr(batch, "values", None)
    return None if values is None else Sequences.from_batch(batch).means(values)[::2]


def policy_weights(batch: PreferenceBatch, logprobs: Tensor) -> Tensor:
    """Return the weights of pairs by how likely the policy would sample them (WPO, Zhou et al. 2024), float32 [pairs].

    The weight of an answer is exp of the mean of log p_t − log Σ_v p_v² over its tokens. The weight of a pair is the
    product of the weights of its two answers. With p′ at temperature ½, log Σ_v p_v² = 2 · log p_t − log p′_t.

    Args:
        batch: the micro-batch, with `sharp_logprobs`.
        logprobs: log-probabilities of the policy, float32 [batch, seq].
    """
    return (
        Sequences.from_batch(batch).means(batch.sharp_logprobs - logprobs).exp().unflatten(0, (-1, 2)).prod(1)
    )


def chosen_counts(batch: PreferenceBatch) -> Tensor:
    """Return the number of pairs and of tokens in their chosen answers, float64 [2]."""
    chosen = batch.sequence_tokens[::2]
    return torch.stack([(chosen > 0).sum(), chosen.sum()]).double()


@functools.cache
def load_preference_loss(name: str) -> Callable[[DpoConfig, AnswerPairs], Tensor]:
    """Return the function of a value of `dpo.loss_type`. Raise ConfigError if it does not exist."""
    return load_extension(name, PREFERENCE_LOSSES, "dpo.loss_type")


def preference_losses(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return the weighted sum of the losses of each pair, float32 [pairs]."""
    losses = [weight * load_preference_loss(name)(dpo, pairs) for name, weight in dpo.losses.items()]
    return torch.stack(losses).sum(0)
