"""Settings of GRPO's policy loss (docs/grpo_objective.md). Names and defaults are TRL's where TRL has the setting."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megalith.config.base import Decides, RequiresSetting, Section

MISMATCH_BOUNDS: dict[str, tuple[float | None, float]] = {
    "token_truncate": (None, 2.0),  # truncated importance sampling; verl, NeMo-RL
    "token_mask": (0.5, 5.0),  # IcePop
    "sequence_truncate": (None, 2.0),  # verl
    "sequence_mask": (None, 3.0),  # TRL
    "geometric_mask": (0.999, 1.002),  # NeMo-RL's seq-mask-tis
    "token_unbounded": (None, math.inf),  # NeMo-RL without a truncation
    "sequence_unbounded": (None, math.inf),
}


class PolicyLossSettings(Section):
    """Policy loss, KL, entropy, and weights for the difference between engine and trainer. Part of section `rl`."""

    decides: ClassVar[Decides] = Decides.UPDATES
    requires: ClassVar[RequiresSetting] = RequiresSetting("prompts_or_rollouts")

    loss_type: str = "dapo"
    """Policy loss and how it is averaged. PPO's clip: dapo (mean over tokens), token_sum (sum over tokens), grpo (mean
    of the sequences' means), luspo (mean of the sequences' sums), dr_grpo (constant divisor). Mean over tokens, without
    PPO's clip: cispo (capped ratio), vespo (smooth function of the sequence's ratio), gpg (no ratio), reinforce
    (bounded ratio to the rollout's policy). Mean over tokens, with other terms for tokens of high covariance: kl_cov,
    clip_cov. Mean over sequences: sapo (sigmoid of the ratio), gmpo (geometric mean of the sequence's clipped ratios).
    Preferences between the two completions of a prompt: online_dpo, online_ipo. Your own: path.py:object. See
    docs/grpo_objective.md."""

    count_masked_sequences: bool | None = None
    """Count sequences without a token in the loss in the divisor of grpo, luspo and dr_grpo, as TRL and verl
    do and NeMo-RL does not. Default: on, unless filter_zero_std is set."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per token, or the geometric mean over the sequence (GSPO)."""

    epsilon: NonNegativeFloat = 0.2
    """The ratio is clipped at 1 − epsilon."""

    epsilon_high: NonNegativeFloat | None = None
    """The ratio is clipped at 1 + epsilon_high. Default: epsilon. With cispo it is the cap itself and is
    required: 5 (TRL), or 1.28 (clip_ratio_high 0.28 of verl and NeMo-RL)."""

    cispo_ratio_min: Annotated[
        NonNegativeFloat | None, RequiresSetting("loss_type", "cispo", strict=True)
    ] = None
    """Minimum ratio with cispo: 1 − clip_ratio_low of verl and NeMo-RL. Default: none, as in TRL."""

    sapo_temperature_pos: Annotated[PositiveFloat, RequiresSetting("loss_type", "sapo")] = 1.0
    """τ of sapo for positive advantages: the larger it is, the faster the gate falls as the ratio departs from 1."""

    sapo_temperature_neg: Annotated[PositiveFloat, RequiresSetting("loss_type", "sapo")] = 1.05
    """τ of sapo for zero and negative advantages."""

    vespo_k_pos: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "vespo")] = 2.0
    """k in vespo's weight w^k · exp(λ · (1 − w)) for advantages of at least 0."""

    vespo_lambda_pos: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "vespo")] = 3.0
    """λ in vespo's weight for advantages of at least 0."""

    vespo_k_neg: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "vespo")] = 3.0
    """k in vespo's weight for negative advantages."""

    vespo_lambda_neg: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "vespo")] = 2.0
    """λ in vespo's weight for negative advantages."""

    kl_cov_ratio: Annotated[float, Field(gt=0, le=1), RequiresSetting("loss_type", "kl_cov")] = 0.0002
    """Fraction of the step's tokens, those with the largest covariance of advantage and log-probability, that
    kl_cov penalizes."""

    ppo_kl_coef: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "kl_cov")] = 0.1
    """Weight of |log ratio| for the tokens that kl_cov penalizes."""

    clip_cov_ratio: Annotated[float, Field(gt=0, le=1), RequiresSetting("loss_type", "clip_cov")] = 0.0002
    """Fraction of the step's tokens that clip_cov excludes from the loss, at random among those with a covariance
    between clip_cov_lb and clip_cov_ub."""

    clip_cov_lb: Annotated[float, RequiresSetting("loss_type", "clip_cov")] = 1.0
    """Lower bound of the covariance of tokens that clip_cov may exclude."""

    clip_cov_ub: Annotated[float, RequiresSetting("loss_type", "clip_cov")] = 5.0
    """Upper bound of the covariance of tokens that clip_cov may exclude."""

    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Compute the policy loss and the entropy bonus only on this fraction of the step's tokens, those with the
    highest entropy. 1: all."""

    off_policy_mask_threshold: NonNegativeFloat | None = None
    """Exclude sequences with a negative advantage from the policy loss if the mean over their tokens of log π_rollout
    − log π exceeds this (DeepSeek-V3.2). Default: none."""

    delta: PositiveFloat | None = None
    """Cap of the ratio in the unclipped branch (INTELLECT-2). It must exceed 1 + epsilon_high."""

    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: for negative advantages, the loss is at most this times their magnitude."""

    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference, the run's initial weights. 0: no KL. With online_dpo and
    online_ipo, β of the preference loss."""

    kl_estimator: Annotated[Literal["k1", "k2", "k3"], RequiresSetting("beta", greater_than=0)] = "k3"
    """With d = log π_ref − log π: −d (k1), d² / 2 (k2), or exp(d) − d − 1 (k3)."""

    use_bias_correction_kl: Annotated[bool, RequiresSetting("beta", greater_than=0)] = True
    """Multiply the KL by the ratio to the old policy, which makes its gradient unbiased."""

    kl_score_gradient: Annotated[bool, RequiresSetting("beta", greater_than=0)] = False
    """Multiply the KL by exp(log π − sg[log π]), which adds the gradient of the sampling distribution (NeMo-RL)."""

    kl_input_clamp_value: Annotated[PositiveFloat | None, RequiresSetting("beta", greater_than=0)] = None
    """Clamp log π_ref − log π to ± this (NeMo-RL; 20 in verl's k3). Default: no clamp, as in TRL."""

    kl_output_clamp_value: Annotated[PositiveFloat | None, RequiresSetting("beta", greater_than=0)] = None
    """Clamp the KL of a token to ± this (NeMo-RL; 10 in verl's k3). Default: no clamp, as in TRL."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, subtracted from the loss."""

    use_adaptive_entropy: bool = False
    """Change the weight of the entropy bonus by entropy_coef_delta per step, from entropy_coef on: up if the mean
    entropy is at most entropy_target, otherwise down. A step after a higher entropy has no bonus."""

    entropy_coef_min: Annotated[float, RequiresSetting("use_adaptive_entropy", True)] = 0.0
    """Lower bound of the entropy bonus's adaptive weight."""

    entropy_coef_max: Annotated[float, RequiresSetting("use_adaptive_entropy", True)] = 1.0
    """Upper bound of the entropy bonus's adaptive weight."""

    entropy_coef_delta: Annotated[NonNegativeFloat, RequiresSetting("use_adaptive_entropy", True)] = 0.005
    """Change of the adaptive weight per step."""

    entropy_target: Annotated[NonNegativeFloat, RequiresSetting("use_adaptive_entropy", True)] = 0.2
    """Mean entropy per token below which the entropy bonus's adaptive weight grows."""

    entropy_aggregation: Annotated[Literal["tokens", "loss"], RequiresSetting("has_entropy_bonus", True)] = (
        "tokens"
    )
    """Average the entropy over the step's tokens for every loss_type (TRL), or aggregate it like the loss (verl)."""

    log_entropy: Annotated[bool, Decides.NOTHING] = True
    """Log the entropy even if the loss does not use it."""

    vllm_importance_sampling_correction: bool = True
    """Weight the loss by exp(log π_old − log π_rollout), if the rollouts have log-probabilities."""

    vllm_importance_sampling_mode: Annotated[
        Literal[
            "token_truncate",
            "token_mask",
            "token_unbounded",
            "sequence_truncate",
            "sequence_mask",
            "sequence_unbounded",
            "geometric_mask",
        ],
        RequiresSetting("vllm_importance_sampling_correction", True),
    ] = "token_truncate"
    """Weight per token or per sequence. Outside the bounds, truncate caps the weight and mask sets it to 0. unbounded:
    no bounds. geometric_mask: per token, and 0 if the geometric mean over the sequence is outside the bounds."""

    vllm_importance_sampling_clip_max: Annotated[
        PositiveFloat | None, RequiresSetting("vllm_importance_sampling_correction", True)
    ] = None
    """Upper bound of the importance sampling weight. Default: 2 for token_truncate and sequence_truncate, 5 for
    token_mask (IcePop), 3 for sequence_mask (TRL), 1.002 for geometric_mask (NeMo-RL)."""

    vllm_importance_sampling_clip_min: Annotated[
        NonNegativeFloat | None, RequiresSetting("vllm_importance_sampling_correction", True)
    ] = None
    """Lower bound of the importance sampling weight. Default: none, as in TRL; if the upper bound is absent too, 0.5
    for token_mask and 0.999 for geometric_mask."""

    rollout_is_batch_normalize: Annotated[
        bool, RequiresSetting("vllm_importance_sampling_correction", True)
    ] = False
    """Divide the importance sampling weight by its mean over the rollout batch (verl)."""

    rollout_rs: str | None = None
    """Reject tokens or sequences by how far the trainer's probabilities are from the engine's (verl): token_k1 to k3,
    seq_sum_k1 to k3, seq_mean_k1 to k3, seq_max_k2, seq_max_k3, or several separated by commas. With
    old_logprobs policy, rejected tokens count neither in the loss nor in its divisor; with rollout they still count in
    the divisor."""

    rollout_rs_threshold: Annotated[float | str | None, RequiresSetting("rollout_rs", strict=True)] = None
    """Largest divergence that is kept, or one per criterion separated by commas. For k1 the bounds of the ratio as
    lower_upper; if only an upper bound is given, the lower bound is its inverse."""

    use_decoupled_loss: bool = False
    """AReaL's decoupled PPO: clip around a proximal policy (the trainer's before the rollout batch) and
    weight each token's loss by π_proximal / π_rollout. Replaces vllm_importance_sampling_*."""

    behav_imp_weight_cap: Annotated[
        float | None, Field(gt=1), RequiresSetting("use_decoupled_loss", True)
    ] = None
    """Exclude tokens whose weight exceeds this (AReaL). Default: no bound, as published."""

    prox_logp_method: Annotated[
        Literal["recompute", "loglinear"], RequiresSetting("use_decoupled_loss", True)
    ] = "recompute"
    """Proximal policy (AReaL): recompute it with forward passes before the rollout batch, or interpolate
    between the engine's and the policy's log-probabilities by weight version (loglinear)."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _refuse_bnpo(cls, value: Any) -> Any:
        if value == "bnpo":
            text = (
                "it divides by each micro-batch's tokens, so the run would depend on the layout; choose dapo"
            )
            raise PydanticCustomError("bnpo", text)
        return value

    @property
    def has_entropy_bonus(self) -> bool:
        """True if the loss has an entropy bonus."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy

    @property
    def loss_beta(self) -> float:
        """Weight of the KL in the loss."""
        return 0.0 if self.use_kl_in_reward or self.compares_completions else self.beta

    @property
    def compares_completions(self) -> bool:
        """True if the loss compares the two completions of a prompt."""
        return self.loss_type in ("online_dpo", "online_ipo")

    @property
    def upper_epsilon(self) -> float:
        """Distance above 1 at which the ratio is clipped; with cispo, the cap itself."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def mismatch_bounds(self) -> tuple[float | None, float]:
        """Lower and upper bound of the mismatch weight, as set or the mode's defaults."""
        if self.use_decoupled_loss:
            return None, self.behav_imp_weight_cap or math.inf
        low, high = MISMATCH_BOUNDS[self.vllm_importance_sampling_mode]
        clip_min, clip_max = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if clip_min is None and clip_max is None:
            return low, high
        return clip_min, high if clip_max is None else clip_max

    @property
    def mismatch_mode(self) -> str | None:
        """Mode of the weight exp(log π_old − log π_rollout). None means no weight."""
        if self.use_decoupled_loss:
            return "token_mask"
        return self.vllm_importance_sampling_mode if self.vllm_importance_sampling_correction else None

    @property
    def normalizes_mismatch(self) -> bool:
        """True if the mismatch weights are divided by their mean."""
        return self.rollout_is_batch_normalize and self.mismatch_mode is not None

    @property
    def rejects_in_loss(self) -> bool:
        """True if rollout_rs rejects tokens in the loss, by the ratio of the trained policy (verl's bypass mode)."""
        return self.rollout_rs is not None and self.old_logprobs == "rollout"
