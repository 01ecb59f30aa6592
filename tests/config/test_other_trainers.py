"""Settings of TRL's, verl's, NeMo-RL's and Oumi's trainers: their names with their values mean ours, or are refused."""

import pytest
import yaml

from megalith.config import RunConfig
from megalith.config.aliases import ALIASES
from megalith.errors import ConfigError

TABLE = """
sft.max_length                           96                     data.seq_length                        96
dpo.max_length                           96                     data.seq_length                        96
dpo.reference_policy_kl_penalty          0.05                   dpo.beta                               0.05
rl.clip_ratio                            0.2                    rl.epsilon                             0.2
rl.clip_ratio                            0.1                    rl.epsilon_high                        0.1
rl.clip_ratio_low                        0.2                    rl.epsilon                             0.2
rl.clip_ratio_low                        0.1                    rl.epsilon_high                        0.2
rl.clip_ratio_low                        0.1                    rl.clip_ratio_c                        3.0
rl.clip_ratio_high                       0.28                   rl.epsilon_high                        0.28
rl.ratio_clip_min                        0.2                    rl.epsilon                             0.2
rl.ratio_clip_max                        0.28                   rl.epsilon_high                        0.28
rl.clamp_eps_lower                       0.2                    rl.epsilon                             0.2
rl.clamp_eps_upper                       0.2                    rl.epsilon_high                        0.2
rl.ratio_clip_c                          3                      rl.clip_ratio_c                        3
rl.ratio_clip_c                          null                   rl.clip_ratio_c                        null
rl.kl_loss_coef                          0.001                  rl.beta                                0.001
rl.kl_loss_coef                          0.001                  rl.use_bias_correction_kl              false
rl.kl_loss_coef                          0.001                  rl.kl_output_clamp_value               10.0
rl.kl_beta                               0.001                  rl.beta                                0.001
rl.reference_policy_kl_penalty           0.01                   rl.beta                                0.01
rl.reference_policy_kl_penalty           0.01                   rl.kl_score_gradient                   true
rl.reference_policy_kl_penalty           0.01                   rl.kl_input_clamp_value                20.0
rl.disable_ppo_ratio                     false                  rl.epsilon                             0.2
rl.use_on_policy_kl_approximation        false                  rl.kl_score_gradient                   false
rl.positive_example_nll_weight           0.0                    rl.loss_type                           dapo
rl.force_on_policy_ratio                 true                   rl.old_logprobs                        policy
rl.loss_scale_factor                     null                   rl.max_completion_length               256
rl.use_kl_loss                           true                   rl.beta                                0.001
rl.use_kl_loss                           false                  rl.beta                                0.0
rl.kl_loss_type                          kl                     rl.kl_estimator                        k1
rl.kl_loss_type                          k1                     rl.kl_estimator                        k1
rl.kl_loss_type                          mse                    rl.kl_estimator                        k2
rl.kl_loss_type                          k2                     rl.kl_estimator                        k2
rl.kl_loss_type                          low_var_kl             rl.kl_estimator                        k3
rl.kl_loss_type                          k3                     rl.kl_estimator                        k3
rl.reference_policy_kl_type              k1                     rl.kl_estimator                        k1
rl.reference_policy_kl_type              k2                     rl.kl_estimator                        k2
rl.reference_policy_kl_type              k3                     rl.kl_estimator                        k3
rl.entropy_coeff                         0.01                   rl.entropy_coef                        0.01
rl.entropy_coeff                         0.01                   rl.entropy_aggregation                 loss
rl.entropy_weight                        0.01                   rl.entropy_coef                        0.01
rl.ppo_epochs                            2                      rl.num_iterations                      2
rl.n                                     5                      rl.num_generations                     5
rl.num_generations_per_prompt            16                     rl.num_generations                     16
rl.load_rollouts                         [a.jsonl]              rl.rollouts                            [a.jsonl]
rl.reward_functions                      [gsm8k]                rl.reward_funcs                        [gsm8k]
rl.max_new_tokens                        512                    rl.max_completion_length               512
rl.max_response_length                   512                    rl.max_completion_length               512
rl.prompt_key                            question               rl.prompt_column                       question
rl.train_files                           [a.parquet]            rl.prompts                             [a.parquet]
rl.val_files                             [b.parquet]            rl.eval_prompts                        [b.parquet]
rl.max_val_samples                       256                    rl.max_eval_prompts                    256
rl.shuffle                               false                  rl.shuffle_dataset                     false
rl.filter_overlong_prompts               true                   rl.overlong_prompts                    drop
rl.filter_overlong_prompts               false                  rl.overlong_prompts                    refuse
rl.filter_groups                         true                   rl.filter_zero_std                     true
rl.use_dynamic_sampling                  true                   rl.filter_zero_std                     true
rl.max_num_gen_batches                   10                     rl.max_resamples                       9
rl.dynamic_sampling_max_gen_batches      1                      rl.max_resamples                       0
rl.overlong_filtering                    true                   rl.mask_truncated_completions          true
rl.overlong_filtering                    true                   rl.count_masked_sequences              false
rl.loss_agg_mode                         token-mean             rl.loss_type                           dapo
rl.loss_agg_mode                         seq-mean-token-mean    rl.loss_type                           grpo
rl.loss_agg_mode                         seq-mean-token-sum     rl.loss_type                           luspo
rl.loss_agg_mode                         seq-mean-token-sum-norm rl.loss_type                           dr_grpo
rl.token_level_loss                      true                   rl.loss_type                           dapo
rl.token_level_loss                      false                  rl.loss_type                           grpo
rl.loss_mode                             vanilla                rl.importance_sampling_level           token
rl.loss_mode                             gspo                   rl.importance_sampling_level           sequence
rl.loss_mode                             gspo                   rl.loss_type                           grpo
rl.loss_mode                             cispo                  rl.loss_type                           cispo
rl.loss_mode                             cispo                  rl.epsilon_high                        1.2
rl.loss_mode                             cispo                  rl.cispo_ratio_min                     0.8
rl.policy_loss                           cispo                  rl.loss_type                           cispo
rl.policy_loss                           {"loss_mode":"gspo"}     rl.loss_type                           grpo
rl.policy_loss                           vanilla                rl.clip_ratio_c                        3.0
rl.policy_loss                           sapo                   rl.loss_type                           sapo
rl.loss_mode                             gpg                    rl.loss_type                           gpg
rl.loss_mode                             geo_mean               rl.loss_type                           gmpo
rl.loss_mode                             geo_mean               rl.clip_ratio_c                        null
rl.policy_loss                           {"loss_mode":"kl_cov","ppo_kl_coef":1.0}  rl.ppo_kl_coef         1.0
rl.policy_loss                           {"loss_mode":"clip_cov","clip_cov_ub":2.0} rl.clip_cov_ub        2.0
rl.tau_pos                               2.0                    rl.sapo_temperature_pos                2.0
rl.tau_neg                               2.0                    rl.sapo_temperature_neg                2.0
rl.loss_agg_mode                         token-sum              rl.loss_type                           token_sum
rl.use_cispo                             true                   rl.loss_type                           cispo
rl.use_cispo                             true                   rl.clip_ratio_c                        null
rl.use_cispo                             false                  rl.loss_type                           dapo
rl.sequence_level_importance_ratios      true                   rl.importance_sampling_level           sequence
rl.sequence_level_importance_ratios      true                   rl.loss_type                           grpo
rl.sequence_level_importance_ratios      false                  rl.importance_sampling_level           token
rl.adv_estimator                         grpo                   rl.advantage_baseline                  group
rl.adv_estimator                         grpo_vectorized        rl.advantage_baseline                  group
rl.adv_estimator                         rloo_vectorized        rl.advantage_estimator                 rloo
rl.adv_estimator                         grpo_passk             rl.advantage_estimator                 grpo_passk
rl.adv_estimator                         grpo_passk             rl.advantage_epsilon                   1.0e-06
rl.use_leave_one_out_baseline            true                   rl.advantage_baseline leave_one_out
rl.use_leave_one_out_baseline            true                   rl.advantage_deviation                 others
rl.use_leave_one_out_baseline            false                  rl.advantage_baseline                  group
rl.norm_adv_by_std_in_grpo               true                   rl.scale_rewards                       group
rl.norm_adv_by_std_in_grpo               false                  rl.scale_rewards                       none
rl.normalize_rewards                     true                   rl.scale_rewards                       group
rl.normalize_rewards                     true                   rl.advantage_epsilon                   1.0e-6
rl.normalize_rewards                     false                  rl.scale_rewards                       none
rl.normalize_advantages                  true                   rl.scale_rewards                       group
rl.normalize_advantages                  false                  rl.scale_rewards                       none
rl.scale_rewards                         true                   rl.scale_rewards                       group
rl.scale_rewards                         false                  rl.scale_rewards                       none
rl.scale_rewards                         batch                  rl.scale_rewards                       batch
rl.multi_objective_aggregation           sum_then_normalize     rl.advantage_estimator                 group
rl.multi_objective_aggregation           normalize_then_sum     rl.advantage_estimator                 gdpo
rl.use_importance_sampling_correction    false                  rl.vllm_importance_sampling_correction false
rl.use_importance_sampling_correction    true                   rl.vllm_importance_sampling_mode       token_unbounded
rl.rollout_is                            token                  rl.vllm_importance_sampling_mode token_truncate
rl.rollout_is                            sequence               rl.vllm_importance_sampling_mode sequence_truncate
rl.rollout_is                            null                   rl.vllm_importance_sampling_correction false
rl.rollout_is_threshold                  2.0                    rl.vllm_importance_sampling_clip_max   2.0
rl.rollout_is_threshold                  "0.5_4"                rl.vllm_importance_sampling_clip_max   4.0
rl.rollout_is_threshold                  "0.5_4"                rl.vllm_importance_sampling_mode       token_mask
rl.bypass_mode                           true                   rl.old_logprobs                        rollout
rl.bypass_mode                           false                  rl.old_logprobs                        policy
rl.rollout_correction                    {"rollout_rs":"token_k2"} rl.vllm_importance_sampling_correction false
rl.truncated_importance_sampling_type    tis                    rl.vllm_importance_sampling_mode token_truncate
rl.truncated_importance_sampling_type    icepop                 rl.vllm_importance_sampling_mode       token_mask
rl.truncated_importance_sampling_type    seq-mask-tis           rl.vllm_importance_sampling_mode       geometric_mask
rl.truncated_importance_sampling_ratio   5.0                    rl.vllm_importance_sampling_clip_max   5.0
rl.truncated_importance_sampling_ratio_min 0.5                    rl.vllm_importance_sampling_clip_min   0.5
rl.vllm_importance_sampling_cap          2.0                    rl.vllm_importance_sampling_clip_max   2.0
rl.bypass_mode                           true                   rl.old_logprobs                        rollout
rl.bypass_mode                           false                  rl.old_logprobs                        policy
rl.use_vllm                              true                   rl.engine                              vllm
rl.use_vllm                              false                  rl.engine                              own
rl.vllm_mode                             server                 rl.engine_url                          http://127.0.0.1:8000
rl.vllm_mode                             colocate               rl.engine_url                          null
rl.vllm_server_base_url                  http://a:1             rl.engine_url                          http://a:1
rl.vllm_server_timeout                   240                    rl.weight_sync_timeout                 240
rl.inference_backend                     vllm                   rl.engine                              vllm
rl.inference_backend                     sglang                 rl.engine                              sglang
rl.inference_backend                     megatron               rl.engine                              own
rl.enable_weight_sync                    true                   rl.engine                              own
rl.max_trajectory_age_steps              2                      rl.max_staleness                       2
rl.max_async_level                       8                      rl.max_staleness                       8
rl.max_head_offpolicyness                4                      rl.max_staleness                       4
rl.recompute_logprob                     true                   rl.old_logprobs                        policy
rl.recompute_logprob                     false                  rl.old_logprobs                        rollout
rl.use_decoupled_loss                    true                   rl.use_decoupled_loss                  true
rl.behav_imp_weight_cap                  5.0                    rl.behav_imp_weight_cap                5.0
rl.prox_logp_method                      loglinear              rl.prox_logp_method                    loglinear
rl.top_k                                 -1                     rl.top_k                               0
rl.top_k                                 null                   rl.top_k                               0
rl.top_p                                 null                   rl.top_p                               1.0
rl.min_p                                 null                   rl.min_p                               0.0
"""
MEANINGS = [line.split() for line in TABLE.strip().splitlines()]


def test_their_settings_are_ours():
    for spelled, value, path, own in MEANINGS:
        (section, key), (home, field) = spelled.split("."), path.split(".")
        config = RunConfig.from_tree({section: {key: yaml.safe_load(value)}})
        assert getattr(getattr(config, home), field) == yaml.safe_load(own), (spelled, value)


def test_no_spelling_of_these_sections_is_left_out():
    ours = {name for name in ALIASES if name.split(".")[0] in ("sft", "dpo", "rl")}
    assert ours <= {row[0] for row in MEANINGS}


REFUSED = [
    ("loss_agg_mode", "batch-mean", "'batch-mean': it must be one of token-mean, seq-mean-token-mean, .*"),
    ("kl_loss_type", "full", "'full': it must be one of kl, k1, mse, k2, low_var_kl, k3"),
    ("kl_loss_type", "k3+", r"'k3\+': it must be one of kl, k1"),
    ("reference_policy_kl_type", "low_var_kl", "'low_var_kl': it must be one of k1, k2, k3"),
    ("adv_estimator", "gae", "'gae': it must be one of grpo, grpo_vectorized, rloo, .*"),
    ("adv_estimator", 3, "rl.adv_estimator is 3: it must be one of grpo, "),
    ("loss_mode", "dro", "'dro': it must be one of vanilla, gspo, cispo, sapo, .*"),
    ("policy_loss", "dro", "'dro': it must be one of vanilla, gspo, cispo, sapo, .*"),
    ("policy_loss", {"loss_mode": "gspo", "dro_beta": 2.0}, "rl.policy_loss.dro_beta is 2.0, which only"),
    ("disable_ppo_ratio", True, "there is no loss without the ratio"),
    ("use_on_policy_kl_approximation", True, "the KL is not weighted"),
    ("positive_example_nll_weight", 0.1, "there is no further loss"),
    ("rollout_correction", {"rollout_veto": 1}, "rl.rollout_correction.rollout_veto is not a setting"),
    ("rollout_correction", {"bypass_mode": True, "loss_type": "gspo"}, "'gspo': it must be one of ppo_clip, reinforce"),
    ("loss_scale_factor", 100, "the divisor of seq-mean-token-sum-norm is rl.max_completion_length"),
    ("rollout_is", "geometric", "'geometric': it must be one of token, sequence"),
    ("truncated_importance_sampling_type", "clip", "'clip': it must be one of tis, icepop, seq-mask-tis"),
    ("multi_objective_aggregation", "sum", "it must be one of sum_then_normalize, normalize_then_sum"),
    ("enable_weight_sync", False, "rl.enable_weight_sync is false"),
    ("vllm_mode", "ray", (r"rl\.vllm_mode is 'ray' and rl\.engine_url is None, but mode server needs an address "
"and mode colocate must")),
    ("inference_backend", "tgi", "'tgi': it must be one of vllm, sglang, megatron"),
    ("loss_type", "bnpo", "divides by each micro-batch's tokens"),
    ("loss_type", "dppo", "'dppo': write a built-in name or path.py:object"),
    ("max_num_gen_batches", 0, r"is 0, which means no limit in other systems; set rl\.max_resamples"),
    ("filter_groups", {"enable": True}, "rl.filter_zero_std is .*: it must be true or false"),
    ("norm_adv_by_std_in_grpo", "true", "rl.norm_adv_by_std_in_grpo is 'true': it must be true or false"),
    ("scale_rewards", 1, "rl.scale_rewards is 1"),
    ("top_k", -2, "rl.top_k is -2"),
    ("num_prompts_per_step", 32, "in Megalith, it is train.global_batch_size × rl.mini_batches / rl.num_generations"),
    ("ppo_mini_batch_size", 64, "in Megalith, it is train.global_batch_size / rl.num_generations"),
    ("overlong_buffer", {"enable": True}, "in Megalith, it is rl.overlong_buffer_len and"),
]  # fmt: skip


@pytest.mark.parametrize("key,value,sentence", REFUSED, ids=lambda value: str(value)[:20])
def test_what_we_do_not_have_is_refused_with_a_sentence(key, value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RunConfig.from_tree({"rl": {key: value}})


TOGETHER = [
    (dict(loss_mode="gspo", loss_agg_mode="token-mean"), "verl up to 0.8 ignores loss_agg_mode for gspo"),
    (dict(loss_mode="gspo", loss_type="dapo"), "loss_mode sets rl.loss_type to 'grpo', but rl.loss_type is already"),
    (dict(loss_mode="gspo", rollout_is="token"), "set rl.rollout_is to sequence"),
    (dict(loss_mode="cispo", clip_ratio_c=4.0), "cispo, which has no dual clip in verl"),
    (dict(loss_mode="cispo", loss_agg_mode="seq-mean-token-mean"), "sets rl.loss_type to 'grpo'"),
    (dict(use_cispo=True, token_level_loss=False), "but CISPO is a mean over tokens"),
    (dict(sequence_level_importance_ratios=True, token_level_loss=True), "GSPO is a mean over sequences"),
    (dict(sequence_level_importance_ratios=True, truncated_importance_sampling_type="seq-mask-tis"), "are per token"),
    (dict(use_kl_loss=True, kl_loss_coef=0.0), "the KL's coefficient .* is 0"),
    (dict(clip_ratio=0.3, epsilon=0.2), "clip_ratio sets rl.epsilon to 0.3"),
    (dict(force_on_policy_ratio=True, ppo_epochs=2), "one step per rollout batch"),
]  # fmt: skip


@pytest.mark.parametrize("rl,sentence", TOGETHER)
def test_spellings_that_contradict_one_another_are_refused(rl, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RunConfig.from_tree({"rl": rl})


def test_what_a_spelling_brings_along_is_noted_and_gives_way_to_the_run_file():
    config = RunConfig.from_tree({"rl": {"use_kl_loss": True, "clip_ratio_high": 0.28}})
    assert any("rl.clip_ratio_high = 0.28 also sets rl.clip_ratio_c = 3.0" in note for note in config.notes)
    assert any(
        "rl.use_kl_loss = True also sets rl.beta = 0.001, rl.use_bias" in note for note in config.notes
    )
    given = {"use_kl_loss": True, "beta": 0.1, "use_bias_correction_kl": True, "kl_output_clamp_value": None}
    rl = RunConfig.from_tree({"rl": given | {"clip_ratio_high": 0.28, "clip_ratio_c": None}}).rl
    assert (rl.beta, rl.use_bias_correction_kl, rl.kl_output_clamp_value, rl.clip_ratio_c) == (
        0.1,
        True,
        None,
        None,
    )
    assert rl.kl_input_clamp_value == 20


def test_a_coefficient_beside_a_loss_that_is_off_is_a_contradiction():
    with pytest.raises(
        ConfigError, match=r"use_kl_loss sets rl\.beta to 0\.0, but rl\.beta is already 0\.001"
    ):
        RunConfig.from_tree({"rl": {"use_kl_loss": False, "kl_loss_coef": 0.001}})
