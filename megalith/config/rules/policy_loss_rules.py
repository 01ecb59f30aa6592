"""Rules of GRPO's losses: clips, pairs of completions, and weights for the difference between engine and trainer."""

from __future__ import annotations

from megalith.config.rl import RlConfig
from megalith.config.rules.rejection import rejection_criteria
from megalith.config.run import RunConfig
from megalith.errors import ConfigError

OTHER_RATIOS: dict[str, str | None] = {
    "cispo": "caps each token's ratio",
    "sapo": None,
    "gpg": "has no ratio",
    "reinforce": "has a weight of its own",
    "online_dpo": "has no ratio to the old policy",
    "online_ipo": "has no ratio to the old policy",
    "kl_cov": "selects tokens",
    "clip_cov": "selects tokens",
    "gmpo": "clips each token's ratio before its mean over the sequence",
    "vespo": "multiplies the ratios of a sequence",
}
"""Values of rl.loss_type without PPO's clip, and the reason against importance_sampling_level sequence, if any."""


def check_clips(config: RunConfig) -> None:
    rl = config.rl
    if rl.epsilon > 1:
        raise ConfigError(
            f"rl.epsilon is {rl.epsilon}, so the ratio's lower bound 1 − rl.epsilon is below 0, which a "
            "ratio never reaches; choose at most 1"
        )
    if rl.delta is not None and rl.delta <= 1 + rl.upper_epsilon and rl.loss_type not in OTHER_RATIOS:
        raise ConfigError(
            f"rl.delta {rl.delta} is not above 1 + epsilon_high = {1 + rl.upper_epsilon}, so it would never take "
            "effect; raise rl.delta, or leave it out"
        )
    if rl.loss_type in OTHER_RATIOS:
        unread = {"delta": rl.delta, "clip_ratio_c": rl.clip_ratio_c}
        for name in (name for name, value in unread.items() if value is not None):
            raise ConfigError(
                f"rl.{name} is {unread[name]}, but rl.loss_type {rl.loss_type} does not use PPO's clip; leave "
                f"rl.{name} out"
            )
        if rl.importance_sampling_level == "sequence" and (ratio := OTHER_RATIOS[rl.loss_type]):
            raise ConfigError(
                f"rl.importance_sampling_level is sequence, but rl.loss_type {rl.loss_type} {ratio}; set "
                "rl.importance_sampling_level to token"
            )
    if rl.loss_type == "cispo":
        _check_cispo_bounds(rl)
    if rl.clip_cov_lb >= rl.clip_cov_ub:
        raise ConfigError(
            f"rl.clip_cov_lb {rl.clip_cov_lb} is not below rl.clip_cov_ub {rl.clip_cov_ub}, so no token would be "
            "excluded; lower rl.clip_cov_lb, or raise rl.clip_cov_ub"
        )
    if rl.loss_type == "gmpo" and rl.top_entropy_quantile < 1:
        raise ConfigError(
            f"rl.top_entropy_quantile is {rl.top_entropy_quantile}, but rl.loss_type gmpo has one ratio per "
            "sequence, not per token; leave rl.top_entropy_quantile out"
        )
    if rl.loss_type == "vespo" and (mode := rl.mismatch_mode) and not mode.startswith("token"):
        raise ConfigError(
            f"rl.vllm_importance_sampling_mode is {mode}, but rl.loss_type vespo multiplies the weights of a "
            "sequence's tokens; set rl.vllm_importance_sampling_mode to token_truncate or token_mask"
        )
    if rl.use_decoupled_loss and rl.old_logprobs == "rollout":
        raise ConfigError(
            "rl.use_decoupled_loss is set, but with rl.old_logprobs rollout the proximal policy would be the "
            "sampling policy, so nothing would be decoupled; leave one of the two settings out"
        )
    clips = rl.vllm_importance_sampling_clip_min, rl.vllm_importance_sampling_clip_max
    if rl.use_decoupled_loss and clips != (None, None):
        raise ConfigError(
            f"rl.vllm_importance_sampling_clip_min is {clips[0]} and rl.vllm_importance_sampling_clip_max "
            f"{clips[1]}, but with rl.use_decoupled_loss the weight's only bound is rl.behav_imp_weight_cap; set "
            "rl.behav_imp_weight_cap instead, or leave rl.use_decoupled_loss out"
        )
    if rl.interpolates_old_logprobs and rl.rollouts:
        raise ConfigError(
            "rl.prox_logp_method is loglinear, but rl.rollouts are from another run, whose weight versions do not "
            "apply to this one; set rl.prox_logp_method to recompute"
        )
    if rl.vllm_importance_sampling_mode.endswith("_unbounded") and clips != (None, None):
        raise ConfigError(
            f"rl.vllm_importance_sampling_mode is {rl.vllm_importance_sampling_mode}, which has no bounds, but "
            f"rl.vllm_importance_sampling_clip_min is {clips[0]} and rl.vllm_importance_sampling_clip_max "
            f"{clips[1]}; choose a mode with bounds, or leave the two bounds out"
        )
    low, high = rl.mismatch_bounds
    if low is not None and low > high:
        raise ConfigError(
            f"rl.vllm_importance_sampling_clip_min {low} is above rl.vllm_importance_sampling_clip_max {high} "
            f"({rl.vllm_importance_sampling_mode}); lower the first, or raise the second"
        )


def check_pairs(config: RunConfig) -> None:
    """Raise ConfigError if a loss of pairs of completions cannot be computed."""
    rl = config.rl
    if rl.num_generations != 2 or config.train.global_batch_size % 2:
        raise ConfigError(
            f"rl.loss_type is {rl.loss_type}, which compares two completions of a prompt, but rl.num_generations is "
            f"{rl.num_generations} and train.global_batch_size {config.train.global_batch_size}; set "
            "rl.num_generations to 2, and train.global_batch_size to an even number"
        )
    if not rl.beta:
        raise ConfigError(
            f"rl.loss_type is {rl.loss_type}, but rl.beta, the β of its formula, is 0; set rl.beta, for example to "
            "0.1"
        )
    others = {
        "mask_truncated_completions": rl.mask_truncated_completions,
        "max_staleness": rl.max_staleness,
        "rollout_rs": rl.rollout_rs is not None,
        "use_kl_in_reward": rl.use_kl_in_reward,
        "teacher": rl.teacher is not None,
        "off_policy_mask_threshold": rl.off_policy_mask_threshold is not None,
        "top_entropy_quantile": rl.top_entropy_quantile < 1,
        "importance_sampling_level": rl.importance_sampling_level == "sequence",
        "advantage_estimator": rl.uses_critic,
        "agent": bool(rl.agent),
        "tools": bool(rl.tools),
        "environment": bool(rl.environment),
    }
    if used := [name for name, is_used in others.items() if is_used]:
        raise ConfigError(
            f"rl.loss_type is {rl.loss_type}, a loss of pairs of completions, to which rl.{used[0]} does not apply; "
            f"leave rl.{used[0]} out"
        )


def check_rollout_correction(rl: RlConfig) -> None:
    """Raise ConfigError if rejection or normalized mismatch weights cannot be computed."""
    if rl.rollout_rs is not None:
        rejection_criteria(rl.rollout_rs, rl.rollout_rs_threshold)
    if rl.normalizes_mismatch and (rl.old_logprobs == "rollout" or rl.loss_type == "reinforce"):
        raise ConfigError(
            "rl.rollout_is_batch_normalize needs importance weights that are fixed for the whole step, but with "
            f"rl.old_logprobs {rl.old_logprobs} and rl.loss_type {rl.loss_type} they change during the step; set "
            "rl.rollout_is_batch_normalize to false"
        )
    if rl.corrects_batches and (rl.interpolates_old_logprobs or rl.uses_critic):
        other = "advantage_estimator is gae" if rl.uses_critic else "prox_logp_method is loglinear"
        raise ConfigError(
            f"rl.{other}, but rl.rollout_rs and rl.rollout_is_batch_normalize do not support it; change "
            f"rl.{other.split()[0]}, or leave rl.rollout_rs and rl.rollout_is_batch_normalize out"
        )


def _check_cispo_bounds(rl: RlConfig) -> None:
    if rl.epsilon_high is None:
        raise ConfigError(
            "rl.loss_type is cispo, but rl.epsilon_high, the cap of its ratio, is not set, and "
            f"epsilon ({rl.epsilon:g}) would cap every token; set rl.epsilon_high to 5 (TRL's "
            "recommendation), or rl.clip_ratio_high to 0.28 (verl's and NeMo-RL's spelling of a cap of 1.28)"
        )
    if rl.cispo_ratio_min is not None and rl.cispo_ratio_min > rl.epsilon_high:
        raise ConfigError(
            f"rl.cispo_ratio_min {rl.cispo_ratio_min} is above rl.epsilon_high {rl.epsilon_high}, the cap of the "
            "same ratio; lower rl.cispo_ratio_min, or raise rl.epsilon_high"
        )
