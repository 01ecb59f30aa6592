"""verl's and NeMo-RL's spellings of GRPO's objective that depend on several settings.

A spelling selects the formula of its system, so it also sets that system's defaults, unless the run file sets them.
`settings` returns the settings of a spelling, `defaults` the defaults that are added once all spellings are read. Both
get its value and the section `rl`, which may still contain other spellings. Sources: verl 0.6 to 0.9.1 (core_algos.py,
rollout_corr_helper.py), NeMo-RL 7ea279a (loss_functions.py); docs/grpo_objective.md has the formulas.
"""

from __future__ import annotations

from typing import Any

from megalith.config.rules.spellings import (
    advantage_spellings,
    clip_spellings,
    correction_spellings,
    kl_spellings,
    loss_spellings,
)
from megalith.config.rules.spellings.spelling import ObjectiveSpelling, Rl
from megalith.errors import ConfigError


def _must_be(name: str, value: Any, reason: str) -> ObjectiveSpelling:
    def check(actual: Any, rl: Rl) -> dict[str, Any]:
        if actual != value:
            raise ConfigError(
                f"rl.{name} is {actual!r}, which is not supported: {reason}; leave rl.{name} out"
            )
        return {}

    takes = bool if isinstance(value, bool) else None
    return ObjectiveSpelling(f"rl.{name}", takes, check, note=f"accepted as {str(value).lower()}: {reason}")


def _force_on_policy(value: bool, rl: Rl) -> dict[str, Any]:
    steps = rl.get("mini_batches", 1) * rl.get("num_iterations", rl.get("ppo_epochs", 1))
    if value and (steps != 1 or rl.get("old_logprobs") == "rollout"):
        raise ConfigError(
            "rl.force_on_policy_ratio is true, but the ratio is 1 only with rl.old_logprobs policy and one step per "
            f"rollout batch, and mini_batches × num_iterations is {steps}; leave rl.force_on_policy_ratio out"
        )
    return {}


# fmt: off
OBJECTIVES: dict[str, ObjectiveSpelling] = {
    # verl
    "rl.policy_loss":                             ObjectiveSpelling("rl.loss_type", None, loss_spellings.policy_loss, loss_spellings.loss_defaults, note="as rl.loss_mode, or a mapping with loss_mode"),
    "rl.loss_mode":                               ObjectiveSpelling("rl.importance_sampling_level", tuple(loss_spellings.LOSS_MODES), loss_spellings.loss_mode, loss_spellings.loss_defaults, note="vanilla: PPO's clip with rl.clip_ratio_c 3; gspo: with rl.loss_type grpo; cispo: rl.loss_type cispo, clipped on both sides; geo_mean: rl.loss_type gmpo; sapo, gpg, kl_cov, clip_cov: rl.loss_type of the same name"),
    "rl.tau_pos":                                 ObjectiveSpelling("rl.sapo_temperature_pos", None, lambda value, rl: {"sapo_temperature_pos": value}),
    "rl.tau_neg":                                 ObjectiveSpelling("rl.sapo_temperature_neg", None, lambda value, rl: {"sapo_temperature_neg": value}),
    # NeMo-RL
    "rl.use_cispo":                               ObjectiveSpelling("rl.loss_type", bool, loss_spellings.use_cispo, loss_spellings.cispo_bounds, note="cispo, clipped on both sides"),
    "rl.sequence_level_importance_ratios":        ObjectiveSpelling("rl.importance_sampling_level", bool, loss_spellings.sequence_ratios, loss_spellings.mean_of_sequences, note="true: sequence, with rl.loss_type grpo"),
    "rl.token_level_loss":                        ObjectiveSpelling("rl.loss_type", bool, loss_spellings.token_level_loss, note="true: dapo (or cispo); false: grpo"),
    # verl
    "rl.loss_agg_mode":                           ObjectiveSpelling("rl.loss_type", tuple(loss_spellings.AGGREGATIONS), loss_spellings.aggregation, note="; ".join(f"{name}: {ours}" for name, ours in loss_spellings.AGGREGATIONS.items())),
    "rl.loss_scale_factor":                       ObjectiveSpelling("rl.loss_scale_factor", None, loss_spellings.scale_factor, note="accepted only if it equals rl.max_completion_length"),
    "rl.clip_ratio":                              ObjectiveSpelling("rl.epsilon", None, clip_spellings.clip, clip_spellings.other_clip_and_dual_clip, note="sets both bounds, unless clip_ratio_low or clip_ratio_high is set; rl.clip_ratio_c is 3 unless set"),
    "rl.clip_ratio_low":                          ObjectiveSpelling("rl.epsilon", None, clip_spellings.clip_low, clip_spellings.other_clip_and_dual_clip, note="with cispo, 1 − its value is rl.cispo_ratio_min; the other bound is 0.2 and rl.clip_ratio_c 3 unless set"),
    "rl.clip_ratio_high":                         ObjectiveSpelling("rl.epsilon_high", None, clip_spellings.clip_high, clip_spellings.other_clip_and_dual_clip, note="with cispo, 1 + its value; rl.clip_ratio_c is 3 unless set"),
    # NeMo-RL, and Oumi's
    "rl.ratio_clip_min":                          ObjectiveSpelling("rl.epsilon", None, clip_spellings.clip_low, clip_spellings.other_clip, note="with cispo, 1 − its value is rl.cispo_ratio_min; the other bound is 0.2 unless set"),
    "rl.ratio_clip_max":                          ObjectiveSpelling("rl.epsilon_high", None, clip_spellings.clip_high, clip_spellings.other_clip, note="with cispo, 1 + its value"),
    "rl.clamp_eps_lower":                         ObjectiveSpelling("rl.epsilon", None, clip_spellings.clip_low, clip_spellings.other_clip, note="with cispo, 1 − its value is rl.cispo_ratio_min; the other bound is 0.2 unless set"),
    "rl.clamp_eps_upper":                         ObjectiveSpelling("rl.epsilon_high", None, clip_spellings.clip_high, clip_spellings.other_clip, note="with cispo, 1 + its value"),
    # verl
    "rl.kl_loss_coef":                            ObjectiveSpelling("rl.beta", None, lambda value, rl: {"beta": value}, kl_spellings.verl_kl, note="without rl.use_bias_correction_kl, and k3 clamped as verl's"),
    "rl.kl_loss_type":                            ObjectiveSpelling("rl.kl_estimator", tuple(kl_spellings.KL_TYPES), lambda value, rl: {"kl_estimator": kl_spellings.KL_TYPES[value]}, kl_spellings.verl_kl, note="; ".join(f"{name}: {ours}" for name, ours in kl_spellings.KL_TYPES.items())),
    "rl.use_kl_loss":                             ObjectiveSpelling("rl.beta", bool, kl_spellings.use_kl_loss, kl_spellings.verl_coefficient, note="true: 0.001 unless kl_loss_coef is set, without rl.use_bias_correction_kl, and k3 clamped as verl's; false: 0"),
    # NeMo-RL
    "rl.reference_policy_kl_penalty":             ObjectiveSpelling("rl.beta", None, lambda value, rl: {"beta": value}, kl_spellings.nemo_kl, note="with rl.kl_score_gradient instead of rl.use_bias_correction_kl, and clamped as NeMo-RL's"),
    "rl.reference_policy_kl_type":                ObjectiveSpelling("rl.kl_estimator", ("k1", "k2", "k3"), lambda value, rl: {"kl_estimator": value}, kl_spellings.nemo_kl),
    # verl
    "rl.entropy_coeff":                           ObjectiveSpelling("rl.entropy_coef", None, lambda value, rl: {"entropy_coef": value}, lambda value, rl: {"entropy_aggregation": "loss"} if value else {}, note="with rl.entropy_aggregation loss"),
    # NeMo-RL
    "rl.overlong_filtering":                      ObjectiveSpelling("rl.mask_truncated_completions", bool, lambda value, rl: {"mask_truncated_completions": value}, lambda value, rl: {"count_masked_sequences": False} if value else {}, note="with rl.count_masked_sequences false"),
    # verl
    "rl.rollout_is":                              ObjectiveSpelling("rl.vllm_importance_sampling_mode", ("token", "sequence"), correction_spellings.rollout_is, null_counts=True, note="token: token_truncate; sequence: sequence_truncate; *_mask if rollout_is_threshold is \"lower_upper\"; null: rl.vllm_importance_sampling_correction = false"),
    "rl.rollout_is_threshold":                    ObjectiveSpelling("rl.vllm_importance_sampling_clip_max", None, correction_spellings.rollout_threshold, note="or \"lower_upper\", both bounds"),
    "rl.bypass_mode":                             ObjectiveSpelling("rl.old_logprobs", bool, correction_spellings.bypass, note="true: rollout; false: policy"),
    "rl.rollout_correction":                      ObjectiveSpelling("rl.rollout_rs", None, correction_spellings.rollout_correction, note="a mapping with verl's keys: rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold, bypass_mode, loss_type"),
    # NeMo-RL
    "rl.truncated_importance_sampling_type":      ObjectiveSpelling("rl.vllm_importance_sampling_mode", tuple(correction_spellings.TRUNCATIONS), correction_spellings.truncation, correction_spellings.min_weight, note="tis: token_truncate; icepop: token_mask (sequence_* with sequence_level_importance_ratios); seq-mask-tis: geometric_mask"),
    "rl.truncated_importance_sampling_ratio":     ObjectiveSpelling("rl.vllm_importance_sampling_clip_max", None, lambda value, rl: {"vllm_importance_sampling_clip_max": value}),
    "rl.truncated_importance_sampling_ratio_min": ObjectiveSpelling("rl.vllm_importance_sampling_clip_min", None, lambda value, rl: {"vllm_importance_sampling_clip_min": value}),
    "rl.use_importance_sampling_correction":      ObjectiveSpelling("rl.vllm_importance_sampling_correction", bool, correction_spellings.correction, correction_spellings.unbounded, note="true without truncated_importance_sampling_type: rl.vllm_importance_sampling_mode token_unbounded or sequence_unbounded"),
    "rl.force_on_policy_ratio":                   ObjectiveSpelling("rl.force_on_policy_ratio", bool, _force_on_policy, note="accepted only if a rollout batch has one step, whose ratio is 1"),
    # advantages: verl twice, NeMo-RL twice
    "rl.adv_estimator":                           ObjectiveSpelling("rl.advantage_estimator", tuple(advantage_spellings.ESTIMATORS), advantage_spellings.estimator, advantage_spellings.estimator_defaults, note="grpo, grpo_vectorized: group, with rl.advantage_baseline group; rloo_vectorized: rloo; the others by the same name; grpo_passk: with rl.advantage_epsilon 1e-6"),
    "rl.norm_adv_by_std_in_grpo":                 ObjectiveSpelling("rl.scale_rewards", bool, advantage_spellings.scale, advantage_spellings.advantage_epsilon, note="true: group, with rl.advantage_epsilon 1e-6; false: none"),
    "rl.normalize_rewards":                       ObjectiveSpelling("rl.scale_rewards", bool, advantage_spellings.scale, advantage_spellings.advantage_epsilon, note="true: group, with rl.advantage_epsilon 1e-6; false: none"),
    "rl.use_leave_one_out_baseline":              ObjectiveSpelling("rl.advantage_baseline", bool, advantage_spellings.baseline, advantage_spellings.deviation, note="true: leave_one_out, with rl.advantage_deviation others; false: group"),
    # spellings with one supported value
    "rl.disable_ppo_ratio":                       _must_be("disable_ppo_ratio", False, "there is no loss without the ratio to the old policy"),
    "rl.use_on_policy_kl_approximation":          _must_be("use_on_policy_kl_approximation", False, "the KL is not weighted by the ratio to the engine's policy"),
    "rl.positive_example_nll_weight":             _must_be("positive_example_nll_weight", 0.0, "there is no further loss on the completions with a reward"),
}
# fmt: on
