"""GRPO's objective and its kin: a loss of log-probabilities, by the formulas of docs/grpo_objective.md.

Everything here is a pure function of tensors that stand alike, [batch, seq], one number a token. Rows may hold several
sequences (packing), so what is of a sequence is found by `numbers`: each token's sequence within the micro-batch. With
that a sum over a sequence is the same function for padded and for packed rows.

A step's loss is Σ over all micro-batches / a global count, known before the first backward: tokens, or sequences.
The division by a sequence's own tokens happens here, for a sequence is never cut between micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.config.rl import RlConfig
from megalith.data.batch import Batch
from megalith.rl.summed_loss import SummedLoss


@dataclass
class RolloutBatch(Batch):
    """Completions behind their prompts; `loss_mask` is 1 where the label is a completion's token in the loss.

    Without `old_logprobs` the old policy is the one that is trained: the ratio is 1, with its gradient.
    """

    advantages: Tensor  # float32 [batch, seq], that of the token's sequence
    numbers: Tensor  # int64 [batch, seq], of the token's sequence within the micro-batch; 0 for what fills up
    sequence_tokens: Tensor  # float32 [sequences], the tokens in the loss of each; 0 for one without
    rollout_logprobs: Tensor | None = None  # float32 [batch, seq], the engine's
    old_logprobs: Tensor | None = None  # float32 [batch, seq]
    reference_logprobs: Tensor | None = None  # float32 [batch, seq]
    proximal: Tensor | None = None  # float32 [batch, seq], the old policy's place: 0 the rollout's, 1 ours
    entropy_weights: Tensor | None = (
        None  # float32 [batch, seq], see entropy_weight; None: of this micro-batch alone
    )


@dataclass(frozen=True)
class Sequences:
    """Which tokens of [batch, seq] are in the loss, and whose they are."""

    mask: Tensor  # bool [batch, seq]
    numbers: Tensor  # int64 [batch, seq]
    tokens: Tensor  # float [sequences], one at least

    @classmethod
    def of(cls, batch: RolloutBatch) -> Sequences:
        """Those of a micro-batch; one without a sequence gets one without tokens."""
        tokens = batch.sequence_tokens
        return cls(batch.loss_mask > 0, batch.numbers, tokens if len(tokens) else tokens.new_zeros(1))

    def inside(self, x: Tensor | None) -> Tensor | None:
        """x at the tokens in the loss, 0 elsewhere: what stands there, of prompts and padding, reaches nothing."""
        return None if x is None else torch.where(self.mask, x, 0.0)

    def sums(self, x: Tensor) -> Tensor:
        """Σ m · x of each sequence: [batch, seq] → [sequences]."""
        masked = self.inside(x).flatten()
        return masked.new_zeros(len(self.tokens)).index_add(0, self.numbers.flatten(), masked)

    def at_tokens(self, x: Tensor) -> Tensor:
        """[sequences] → [batch, seq], each token that of its sequence."""
        return x[self.numbers]

    def means(self, x: Tensor) -> Tensor:
        """Mean over the tokens in the loss of each sequence: [batch, seq] → [sequences], 0 for one without."""
        return self.sums(x) / self.tokens.clamp(min=1)


def log_ratio(rl: RlConfig, logprobs: Tensor, old: Tensor, sequences: Sequences | None) -> Tensor:
    """log π − log π_old of each token, or at level `sequence` its mean over the token's sequence (GSPO)."""
    ratio = logprobs - old
    if rl.importance_sampling_level == "sequence":
        return sequences.at_tokens(sequences.means(ratio))
    return ratio


def policy_losses(rl: RlConfig, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The policy's part of each token's loss, [batch, seq]: PPO's clipped ratio, or CISPO's weighted logarithm."""
    if rl.loss_type == "cispo":
        return -ratio.detach().clamp(rl.cispo_ratio_min, rl.upper_epsilon) * advantages * logprobs
    clipped = ratio.clamp(1 - rl.epsilon, 1 + rl.upper_epsilon)
    free = ratio if rl.delta is None else ratio.clamp(max=rl.delta)
    losses = -torch.min(free * advantages, clipped * advantages)
    if rl.clip_ratio_c is not None:
        most = -rl.clip_ratio_c * advantages
        losses = torch.where(advantages < 0, torch.min(losses, most), losses)
    return losses


def kl_losses(rl: RlConfig, logprobs: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    """The estimate of KL(π ‖ π_ref) at each token, [batch, seq]; `ratio` is the policy loss's, as in TRL.

    Clamps are those of verl's k3 and of NeMo-RL: beyond them a token has no gradient.
    """
    d = reference - logprobs
    inside = torch.ones_like(d, dtype=torch.bool)
    if (bound := rl.kl_input_clamp_value) is not None:
        inside, d = d.abs() <= bound, d.clamp(-bound, bound)
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
        kl = kl * torch.where(inside, score, score.detach())
    return kl if (bound := rl.kl_output_clamp_value) is None else kl.clamp(-bound, bound)


def mismatch_weights(rl: RlConfig, old: Tensor, rollout: Tensor, sequences: Sequences | None) -> Tensor:
    """exp(log π_old − log π_rollout) within its bounds, [batch, seq], without a gradient: what engine and trainer
    compute differently. At level `sequence` of the sum over the sequence; at level `geometric` each token's, where the
    mean over its sequence is within them. A log-probability that is NaN counts as equal."""
    level, _, beyond = rl.mismatch_mode.partition("_")
    gap = (old - rollout).detach().nan_to_num(nan=0.0)
    gap = sequences.at_tokens(sequences.sums(gap)) if level == "sequence" else gap
    weights, (low, high) = gap.exp(), rl.mismatch_bounds
    if beyond == "unbounded":
        return weights.nan_to_num(posinf=0.0)  # as NeMo-RL
    if beyond == "truncate":
        return weights.clamp(low, high)
    bounded = sequences.at_tokens(sequences.means(gap)).exp() if level == "geometric" else weights
    inside = bounded <= high
    if low is not None:
        inside &= bounded >= low
    return torch.where(inside, weights, 0.0)


def token_weights(rl: RlConfig, sequences: Sequences, dtype: torch.dtype = torch.float32) -> Tensor:
    """What each token's loss counts in the numerator of the step's loss, [batch, seq]; see `divisor`."""
    weights = sequences.mask.to(dtype)
    return weights / sequences.at_tokens(sequences.tokens.clamp(min=1)) if rl.loss_type == "grpo" else weights


def divisor(rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
    """What it adds to the denominator, from the tokens in the loss of each of its sequences.

    Tokens for dapo and cispo, sequences for grpo and luspo, a constant for each of them for dr_grpo.
    """
    if rl.loss_type in ("dapo", "cispo"):
        return sequence_tokens.sum(dtype=torch.float64)
    counted = torch.ones_like(sequence_tokens) if rl.counts_masked_sequences else sequence_tokens > 0
    return counted.sum(dtype=torch.float64) * (rl.max_completion_length if rl.loss_type == "dr_grpo" else 1)


def entropy_weight(rl: RlConfig, sequence_tokens: Tensor) -> Tensor:
    """Return the weight of a token's entropy in the numerator of a step with these sequences, a float64 scalar.

    Divided by the step's divisor, the weighted sum is the mean over the tokens.
    """
    return divisor(rl, sequence_tokens) / sequence_tokens.sum(dtype=torch.float64).clamp(min=1)


class PolicyLoss(SummedLoss):
    """The step's loss by a section `rl`, for `ParallelModel.backward` with micro-batches of RolloutBatch."""

    DRIFT = ("drift", "mismatch", "drift_k3", "drift_above_1")
    """Means over the tokens that engine and trainer both have a log-probability of."""
    FIGURES = ("tokens", "ratio", "clip_low", "clip_high", "kl", "entropy", "compared", *DRIFT)

    def __init__(self, rl: RlConfig, vocab_size: int | None = None):
        self.rl, self.vocab_size = rl, vocab_size
        self.temperature = rl.temperature
        self.needs_entropy = rl.entropy_coef != 0 or rl.log_entropy
        self._largest: list[Tensor] = []

    def denominator(self, batch: RolloutBatch) -> Tensor:
        return divisor(self.rl, batch.sequence_tokens)

    def tokens(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        """None where a sum over the sequence of this pass's log-probabilities comes first: GSPO's ratio, and a
        mismatch weight that looks at the sequence where the old policy is the one that is trained."""
        found, sequences = self._read(batch), Sequences.of(batch)
        if self.rl.importance_sampling_level == "sequence":
            return None
        if "rollout" in found and not self.rl.mismatch_mode.startswith("token"):
            if "old" not in found:
                return None
            found["mismatch"] = mismatch_weights(self.rl, found["old"], found.pop("rollout"), sequences)
        return found

    def token_losses(
        self,
        logprobs: Tensor,
        entropy: Tensor | None,
        tokens: Mapping[str, Tensor],
        sequences: Sequences | None = None,  # where they are needed, and the tokens are a whole micro-batch
    ) -> Tensor:
        rl, logprobs = self.rl, torch.where(tokens["mask"], logprobs, 0.0)
        old, mismatch = _old(logprobs, tokens), tokens.get("mismatch")
        ratio = log_ratio(rl, logprobs, old, sequences).exp()
        losses = policy_losses(rl, ratio, logprobs, tokens["advantages"])
        if "rollout" in tokens:
            mismatch = mismatch_weights(rl, old, tokens["rollout"], sequences)
        losses = losses if mismatch is None else losses * mismatch
        if rl.beta:
            losses = losses + rl.beta * kl_losses(rl, logprobs, tokens["reference"], ratio)
        losses = losses * tokens["weights"]
        if rl.entropy_coef:
            losses = losses - rl.entropy_coef * entropy * tokens["entropy_weights"]
        return torch.where(tokens["mask"], losses, 0.0)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: RolloutBatch) -> Tensor:
        losses = self.token_losses(logprobs, entropy, self._read(batch), Sequences.of(batch))
        self.observe(logprobs, entropy, batch)
        return losses.sum()

    def _read(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """What a token's loss is made of, [batch, seq] each, 0 where nothing is in the loss: `rollout` where its
        mismatch is corrected, `old` where it is not the policy that is trained, `proximal` where it is between both."""
        rl, sequences = self.rl, Sequences.of(batch)
        old, rollout = batch.old_logprobs, batch.rollout_logprobs
        if old is None and rl.old_logprobs == "rollout":
            old = rollout
        found = {"old": old, "reference": batch.reference_logprobs if rl.beta else None}
        found["rollout"] = rollout if rl.mismatch_mode else None
        found["proximal"] = batch.proximal
        found = {name: sequences.inside(x) for name, x in found.items() if x is not None}
        weights = token_weights(rl, sequences, batch.advantages.dtype)
        if rl.entropy_coef:
            found["entropy_weights"] = self._entropy_weights(batch, weights)
        return {"mask": sequences.mask, "weights": weights, "advantages": batch.advantages, **found}

    def _entropy_weights(self, batch: RolloutBatch, weights: Tensor) -> Tensor:
        """float [batch, seq]; `weights` are those of the losses."""
        if self.rl.entropy_aggregation == "loss":
            return weights
        if batch.entropy_weights is not None:
            return batch.entropy_weights
        return entropy_weight(self.rl, batch.sequence_tokens).to(weights.dtype).expand(weights.shape)

    @torch.no_grad()
    def observe(self, logprobs: Tensor, entropy: Tensor | None, batch: RolloutBatch) -> None:
        rl, sequences, a, known = self.rl, Sequences.of(batch), batch.advantages, self._read(batch)
        inside = sequences.inside
        logprobs, rollout = inside(logprobs), inside(batch.rollout_logprobs)
        old = _old(logprobs, known)
        ratio = log_ratio(rl, logprobs, old, sequences).exp()
        zero = torch.zeros_like(ratio)
        kl = kl_losses(rl, logprobs, known["reference"], ratio) if rl.beta else zero
        differs = (1 + len(self.DRIFT)) * [zero]
        if rollout is not None:
            mine = logprobs if batch.old_logprobs is None else old
            gap = mine - rollout
            compared = ~gap.isnan()
            gap = gap.nan_to_num(nan=0.0)
            differs = [compared, gap.abs(), compared * gap.abs().exp(), gap.expm1() - gap, gap.abs() > 1]
            self._add_largest(gap, mine, rollout)
        lowest = (rl.cispo_ratio_min or 0.0) if rl.loss_type == "cispo" else 1 - rl.epsilon
        highest = rl.upper_epsilon if rl.loss_type == "cispo" else 1 + rl.upper_epsilon
        clips = (ratio < lowest) & (a < 0), (ratio > highest) & (a > 0)
        each = torch.ones_like(ratio), ratio, *clips, kl, zero if entropy is None else entropy, *differs
        self.add_figures([inside(x) for x in each])

    def means(self, sums: Tensor) -> dict[str, float | None]:
        """Of what was taken: over the tokens, those of DRIFT over the compared ones, None where there is none."""
        found: dict[str, float | None] = dict(super().means(sums))
        share = found.pop("compared")
        return found | {name: found[name] / share if share else None for name in self.DRIFT}

    def _add_largest(self, gap: Tensor, mine: Tensor, rollout: Tensor) -> None:
        """Where trainer and engine differ most in this micro-batch, on the device."""
        at = gap.abs().flatten().argmax()
        values = [x.flatten()[at].double() for x in (mine, rollout)]
        self._largest.append(torch.stack([at.double(), *values]))

    def take_largest(self) -> Tensor | None:
        """Of each micro-batch since the last call: index into [batch, seq], log-probability of the trainer and of the
        rollout, float64 [micro-batches, 3]; None as `take_sums`."""
        found, self._largest = self._largest, []
        return torch.stack(found) if found else None


def _old(logprobs: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
    """The old policy's log-probabilities [batch, seq], without a gradient; where there is none, the policy's own.

    With its place α between the rollout's policy and ours it is log π_rollout + α (log π − log π_rollout), AReaL's
    log-linear proximal policy."""
    mine = logprobs.detach()
    if "proximal" in tokens:
        rollout = torch.where(tokens["rollout"].isnan(), mine, tokens["rollout"])
        return torch.lerp(rollout, mine, tokens["proximal"].to(mine.dtype))
    return torch.where(tokens["old"].isnan(), mine, tokens["old"]) if "old" in tokens else mine
