"""verl's and NeMo-RL's spellings of GRPO's objective that depend on several settings.

A spelling selects the formula of its system, so it also sets that system's defaults, unless the run file sets them.
`settings` returns the settings of a spelling, `defaults` the defaults that are added once all spellings are read. Both
get its value and the section `rl`, which may still contain other spellings. Sources: verl 0.6 to 0.9.1 (core_algos.py,
rollout_corr_helper.py), NeMo-RL 7ea279a (loss_functions.py); docs/grpo_objective.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalith.errors import ConfigError

Rl = Mapping[str, Any]
Meaning = Callable[[Any, Rl], dict[str, Any]]


def _no_settings(value: Any, rl: Rl) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class ObjectiveSpelling:
    """A spelling whose meaning depends on other settings of the objective."""

    path: str
    """The main setting."""
    takes: type[bool] | tuple[str, ...] | None
    """Accepted values; None: those of the setting. Null is always accepted."""
    settings: Meaning
    """Settings by name in the section `rl`; None removes a setting."""
    defaults: Meaning = _no_settings
    null_counts: bool = False
    """Null sets something; otherwise it is the same as omitting the spelling."""
    note: str = ""
    """Text on the reference page."""


RATIO_CLIP = 0.2  # verl and NeMo-RL, lower and upper
DUAL_CLIP = 3.0  # verl's clip_ratio_c
EPSILON = 1e-6  # verl and NeMo-RL; added to the standard deviation of rewards
KL_COEFFICIENT = 0.001  # verl's kl_loss_coef
KL_CLAMPS = {"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}  # verl's k3 and NeMo-RL
PER_SEQUENCE = "seq-mean-token-mean"
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LOSS_MODES = {  # verl's name → rl.loss_type
    "vanilla": "dapo",
    "gspo": "grpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "gpg",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
TOKEN_MEANS, SEQUENCE_MEANS = (
    ("cispo", "gpg", "kl_cov", "clip_cov", "reinforce"),
    ("sapo",),
)  # values of rl.loss_type
AGGREGATIONS = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
    "token-sum": "token_sum",
}
ESTIMATORS = {  # verl's adv_estimator without a critic
    "grpo": "group",
    "grpo_vectorized": "group",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "grpo_passk",
}
TRUNCATIONS = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": "geometric_mask"}
MIN_WEIGHTS = {"icepop": 0.5, "seq-mask-tis": 0.999}
NO_EFFECT = {  # keys of verl's policy_loss that other losses read, with its defaults
    "_target_": "verl.workers.config.PolicyLossConfig",
    "dro_beta": None,
}
ROLLOUT_CORRECTION = {  # keys of verl's section, with its defaults
    "_target_": None,
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
    "rollout_is_batch_normalize": False,
}
COVARIANCE = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")


def _is_cispo(rl: Rl) -> bool:
    return rl.get("loss_type") == "cispo"


WITHOUT_CLIP = (
    "cispo",
    "sapo",
    "vespo",
    "gpg",
    "gmpo",
    "kl_cov",
    "clip_cov",
    "reinforce",
)  # values of rl.loss_type


def _is_per_sequence(rl: Rl) -> bool:
    return rl.get("importance_sampling_level") == "sequence"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The loss


def _policy_loss(value: Any, rl: Rl) -> dict[str, Any]:
    mode, settings = value, {}
    if isinstance(value, dict):
        settings = {key: value[key] for key in COVARIANCE if value.get(key) is not None}
        for key, other in value.items():
            if key not in ("loss_mode", *COVARIANCE) and (key not in NO_EFFECT or other != NO_EFFECT[key]):
                raise ConfigError(
                    f"rl.policy_loss.{key} is {other!r}, which only unsupported losses read (supported: "
                    f"{', '.join(LOSS_MODES)}); leave it out"
                )
        mode = value.get("loss_mode", "vanilla")
    if mode not in LOSS_MODES:
        raise ConfigError(f"rl.policy_loss is {mode!r}: one of {', '.join(LOSS_MODES)} is needed")
    return settings | _loss_mode(mode, rl)


def _loss_mode(mode: str, rl: Rl) -> dict[str, Any]:
    if mode == "vanilla":
        return {"importance_sampling_level": "token"}
    if rl.get("clip_ratio_c") not in (None, DUAL_CLIP):
        raise ConfigError(
            f"rl.clip_ratio_c is {rl['clip_ratio_c']}, but the loss is {mode}, which has no dual clip in verl; leave "
            "clip_ratio_c out"
        )
    if mode not in ("gspo", "sapo"):
        return {"importance_sampling_level": "token", "loss_type": LOSS_MODES[mode], "clip_ratio_c": None}
    if (aggregation := rl.get("loss_agg_mode", PER_SEQUENCE)) != PER_SEQUENCE:
        also = "rl.importance_sampling_level: sequence and " if mode == "gspo" else ""
        raise ConfigError(
            f"rl.loss_agg_mode is {aggregation!r} and the loss is {mode}; verl up to 0.8 ignores loss_agg_mode for {mode} "
            f"and uses {PER_SEQUENCE}, verl 0.9 does not; leave it out, or set {also}rl.loss_type instead of both"
        )
    if mode == "sapo":
        return {"importance_sampling_level": "token", "loss_type": "sapo", "clip_ratio_c": None}
    if rl.get("rollout_is") == "token":
        raise ConfigError(
            "rl.rollout_is is token and the loss is gspo: verl then weights the gradient of each token separately, but "
            "here a sequence has a single ratio; set rollout_is to sequence, or leave it out"
        )
    return {"importance_sampling_level": "sequence", "loss_type": "grpo", "clip_ratio_c": None}


def _loss_defaults(value: Any, rl: Rl) -> dict[str, Any]:
    """Return the bounds of CISPO, or the dual clip of verl's PPO."""
    return _cispo_bounds(value, rl) if _is_cispo(rl) else _dual_clip(value, rl)


def _cispo_bounds(value: Any, rl: Rl) -> dict[str, Any]:
    """Return the default bounds of verl and NeMo-RL, which clip the ratio on both sides."""
    return {"cispo_ratio_min": 1 - RATIO_CLIP, "epsilon_high": 1 + RATIO_CLIP} if _is_cispo(rl) else {}


def _dual_clip(value: Any, rl: Rl) -> dict[str, Any]:
    has_none = rl.get("loss_type") in WITHOUT_CLIP or _is_per_sequence(rl) or rl.get("delta") is not None
    return {} if has_none else {"clip_ratio_c": DUAL_CLIP}


def _use_cispo(value: bool, rl: Rl) -> dict[str, Any]:
    if value and rl.get("token_level_loss") is False:
        raise ConfigError(
            "rl.use_cispo is true and rl.token_level_loss false, which NeMo-RL also rejects: CISPO is a mean over "
            "tokens; leave token_level_loss out"
        )
    return {"loss_type": "cispo"} if value else {}


def _aggregation(mode: str, rl: Rl) -> dict[str, Any]:
    has_mean = rl.get("loss_type") in (TOKEN_MEANS if mode == "token-mean" else SEQUENCE_MEANS)
    if (has_mean and mode in ("token-mean", PER_SEQUENCE)) or rl.get("loss_type") == "gmpo":
        return {}
    return {"loss_type": AGGREGATIONS[mode]}


def _token_level_loss(value: bool, rl: Rl) -> dict[str, Any]:
    return _aggregation("token-mean" if value else PER_SEQUENCE, rl)


def _sequence_ratios(value: bool, rl: Rl) -> dict[str, Any]:
    if value and rl.get("token_level_loss"):
        raise ConfigError(
            "rl.sequence_level_importance_ratios and rl.token_level_loss are both true, which NeMo-RL also rejects: "
            "GSPO is a mean over sequences; set token_level_loss to false, or leave it out"
        )
    return {"importance_sampling_level": "sequence" if value else "token"}


def _mean_of_sequences(value: bool, rl: Rl) -> dict[str, Any]:
    return {"loss_type": "grpo"} if value else {}


def _scale_factor(value: int, rl: Rl) -> dict[str, Any]:
    if value != rl.get("max_completion_length", rl.get("max_response_length")):
        raise ConfigError(
            f"rl.loss_scale_factor is {value}; the divisor of seq-mean-token-sum-norm is rl.max_completion_length "
            "here: make them equal, or leave it out"
        )
    return {}


# The clips


def _clip(value: Any, rl: Rl) -> dict[str, Any]:
    """Return the settings of verl's clip_ratio, which clip_ratio_low and clip_ratio_high override."""
    low = {} if rl.get("clip_ratio_low") is not None else _clip_low(value, rl)
    is_set = rl.get("clip_ratio_high") is not None or rl.get("epsilon_high") is not None
    return low if is_set else {**low, **_clip_high(value, rl)}


def _clip_low(value: Any, rl: Rl) -> dict[str, Any]:
    if _is_cispo(rl) and _is_number(value):
        return {"cispo_ratio_min": max(0.0, 1 - value)}
    return {"epsilon": value}


def _clip_high(value: Any, rl: Rl) -> dict[str, Any]:
    return {"epsilon_high": 1 + value if _is_cispo(rl) and _is_number(value) else value}


def _other_clip(value: Any, rl: Rl) -> dict[str, Any]:
    return _cispo_bounds(value, rl) if _is_cispo(rl) else {"epsilon_high": RATIO_CLIP}


def _other_clip_and_dual_clip(value: Any, rl: Rl) -> dict[str, Any]:
    return {**_other_clip(value, rl), **_dual_clip(value, rl)}


# The KL


def _use_kl_loss(value: bool, rl: Rl) -> dict[str, Any]:
    if value and rl.get("beta") == 0:
        raise ConfigError(
            "rl.use_kl_loss is true, but the KL's coefficient (rl.beta, kl_loss_coef) is 0; leave one of them out"
        )
    return {} if value else {"beta": 0.0}


def _verl_coefficient(value: bool, rl: Rl) -> dict[str, Any]:
    return {"beta": KL_COEFFICIENT, **_verl_kl(value, {"beta": KL_COEFFICIENT, **rl})} if value else {}


def _verl_kl(value: Any, rl: Rl) -> dict[str, Any]:
    """Return verl's KL settings: no bias correction, and k3 clamped."""
    if not rl.get("beta"):
        return {}
    clamps = KL_CLAMPS if rl.get("kl_estimator", "k3") == "k3" else {}
    return {"use_bias_correction_kl": False, **clamps}


def _nemo_kl(value: Any, rl: Rl) -> dict[str, Any]:
    """Return NeMo-RL's KL settings: multiplied by exp(log π − sg[log π]), and all estimators clamped."""
    return {"use_bias_correction_kl": False, "kl_score_gradient": True, **KL_CLAMPS} if rl.get("beta") else {}


# Correction for differences between engine and trainer


def _rollout_is(level: str | None, rl: Rl) -> dict[str, Any]:
    if level is None:
        return {"vllm_importance_sampling_correction": False}
    beyond = "mask" if _two_bounds(rl.get("rollout_is_threshold")) else "truncate"
    return {"vllm_importance_sampling_mode": f"{level}_{beyond}"}


def _two_bounds(threshold: Any) -> list[str] | None:
    """Split verl's "lower_upper", outside of which weights are 0; None for a single bound."""
    parts = threshold.split("_") if isinstance(threshold, str) else []
    return parts if len(parts) == 2 else None


def _rollout_threshold(value: Any, rl: Rl) -> dict[str, Any]:
    if bounds := _two_bounds(value):
        return {
            "vllm_importance_sampling_mode": rl.get("vllm_importance_sampling_mode", "token_mask"),
            "vllm_importance_sampling_clip_min": bounds[0],
            "vllm_importance_sampling_clip_max": bounds[1],
        }
    return {"vllm_importance_sampling_clip_max": value}


def _bypass(value: bool, rl: Rl) -> dict[str, Any]:
    return {"old_logprobs": "rollout" if value else "policy"}


def _rollout_correction(value: Any, rl: Rl) -> dict[str, Any]:
    """Return the settings of verl's section algorithm.rollout_correction."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"rl.rollout_correction is {value!r}; write a mapping, such as {{rollout_is: token}}"
        )
    keys = {name: default for name, default in ROLLOUT_CORRECTION.items() if name != "_target_"}
    unknown = [key for key in value if key not in ROLLOUT_CORRECTION]
    if unknown:
        raise ConfigError(
            f"rl.rollout_correction.{unknown[0]} is not a setting; the settings are {', '.join(keys)}"
        )
    keys |= value
    settings = _rollout_is(keys["rollout_is"], keys)
    if keys["rollout_is"] is not None:
        settings |= _rollout_threshold(keys["rollout_is_threshold"], {**rl, **settings})
    for name in ("rollout_rs", "rollout_rs_threshold", "rollout_is_batch_normalize"):
        if keys[name] != ROLLOUT_CORRECTION[name]:
            settings[name] = keys[name]
    if not keys["bypass_mode"]:
        return settings
    if keys["loss_type"] not in ("ppo_clip", "reinforce"):
        raise ConfigError(
            f"rl.rollout_correction.loss_type is {keys['loss_type']!r}: one of ppo_clip, reinforce is needed"
        )
    if keys["loss_type"] == "reinforce":
        if (aggregation := rl.get("loss_agg_mode", "token-mean")) != "token-mean":
            raise ConfigError(
                f"rl.rollout_correction.loss_type is reinforce and rl.loss_agg_mode {aggregation!r}; reinforce is a mean "
                "over tokens; leave loss_agg_mode out"
            )
        settings |= {"loss_type": "reinforce", "clip_ratio_c": None}
    return settings | _bypass(True, rl)


def _correction(value: bool, rl: Rl) -> dict[str, Any]:
    return {"vllm_importance_sampling_correction": value}


def _unbounded(value: bool, rl: Rl) -> dict[str, Any]:
    """Return NeMo-RL's correction without a truncation type; with only a ratio it is tis."""
    if not value:
        return {}
    level = "sequence" if _is_per_sequence(rl) else "token"
    is_bounded = rl.get("vllm_importance_sampling_clip_max") is not None
    return {"vllm_importance_sampling_mode": f"{level}_{'truncate' if is_bounded else 'unbounded'}"}


def _truncation(kind: str, rl: Rl) -> dict[str, Any]:
    if kind == "seq-mask-tis":
        if _is_per_sequence(rl):
            raise ConfigError(
                "rl.truncated_importance_sampling_type is seq-mask-tis and rl.sequence_level_importance_ratios true, "
                "which NeMo-RL also rejects: its weights are per token; choose tis or icepop"
            )
        return {"vllm_importance_sampling_mode": TRUNCATIONS[kind]}
    level = "sequence" if _is_per_sequence(rl) else "token"
    return {"vllm_importance_sampling_mode": f"{level}_{TRUNCATIONS[kind]}"}


def _min_weight(kind: str, rl: Rl) -> dict[str, Any]:
    """Return the lower bound that NeMo-RL requires; the default is the one in its documentation."""
    bound = MIN_WEIGHTS.get(kind)
    return {} if bound is None else {"vllm_importance_sampling_clip_min": bound}


# Advantages


def _estimator(name: str, rl: Rl) -> dict[str, Any]:
    if ESTIMATORS[name] == "group":
        return {"advantage_baseline": "group"}
    return {"advantage_estimator": ESTIMATORS[name]}


def _estimator_defaults(name: str, rl: Rl) -> dict[str, Any]:
    return {"advantage_epsilon": EPSILON} if name == "grpo_passk" else {}


def _scale(value: bool, rl: Rl) -> dict[str, Any]:
    return {"scale_rewards": "group" if value else "none"}


def _advantage_epsilon(value: bool, rl: Rl) -> dict[str, Any]:
    return {"advantage_epsilon": EPSILON} if value else {}


def _baseline(value: bool, rl: Rl) -> dict[str, Any]:
    return {"advantage_baseline": "leave_one_out" if value else "group"}


def _deviation(value: bool, rl: Rl) -> dict[str, Any]:
    """Return NeMo-RL's standard deviation of the other completions, used with their mean."""
    return {"advantage_deviation": "others", "advantage_epsilon": EPSILON} if value else {}


# Spellings with one supported value


def _must_be(name: str, value: Any, reason: str) -> ObjectiveSpelling:
    def check(actual: Any, rl: Rl) -> dict[str, Any]:
        if actual != value:
            raise ConfigError(f"rl.{name} is {actual!r}, which is not supported: {reason}; leave it out")
        return {}

    takes = bool if isinstance(value, bool) else None
    return ObjectiveSpelling(f"rl.{name}", takes, check, note=f"accepted as {str(value).lower()}: {reason}")


def _force_on_policy(value: bool, rl: Rl) -> dict[str, Any]:
    steps = rl.get("mini_batches", 1) * rl.get("num_iterations", rl.get("ppo_epochs", 1))
    if value and (steps != 1 or rl.get("old_logprobs") == "rollout"):
        raise ConfigError(
            "rl.force_on_policy_ratio is true, but the ratio is 1 only with one step for a rollout batch "
            f"(mini_batches × num_iterations is {steps}) and rl.old_logprobs policy; leave it out"
        )
    return {}


# fmt: off
OBJECTIVES: dict[str, ObjectiveSpelling] = {
    # verl
    "rl.policy_loss":                             ObjectiveSpelling("rl.loss_type", None, _policy_loss, _loss_defaults, note="as rl.loss_mode, or a mapping with loss_mode"),
    "rl.loss_mode":                               ObjectiveSpelling("rl.importance_sampling_level", tuple(LOSS_MODES), _loss_mode, _loss_defaults, note="vanilla: PPO's clip with rl.clip_ratio_c 3; gspo: with rl.loss_type grpo; cispo: rl.loss_type cispo, clipped on both sides; geo_mean: rl.loss_type gmpo; sapo, gpg, kl_cov, clip_cov: rl.loss_type of the same name"),
    "rl.tau_pos":                                 ObjectiveSpelling("rl.sapo_temperature_pos", None, lambda value, rl: {"sapo_temperature_pos": value}),
    "rl.tau_neg":                                 ObjectiveSpelling("rl.sapo_temperature_neg", None, lambda value, rl: {"sapo_temperature_neg": value}),
    # NeMo-RL
    "rl.use_cispo":                               ObjectiveSpelling("rl.loss_type", bool, _use_cispo, _cispo_bounds, note="cispo, clipped on both sides"),
    "rl.sequence_level_importance_ratios":        ObjectiveSpelling("rl.importance_sampling_level", bool, _sequence_ratios, _mean_of_sequences, note="true: sequence, with rl.loss_type grpo"),
    "rl.token_level_loss":                        ObjectiveSpelling("rl.loss_type", bool, _token_level_loss, note="true: dapo (or cispo); false: grpo"),
    # verl
    "rl.loss_agg_mode":                           ObjectiveSpelling("rl.loss_type", tuple(AGGREGATIONS), _aggregation, note="; ".join(f"{name}: {ours}" for name, ours in AGGREGATIONS.items())),
    "rl.loss_scale_factor":                       ObjectiveSpelling("rl.loss_scale_factor", None, _scale_factor, note="accepted only if it equals rl.max_completion_length"),
    "rl.clip_ratio":                              ObjectiveSpelling("rl.epsilon", None, _clip, _other_clip_and_dual_clip, note="sets both bounds, unless clip_ratio_low or clip_ratio_high is set; rl.clip_ratio_c is 3 unless set"),
    "rl.clip_ratio_low":                          ObjectiveSpelling("rl.epsilon", None, _clip_low, _other_clip_and_dual_clip, note="with cispo, 1 − its value is rl.cispo_ratio_min; the other bound is 0.2 and rl.clip_ratio_c 3 unless set"),
    "rl.clip_ratio_high":                         ObjectiveSpelling("rl.epsilon_high", None, _clip_high, _other_clip_and_dual_clip, note="with cispo, 1 + its value; rl.clip_ratio_c is 3 unless set"),
    # NeMo-RL, and Oumi's
    "rl.ratio_clip_min":                          ObjectiveSpelling("rl.epsilon", None, _clip_low, _other_clip, note="with cispo, 1 − its value is rl.cispo_ratio_min; the other bound is 0.2 unless set"),
    "rl.ratio_clip_max":                          ObjectiveSpelling("rl.epsilon_high", None, _clip_high, _other_clip, note="with cispo, 1 + its value"),
    "rl.clamp_eps_lower":                         ObjectiveSpelling("rl.epsilon", None, _clip_low, _other_clip, note="with cispo, 1 − its value is rl.cispo_ratio_min; the other bound is 0.2 unless set"),
    "rl.clamp_eps_upper":                         ObjectiveSpelling("rl.epsilon_high", None, _clip_high, _other_clip, note="with cispo, 1 + its value"),
    # verl
    "rl.kl_loss_coef":                            ObjectiveSpelling("rl.beta", None, lambda value, rl: {"beta": value}, _verl_kl, note="without rl.use_bias_correction_kl, and k3 clamped as verl's"),
    "rl.kl_loss_type":                            ObjectiveSpelling("rl.kl_estimator", tuple(KL_TYPES), lambda value, rl: {"kl_estimator": KL_TYPES[value]}, _verl_kl, note="; ".join(f"{name}: {ours}" for name, ours in KL_TYPES.items())),
    "rl.use_kl_loss":                             ObjectiveSpelling("rl.beta", bool, _use_kl_loss, _verl_coefficient, note="true: 0.001 unless kl_loss_coef is set, without rl.use_bias_correction_kl, and k3 clamped as verl's; false: 0"),
    # NeMo-RL
    "rl.reference_policy_kl_penalty":             ObjectiveSpelling("rl.beta", None, lambda value, rl: {"beta": value}, _nemo_kl, note="with rl.kl_score_gradient instead of rl.use_bias_correction_kl, and clamped as NeMo-RL's"),
    "rl.reference_policy_kl_type":                ObjectiveSpelling("rl.kl_estimator", ("k1", "k2", "k3"), lambda value, rl: {"kl_estimator": value}, _nemo_kl),
    # verl
    "rl.entropy_coeff":                           ObjectiveSpelling("rl.entropy_coef", None, lambda value, rl: {"entropy_coef": value}, lambda value, rl: {"entropy_aggregation": "loss"} if value else {}, note="with rl.entropy_aggregation loss"),
    # NeMo-RL
    "rl.overlong_filtering":                      ObjectiveSpelling("rl.mask_truncated_completions", bool, lambda value, rl: {"mask_truncated_completions": value}, lambda value, rl: {"count_masked_sequences": False} if value else {}, note="with rl.count_masked_sequences false"),
    # verl
    "rl.rollout_is":                              ObjectiveSpelling("rl.vllm_importance_sampling_mode", ("token", "sequence"), _rollout_is, null_counts=True, note="token: token_truncate; sequence: sequence_truncate; *_mask if rollout_is_threshold is \"lower_upper\"; null: rl.vllm_importance_sampling_correction = false"),
    "rl.rollout_is_threshold":                    ObjectiveSpelling("rl.vllm_importance_sampling_clip_max", None, _rollout_threshold, note="or \"lower_upper\", both bounds"),
    "rl.bypass_mode":                             ObjectiveSpelling("rl.old_logprobs", bool, _bypass, note="true: rollout; false: policy"),
    "rl.rollout_correction":                      ObjectiveSpelling("rl.rollout_rs", None, _rollout_correction, note="a mapping with verl's keys: rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold, bypass_mode, loss_type"),
    # NeMo-RL
    "rl.truncated_importance_sampling_type":      ObjectiveSpelling("rl.vllm_importance_sampling_mode", tuple(TRUNCATIONS), _truncation, _min_weight, note="tis: token_truncate; icepop: token_mask (sequence_* with sequence_level_importance_ratios); seq-mask-tis: geometric_mask"),
    "rl.truncated_importance_sampling_ratio":     ObjectiveSpelling("rl.vllm_importance_sampling_clip_max", None, lambda value, rl: {"vllm_importance_sampling_clip_max": value}),
    "rl.truncated_importance_sampling_ratio_min": ObjectiveSpelling("rl.vllm_importance_sampling_clip_min", None, lambda value, rl: {"vllm_importance_sampling_clip_min": value}),
    "rl.use_importance_sampling_correction":      ObjectiveSpelling("rl.vllm_importance_sampling_correction", bool, _correction, _unbounded, note="true without truncated_importance_sampling_type: rl.vllm_importance_sampling_mode token_unbounded or sequence_unbounded"),
    "rl.force_on_policy_ratio":                   ObjectiveSpelling("rl.force_on_policy_ratio", bool, _force_on_policy, note="accepted only if a rollout batch has one step, whose ratio is 1"),
    # advantages: verl twice, NeMo-RL twice
    "rl.adv_estimator":                           ObjectiveSpelling("rl.advantage_estimator", tuple(ESTIMATORS), _estimator, _estimator_defaults, note="grpo, grpo_vectorized: group, with rl.advantage_baseline group; rloo_vectorized: rloo; the others by the same name; grpo_passk: with rl.advantage_epsilon 1e-6"),
    "rl.norm_adv_by_std_in_grpo":                 ObjectiveSpelling("rl.scale_rewards", bool, _scale, _advantage_epsilon, note="true: group, with rl.advantage_epsilon 1e-6; false: none"),
    "rl.normalize_rewards":                       ObjectiveSpelling("rl.scale_rewards", bool, _scale, _advantage_epsilon, note="true: group, with rl.advantage_epsilon 1e-6; false: none"),
    "rl.use_leave_one_out_baseline":              ObjectiveSpelling("rl.advantage_baseline", bool, _baseline, _deviation, note="true: leave_one_out, with rl.advantage_deviation others; false: group"),
    # spellings with one supported value
    "rl.disable_ppo_ratio":                       _must_be("disable_ppo_ratio", False, "there is no loss without the ratio to the old policy"),
    "rl.use_on_policy_kl_approximation":          _must_be("use_on_policy_kl_approximation", False, "the KL is not weighted by the ratio to the engine's policy"),
    "rl.positive_example_nll_weight":             _must_be("positive_example_nll_weight", 0.0, "there is no further loss on the completions with a reward"),
}
# fmt: on
