"""Policy losses of GRPO and related methods, by the formulas in docs/grpo_objective.md.

All functions are pure functions of tensors [batch, seq] with one value per token. A row may hold several sequences
(packing); `sequence_ids` maps each token to its sequence within the micro-batch. Sums over a sequence therefore work
the same way for padded and packed rows.

The loss of a step is a sum over all micro-batches divided by a global count of tokens or sequences, which is known
before the first backward pass. Division by a sequence's own token count happens here, because a sequence is never split
across micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.config.rules.rejection import Criterion, rejection_criteria
from megalith.data.batch import Batch
from megalith.errors import ConfigError
from megalith.rl.losses.grpo_loss import load_loss
from megalith.rl.losses.pair_loss import PairLoss
from megalith.rl.losses.selective_loss import SelectiveLoss
from megalith.rl.losses.sequence_loss import SequenceLoss
from megalith.rl.objectives.sequences import Sequences
from megalith.rl.objectives.summed_loss import SummedLoss


@dataclass
class RolloutBatch(Batch):
    """A micro-batch of prompts with completions. `loss_mask` is 1 where the label is a completion token in the loss.

    Without `old_logprobs`, the old policy is the engine's if rl.old_logprobs is "rollout". Otherwise it is the trained
    policy, so that the ratio is 1 (and has a gradient).
    """

    advantages: Tensor  # float32 [batch, seq], the advantage of the token's sequence
    sequence_ids: Tensor  # int64 [batch, seq], the token's sequence within the micro-batch; 0 for padding
    sequence_tokens: Tensor  # float32 [sequences], number of tokens in the loss
    rollout_logprobs: Tensor | None = None  # float32 [batch, seq], from the engine
    old_logprobs: Tensor | None = None  # float32 [batch, seq]
    reference_logprobs: Tensor | None = None  # float32 [batch, seq]
    # float32 [batch, seq], interpolates the old policy: 0 is the rollout's policy, 1 the trained one
    proximal_weight: Tensor | None = None
    # float32 [batch, seq], see entropy_weight; None: computed from this micro-batch
    entropy_weights: Tensor | None = None
    # bool [batch, seq], from token_selection.py: tokens of high entropy, and tokens that a SelectiveLoss selects
    high_entropy: Tensor | None = None
    selected: Tensor | None = None
    # float32 [batch, seq], normalized mismatch weights (rollout_correction.py); None: computed by the loss
    mismatch: Tensor | None = None
    # float32 [batch, seq], log-ratio of the other completion of the pair (online_pairs.py)
    partners: Tensor | None = None
    # float32 [batch, seq], of PPO's critic (gae.py)
    values: Tensor | None = None
    returns: Tensor | None = None


def without_routes(batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
    """Return the micro-batches without the engine's expert routing, for models other than the policy."""
    return [replace(batch, routes=None) for batch in batches]


def log_ratio(rl: RlConfig, logprobs: Tensor, old: Tensor, sequences: Sequences | None) -> Tensor:
    """Return log π − log π_old per token, or with rl.importance_sampling_level sequence its mean over the token's
    sequence (GSPO).
    """
    ratio = logprobs - old
    if rl.importance_sampling_level == "sequence":
        return sequences.per_token(sequences.means(ratio))
    return ratio


def kl_losses(rl: RlConfig, logprobs: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    """Return the estimate of KL(π ‖ π_ref) per token, [batch, seq]. `ratio` is the ratio in the policy loss, as in TRL.

    The clamps are from verl's k3 and NeMo-RL. A token beyond a clamp has no gradient.
    """
    d = reference - logprobs
    in_range = torch.ones_like(d, dtype=torch.bool)
    if (bound := rl.kl_input_clamp_value) is not None:
        in_range, d = d.abs() <= bound, d.clamp(-bound, bound)
    match rl.kl_estimator:
        case "k1":
            kl = -d
        case "k2":
            kl = d.square() / 2
        case _:
            kl = d.exp() - d - 1
    if rl.use_bias_correction_kl:
        kl = kl * ratio
    if rl.kl_score_gradient:
        score = (logprobs - logprobs.detach()).exp()
        kl = kl * torch.where(in_range, score, score.detach())
    return kl if (bound := rl.kl_output_clamp_value) is None else kl.clamp(-bound, bound)


def mismatch_weights(rl: RlConfig, old: Tensor, rollout: Tensor, sequences: Sequences | None) -> Tensor:
    """Return the bounded weight exp(log π_old − log π_rollout), [batch, seq], without gradient.

    The weight corrects for numerical differences between engine and trainer. With a mode `sequence_…`, the differences
    of log-probabilities are summed over the sequence before the exponential. With `geometric_mask`, each token has its
    own weight, or 0 if the geometric mean over its sequence is out of bounds. If one of a token's two log-probabilities
    is NaN, its weight is 1.
    """
    level, _, beyond = rl.mismatch_mode.partition("_")
    gap = (old - rollout).detach().nan_to_num(nan=0.0)
    gap = sequences.per_token(sequences.sums(gap)) if level == "sequence" else gap
    weights, (low, high) = gap.exp(), rl.mismatch_bounds
    if beyond == "unbounded":
        return weights.nan_to_num(posinf=0.0)  # as NeMo-RL
    if beyond == "truncate":
        return weights.clamp(low, high)
    bounded = sequences.per_token(sequences.means(gap)).exp() if level == "geometric" else weights
    in_bounds = bounded <= high
    if low is not None:
        in_bounds &= bounded >= low
    return torch.where(in_bounds, weights, 0.0)


def accepted_tokens(criteria: Sequence[Criterion], gap: Tensor, sequences: Sequences) -> Tensor:
    """Return True for tokens that every criterion of rl.rollout_rs keeps, bool [batch, seq].

    Args:
        criteria: result of `rejection_criteria`.
        gap: log π_old − log π_rollout, float [batch, seq]; NaN counts as equal.
        sequences: the tokens' sequences.
    """
    gap = gap.detach().nan_to_num(nan=0.0).clamp(-20, 20)  # verl's SAFETY_BOUND
    divergences = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - 1 - gap}
    aggregates = {"seq_sum": sequences.sums, "seq_mean": sequences.means, "seq_max": sequences.maxima}
    keeps = torch.ones_like(gap, dtype=torch.bool)
    for level, estimator, low, high in criteria:
        values = divergences[estimator]
        if level != "token":
            values = sequences.per_token(aggregates[level](values))
        keeps = keeps & (values >= low) & (values <= high)
    return keeps


def off_policy_mask(
    rl: RlConfig, logprobs: Tensor, sampling: Tensor, advantages: Tensor, sequences: Sequences
) -> Tensor:
    """Return a mask, [batch, seq]: 0 for tokens of sequences that rl.off_policy_mask_threshold excludes, otherwise 1.

    A sequence is excluded if A < 0 and its mean of log π_sampling − log π is above the threshold (DeepSeek-V3.2).
    `sampling` has the engine's log-probabilities. Where one is NaN, the difference counts as 0.
    """
    gap = sequences.means((sampling - logprobs.detach()).nan_to_num(nan=0.0))
    keeps = (advantages >= 0) | (sequences.per_token(gap) <= rl.off_policy_mask_threshold)
    return keeps.to(logprobs.dtype)


def divisor(rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
    """Return a micro-batch's term of the denominator of the step's loss, a float64 scalar.

    Args:
        rl: section `rl` of the configuration.
        sequence_tokens: float [sequences], number of tokens in the loss.
    """
    return load_loss(rl.loss_type).divisor(rl, sequence_tokens)


def entropy_weight(rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
    """Return the weight of a token's entropy in the numerator of a step's loss, a float64 scalar.

    With this weight, the entropies' sum divided by the step's divisor is their mean over the tokens. A divisor of 0
    counts as 1.
    """
    total = divisor(rl, sequence_tokens)
    return torch.where(total > 0, total, 1.0) / sequence_tokens.sum(dtype=torch.float64).clamp(min=1)


class PolicyLoss(SummedLoss):
    """GRPO's loss with the settings of section `rl`, for `ParallelModel.backward` on micro-batches of RolloutBatch."""

    DRIFT = ("drift", "mismatch", "drift_k3", "drift_above_1")
    """Names of the metrics that are means over the tokens with log-probabilities from both engine and trainer."""
    METRICS = ("tokens", "ratio", "clip_low", "clip_high", "kl", "entropy", "compared", *DRIFT)

    def __init__(self, rl: RlConfig, vocab_size: int | None = None):
        self.rl, self.vocab_size, self._loss = rl, vocab_size, load_loss(rl.loss_type)
        self.temperature = rl.temperature
        self.needs_entropy = rl.has_entropy_bonus or rl.log_entropy
        self._criteria = (
            rejection_criteria(rl.rollout_rs, rl.rollout_rs_threshold) if rl.rejects_in_loss else ()
        )
        self.entropy_coef = rl.entropy_coef
        """Weight of the entropy bonus, which adaptive_entropy.py may change between steps."""
        self._largest_drifts: list[Tensor] = []

    def denominator(self, batch: RolloutBatch) -> Tensor:
        return divisor(self.rl, batch.sequence_tokens)

    def tokens(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        """Return the per-token inputs of `token_losses`, or None if the loss needs sums over sequences first.

        Such sums are needed for GSPO's ratio, for losses over sequences, for off-policy masks, and for sequence-level
        rejection and mismatch weights if these compare the trained policy with the engine's.
        """
        rl, terms, sequences = self.rl, self._terms(batch), Sequences.from_batch(batch)
        needs_sums = isinstance(self._loss, SequenceLoss | PairLoss)
        needs_sums |= rl.off_policy_mask_threshold is not None
        needs_sums |= any(criterion.level != "token" for criterion in self._criteria)
        if rl.importance_sampling_level == "sequence" or needs_sums:
            return None
        if "rollout" in terms and not rl.mismatch_mode.startswith("token"):
            if "old" not in terms or self._loss.weighs_policy:
                return None
            terms["mismatch"] = mismatch_weights(rl, terms["old"], terms.pop("rollout"), sequences)
        return terms

    def token_losses(
        self,
        logprobs: Tensor,
        entropy: Tensor | None,
        tokens: Mapping[str, Tensor],
        sequences: Sequences | None = None,  # if needed; the tokens are then a full micro-batch
    ) -> Tensor:
        rl, logprobs = self.rl, torch.where(tokens["mask"], logprobs, 0.0)
        old, mismatch = _old_logprobs(logprobs, tokens), tokens.get("mismatch")
        log_ratios = log_ratio(rl, logprobs, old, sequences)
        ratio, advantages = log_ratios.exp(), tokens["advantages"]
        if "rollout" in tokens:
            trainer = logprobs.detach() if self._loss.weighs_policy else old
            mismatch = mismatch_weights(rl, trainer, tokens["rollout"], sequences)
        if isinstance(self._loss, PairLoss):
            others = tokens["reference"], advantages, tokens["partners"]
            losses = self._loss.pair_losses(rl, logprobs, *others, sequences)
        elif isinstance(self._loss, SequenceLoss):
            losses = self._loss.sequence_losses(rl, log_ratios, logprobs, advantages, mismatch, sequences)
        else:
            losses = self._loss.token_losses(rl, ratio, logprobs, advantages)
            if "selected" in tokens:
                selected_losses = self._loss.selected_losses(rl, ratio, logprobs, advantages)
                losses = torch.where(tokens["selected"], selected_losses, losses)
            losses = losses if mismatch is None else losses * mismatch
        if rl.off_policy_mask_threshold is not None:
            losses = losses * off_policy_mask(
                rl, logprobs, tokens.get("sampling", old), advantages, sequences
            )
        if self._criteria:
            gap = logprobs.detach() - tokens["sampling"]
            losses = losses * accepted_tokens(self._criteria, gap, sequences)
        if "high_entropy" in tokens:
            losses = losses * tokens["high_entropy"]
        if rl.loss_beta:
            losses = losses + rl.loss_beta * kl_losses(rl, logprobs, tokens["reference"], ratio)
        losses = losses * tokens["weights"]
        if "entropy_weights" in tokens:
            bonus = entropy * tokens["entropy_weights"]
            losses = losses - (bonus * tokens["high_entropy"] if "high_entropy" in tokens else bonus)
        return torch.where(tokens["mask"], losses, 0.0)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: RolloutBatch) -> Tensor:
        losses = self.token_losses(logprobs, entropy, self._terms(batch), Sequences.from_batch(batch))
        self.observe(logprobs, entropy, batch)
        return losses.sum()

    def _terms(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Return the per-token terms of the loss, [batch, seq] each, 0 outside the loss.

        `rollout` is present if the mismatch with the engine is corrected, `old` if the old policy is not the trained
        one, and `proximal_weight` if the old policy is interpolated between the engine's and the trained one.
        """
        rl, sequences = self.rl, Sequences.from_batch(batch)
        old, rollout = batch.old_logprobs, batch.rollout_logprobs
        if old is None and rl.old_logprobs == "rollout":
            old = rollout
        needs_reference = rl.loss_beta or rl.compares_completions
        terms = {"old": old, "reference": batch.reference_logprobs if needs_reference else None}
        terms["partners"] = batch.partners
        terms["rollout"] = rollout if rl.mismatch_mode and batch.mismatch is None else None
        terms["mismatch"], terms["proximal_weight"] = batch.mismatch, batch.proximal_weight
        compares = rl.off_policy_mask_threshold is not None or self._criteria
        terms["sampling"] = rollout if compares else None
        terms = {name: sequences.masked(x) for name, x in terms.items() if x is not None}
        weights = self._loss.token_weights(rl, sequences, batch.advantages.dtype)
        self._check_selection(batch)
        for name in ("high_entropy", "selected"):
            if (tokens := getattr(batch, name)) is not None:
                terms[name] = tokens & sequences.mask
        if rl.has_entropy_bonus:  # a tensor, so that a coefficient that changes compiles nothing again
            terms["entropy_weights"] = self.entropy_coef * self._entropy_weights(batch, weights)
        return {"mask": sequences.mask, "weights": weights, "advantages": batch.advantages, **terms}

    def _check_selection(self, batch: RolloutBatch) -> None:
        """Raise ConfigError if the batch lacks a mask of selected tokens that the settings require."""
        needs = {
            "high_entropy": self.rl.top_entropy_quantile < 1,
            "selected": isinstance(self._loss, SelectiveLoss),
        }
        for name in (name for name, is_needed in needs.items() if is_needed and getattr(batch, name) is None):
            raise ConfigError(
                f"the batch has no {name}, which rl.loss_type {self.rl.loss_type} and rl.top_entropy_quantile "
                f"{self.rl.top_entropy_quantile} need; call megalith.rl.select_tokens before the step"
            )

    def _entropy_weights(self, batch: RolloutBatch, weights: Tensor) -> Tensor:
        """Return each token's weight in the entropy bonus, float [batch, seq].

        `weights` are the weights in the policy loss, returned if rl.entropy_aggregation is "loss".
        """
        if self.rl.entropy_aggregation == "loss":
            return weights
        if batch.entropy_weights is not None:
            return batch.entropy_weights
        return entropy_weight(self.rl, batch.sequence_tokens).to(weights.dtype).expand(weights.shape)

    @torch.no_grad()
    def observe(self, logprobs: Tensor, entropy: Tensor | None, batch: RolloutBatch) -> None:
        rl, sequences, advantages, terms = (
            self.rl,
            Sequences.from_batch(batch),
            batch.advantages,
            self._terms(batch),
        )
        masked = sequences.masked
        logprobs, rollout = masked(logprobs), masked(batch.rollout_logprobs)
        old = _old_logprobs(logprobs, terms)
        ratio = log_ratio(rl, logprobs, old, sequences).exp()
        zero = torch.zeros_like(ratio)
        kl = kl_losses(rl, logprobs, terms["reference"], ratio) if rl.loss_beta else zero
        drift = (1 + len(self.DRIFT)) * [zero]
        if rollout is not None:
            trainer = logprobs if batch.old_logprobs is None else old
            difference = trainer - rollout
            compared = ~difference.isnan()
            difference = difference.nan_to_num(nan=0.0)
            size, k3 = difference.abs(), difference.expm1() - difference
            drift = [compared, size, compared * size.exp(), k3, size > 1]
            self._record_largest_drift(difference, trainer, rollout)
        lowest, highest = self._loss.clip_bounds(rl)
        clips = (ratio < lowest) & (advantages < 0), (ratio > highest) & (advantages > 0)
        each = torch.ones_like(ratio), ratio, *clips, kl, zero if entropy is None else entropy, *drift
        self.add_metrics([masked(x) for x in each])

    def means(self, sums: Tensor) -> dict[str, float | None]:
        """Return the metrics as means over all tokens.

        Metrics in DRIFT are means over the compared tokens, or None without any.
        """
        means: dict[str, float | None] = dict(super().means(sums))
        compared = means.pop("compared")
        return means | {name: means[name] / compared if compared else None for name in self.DRIFT}

    def _record_largest_drift(self, difference: Tensor, trainer: Tensor, rollout: Tensor) -> None:
        """Record the token of this micro-batch where trainer and engine differ most, on the device."""
        index = difference.abs().flatten().argmax()
        values = [x.flatten()[index].double() for x in (trainer, rollout)]
        self._largest_drifts.append(torch.stack([index.double(), *values]))

    def take_largest_drifts(self) -> Tensor | None:
        """Return and clear the largest drift of each micro-batch, float64 [micro-batches, 3]; None if this rank has
        computed no loss since the last call.

        The columns are the token's index into the flattened [batch, seq], the trainer's log-probability and the
        rollout's.
        """
        largest, self._largest_drifts = self._largest_drifts, []
        return torch.stack(largest) if largest else None


def _old_logprobs(logprobs: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
    """Return the old policy's log-probabilities, float32 [batch, seq], without gradient.

    Tokens without an old log-probability get the trained policy's. With proximal weight α, the result is log π_rollout
    + α (log π − log π_rollout), AReaL's log-linear proximal policy.
    """
    current = logprobs.detach()
    if "proximal_weight" in tokens:
        rollout = torch.where(tokens["rollout"].isnan(), current, tokens["rollout"])
        return torch.lerp(rollout, current, tokens["proximal_weight"].to(current.dtype))
    return torch.where(tokens["old"].isnan(), current, tokens["old"]) if "old" in tokens else current
