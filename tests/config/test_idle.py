"""Settings that change nothing in a run are told, and those that do, or are as they were, are not."""

import pytest

from megalith.config import RopeScaling, RunConfig
from megalith.config.base import Section
from megalith.config.presets import PRESETS
from megalith.config.rules.notes import idle_notes


@pytest.mark.parametrize(
    ("alone", "beside", "note"),
    [
        (
            "parallel.recompute_modules=[mlp]",
            "parallel.recompute_granularity=selective",
            "parallel.recompute_modules ['mlp'] has no effect: it requires parallel.recompute_granularity selective",
        ),
        (
            "optim.optimizer_offload_fraction=0.5",
            "optim.optimizer_cpu_offload=true",
            "optim.optimizer_offload_fraction 0.5 has no effect: it requires optim.optimizer_cpu_offload true",
        ),
        (
            "train.fp8_amax_history_len=1024",
            "train.fp8_format=hybrid",
            "train.fp8_amax_history_len 1024 has no effect: it requires train.fp8_format",
        ),
        (
            "model.moe_router_topk=8",
            "model.num_experts=64",
            "model.moe_router_topk 8 has no effect: it requires model.num_experts",
        ),
        (
            "optim.initial_loss_scale=1024",
            "train.fp16=true",
            "optim.initial_loss_scale 1024.0 has no effect: it requires train.precision fp16",
        ),
    ],
)
def test_a_setting_is_told_until_what_it_belongs_to_is_set(alone, beside, note):
    assert idle_notes(RunConfig.load(None, [alone])) == [note]
    assert idle_notes(RunConfig.load(None, [alone, beside])) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_of_a_preset_is_idle(preset):
    assert idle_notes(RunConfig.load(None, [f"model.preset={preset}"])) == []


# Of each group one setting with a value of its own, and what makes a run read it.
READ_WITH = {
    "model.rope_scaling.type llama3":
        ("model.rope_scaling.low_freq_factor=2", "model.rope_scaling.type=llama3"),
    "model.rope_scaling.type yarn":
        ("model.rope_scaling.beta_slow=2", "model.rope_scaling.type=yarn"),
    "model.rope_scaling.type yarn or longrope":
        ("model.rope_scaling.attention_factor=2", "model.rope_scaling.type=longrope"),
    "model.rope_scaling.type longrope":
        ("model.rope_scaling.short_factor=[1,1]", "model.rope_scaling.type=longrope"),
    "model.rope_scaling.type llama3 or yarn or longrope":
        ("model.rope_scaling.original_max_position_embeddings=9", "model.rope_scaling.type=yarn"),
    "parallel.sequence_parallel true":
        ("parallel.save_gathered_inputs=false",
         "parallel.tensor_model_parallel_size=2 parallel.sequence_parallel=true"),
    "parallel.recompute_granularity selective":
        ("parallel.recompute_modules=[mlp]", "parallel.recompute_granularity=selective"),
    "parallel.recompute_granularity full":
        ("parallel.recompute_num_layers=2", "parallel.recompute_granularity=full"),
    "parallel.pipeline_model_parallel_size above 1":
        ("parallel.account_for_loss_in_pipeline_split=true", "parallel.pipeline_model_parallel_size=2"),
    "parallel.context_parallel_size above 1":
        ("parallel.cp_comm_type=a2a", "parallel.context_parallel_size=2"),
    "parallel.expert_model_parallel_size above 1":
        ("parallel.moe_static_dispatch=true", "parallel.expert_model_parallel_size=2 model.num_experts=8"),
    "model.moe_expert_capacity_factor":
        ("model.moe_token_drop_policy=position", "model.moe_expert_capacity_factor=2"),
    "model.num_experts":
        ("model.moe_router_topk=4 parallel.moe_token_dispatcher_type=allgather", "model.num_experts=8"),
    "model.position_embedding_type rope":
        ("model.rotary_base=5e5", "model.position_embedding_type=rope"),
    "model.multi_latent_attention true":
        ("model.kv_lora_rank=64", "model.multi_latent_attention=true"),
    "model.mtp_num_layers":
        ("model.mtp_loss_scaling_factor=0.3", "model.mtp_num_layers=1 model.position_embedding_type=rope"),
    "data.fim_data true":
        ("data.fim_rate=0.9", "data.fim_data=true"),
    "data.fim_split_sample":
        ("data.fim_fragment_rate=0.3", "data.fim_split_sample=x"),
    "optim.optimizer other than sgd or lion or adafactor":
        ("optim.adam_eps=1e-6", "optim.optimizer=adam"),
    "optim.optimizer muon":
        ("optim.muon_momentum=0.9", "optim.optimizer=muon"),
    "optim.muon_momentum_warmup_iters above 0":
        ("optim.muon_momentum_start=0.5", "optim.muon_momentum_warmup_iters=9 optim.optimizer=muon"),
    "optim.qk_clip true":
        ("optim.qk_clip_alpha=0.3", "optim.qk_clip=true"),
    "optim.optimizer lion":
        ("optim.lion_beta1=0.8", "optim.optimizer=lion"),
    "optim.optimizer ademamix":
        ("optim.ademamix_alpha=8", "optim.optimizer=ademamix"),
    "optim.optimizer adafactor":
        ("optim.adafactor_beta2_decay=-0.7", "optim.optimizer=adafactor"),
    "optim.muon_moment2_method normuon or adamuon":
        ("optim.muon_beta2=0.9", "optim.optimizer=muon optim.muon_moment2_method=normuon"),
    "optim.optimizer soap":
        ("optim.soap_shampoo_beta=0.9", "optim.optimizer=soap"),
    "optim.optimizer sgd":
        ("optim.sgd_momentum=0.8", "optim.optimizer=sgd"),
    "optim.lr_decay_style WSD":
        ("optim.lr_wsd_decay_iters=5", "optim.lr_decay_style=WSD"),
    "optim.lr_rewarm_start":
        ("optim.lr_rewarm_length=5", "optim.lr_rewarm_start=10"),
    "optim.decoupled_lr":
        ("optim.decoupled_min_lr=1e-5", "optim.decoupled_lr=1e-3"),
    "parallel.data_parallel_sharding_strategy no_shard":
        ("parallel.dp_comm_overlap_bucket_size=9", "parallel.data_parallel_sharding_strategy=no_shard"),
    "parallel.data_parallel_sharding_strategy optim_grads or optim_grads_params":
        ("parallel.reduce_scatter_with_fp32_accumulation=true",
         "parallel.data_parallel_sharding_strategy=optim_grads"),
    "parallel.data_parallel_sharding_strategy optim_grads_params":
        ("parallel.fsdp_unsharded_layers=1", "parallel.data_parallel_sharding_strategy=optim_grads_params"),
    "optim.optimizer_cpu_offload true":
        ("optim.optimizer_offload_fraction=0.5", "optim.optimizer_cpu_offload=true"),
    "train.precision bf16 or fp16":
        ("train.moe_cache_weights=true", "train.precision=bf16"),
    "train.precision fp16":
        ("optim.hysteresis=3", "train.precision=fp16"),
    "train.fp8_format":
        ("train.fp8_amax_history_len=9", "train.fp8_format=hybrid"),
    "checkpoint.keep_last":
        ("checkpoint.keep_every=9", "checkpoint.keep_last=2"),
    "log.wandb true":
        ("log.wandb_name=a", "log.wandb=true"),
    "log.tensorboard true":
        ("log.tensorboard_dir=a", "log.tensorboard=true"),
    "log.timing_log_level above 0":
        ("log.timing_log_option=max", "log.timing_log_level=2"),
    "model.model_type bert or t5":
        ("data.mask_prob=0.3", "model.model_type=bert"),
    "model.model_type t5":
        ("data.decoder_seq_length=8", "model.model_type=t5"),
    "log.profile true":
        ("log.profile_step_end=20", "log.profile=true"),
    "sft.enabled true":
        ("sft.packing=false", "sft.enabled=true"),
    "distill.teacher_or_logits":
        ("distill.kd_ratio=0.3", "distill.teacher=runs/large"),
    "distill.divergence generalized_jsd":
        ("distill.beta=0.3", "distill.divergence=generalized_jsd"),
    "distill.divergence skewed_forward_kl or skewed_reverse_kl":
        ("distill.skew=0.3", "distill.divergence=skewed_reverse_kl"),
    "distill.logits_dir":
        ("distill.logits_top_k=8", "distill.logits_dir=logits"),
    "distill.on_policy_fraction above 0":
        ("distill.sampling_temperature=0.5", "distill.on_policy_fraction=0.5"),
    "distill.engine vllm or sglang":
        ("distill.weight_sync_timeout=9", "distill.engine=vllm"),
    "rl.use_adaptive_entropy true":
        ("rl.entropy_target=0.5", "rl.use_adaptive_entropy=true"),
    "rl.reward_models":
        ("rl.reward_model_timeout=9", "rl.reward_models=runs/reward rl.prompts=a"),
    "rl.teacher":
        ("rl.teacher_coef=0.5", "rl.teacher=runs/large"),
    "kto.enabled true":
        ("kto.beta=0.2", "kto.enabled=true"),
    "reward.enabled true":
        ("reward.skip_bad_samples=true", "reward.enabled=true"),
    "reward.loss_type bradley_terry or ordinal":
        ("reward.center_rewards_coefficient=0.1", "reward.enabled=true reward.loss_type=bradley_terry"),
    "reward.loss_type mse or bce":
        ("reward.step_separator=;", "reward.loss_type=bce"),
    "dpo.enabled true":
        ("dpo.beta=0.2", "dpo.enabled=true"),
    "dpo.sync_ref_model true":
        ("dpo.ref_model_sync_steps=9", "dpo.sync_ref_model=true dpo.enabled=true"),
    "kto.sync_ref_model true":
        ("kto.ref_model_sync_steps=9", "kto.sync_ref_model=true kto.enabled=true"),
    "rl.sync_ref_model true":
        ("rl.ref_model_mixup_alpha=0.9", "rl.sync_ref_model=true rl.rollouts=a"),
    "dpo.f_divergence_type alpha_divergence":
        ("dpo.f_alpha_divergence_coef=2", "dpo.f_divergence_type=alpha_divergence dpo.enabled=true"),
    "dpo.loss_type simpo":
        ("dpo.simpo_gamma=1", "dpo.loss_type=simpo dpo.enabled=true"),
    "dpo.loss_type cpo":
        ("dpo.cpo_alpha=2", "dpo.loss_type=cpo dpo.enabled=true"),
    "dpo.loss_type discopop":
        ("dpo.discopop_tau=1", "dpo.loss_type=discopop dpo.enabled=true"),
    "dpo.loss_type sigmoid or robust or exo_pair or aot or aot_unpaired":
        ("dpo.label_smoothing=0.1", "dpo.loss_type=robust"),
    "runtime.loss_spike_threshold":
        ("runtime.loss_spike_window=9", "runtime.loss_spike_threshold=2"),
    "runtime.enable_straggler_detection true":
        ("runtime.straggler_interval=9", "runtime.enable_straggler_detection=true"),
    "rl.prompts":
        ("rl.prompt_column=question", "rl.prompts=a"),
    "rl.speculative_method other than none":
        ("rl.num_speculative_tokens=2", "rl.speculative_method=ngram rl.prompts=a"),
    "rl.speculative_method ngram":
        ("rl.prompt_lookup_max=2", "rl.speculative_method=ngram rl.prompts=a"),
    "rl.eval_prompts":
        ("rl.num_generations_eval=2", "rl.eval_prompts=b rl.prompts=a"),
    "rl.filter_zero_std true":
        ("rl.max_resamples=2", "rl.filter_zero_std=true rl.prompts=a"),
    "rl.log_completions true":
        ("rl.num_completions_to_print=5", "rl.log_completions=true rl.prompts=a"),
    "rl.engine own":
        ("rl.prefix_reuse=false", "rl.engine=own"),
    "rl.prefix_reuse true":
        ("rl.prefix_cache_gb=1", "rl.prefix_reuse=true"),
    "rl.engine vllm":
        ("rl.vllm_sleep_level=1", "rl.engine=vllm rl.prompts=a"),
    "rl.engine vllm or sglang":
        ("rl.weight_sync_timeout=9", "rl.engine=vllm rl.prompts=a"),
    "rl.tools_or_environment":
        ("rl.max_tool_calls=2", "rl.tools=a.py:f rl.prompts=a"),
    "rl.tools_environment_or_agent":
        ("rl.max_turns=2", "rl.agent=a.py:f rl.prompts=a"),
    "rl.environment":
        ("rl.step_discount=0.5", "rl.environment=a.py:f rl.prompts=a"),
    "rl.agent":
        ("rl.agent_timeout=9", "rl.agent=a.py:f rl.prompts=a"),
    "rl.prompts_or_rollouts":
        ("rl.epsilon_high=0.28", "rl.rollouts=a"),
    "rl.beta above 0":
        ("rl.kl_estimator=k1", "rl.beta=0.1 rl.rollouts=a"),
    "rl.has_entropy_bonus true":
        ("rl.entropy_aggregation=loss", "rl.entropy_coef=0.1 rl.rollouts=a"),
    "rl.overlong_buffer_len above 0":
        ("rl.overlong_penalty_factor=2", "rl.overlong_buffer_len=9 rl.rollouts=a"),
    "rl.vllm_importance_sampling_correction true":
        ("rl.vllm_importance_sampling_clip_max=2", "rl.vllm_importance_sampling_correction=true rl.rollouts=a"),
    "rl.loss_type sapo":
        ("rl.sapo_temperature_pos=2", "rl.loss_type=sapo"),
    "rl.loss_type kl_cov":
        ("rl.kl_cov_ratio=0.1", "rl.loss_type=kl_cov"),
    "rl.loss_type clip_cov":
        ("rl.clip_cov_ratio=0.1", "rl.loss_type=clip_cov"),
    "rl.loss_type vespo":
        ("rl.vespo_k_neg=2", "rl.loss_type=vespo"),
    "rl.use_decoupled_loss true":
        ("rl.behav_imp_weight_cap=5", "rl.use_decoupled_loss=true rl.rollouts=a"),
}  # fmt: skip


def test_an_estimator_notes_the_settings_of_the_groups_advantage_that_it_does_not_read():
    settings = ["rl.rollouts=a", "rl.advantage_epsilon=1e-6", "rl.scale_rewards=none"]
    assert idle_notes(RunConfig.load(None, settings)) == []
    for estimator, names in {
        "opo": ["scale_rewards", "advantage_epsilon"],
        "gdpo": ["scale_rewards"],
        "grpo_passk": [],
        "a.py:f": [],
    }.items():
        notes = idle_notes(RunConfig.load(None, [*settings, f"rl.advantage_estimator={estimator}"]))
        assert [note.partition(" ")[0] for note in notes] == [f"rl.{name}" for name in names], estimator


def needs_of(section: type[Section], path: str) -> set[str]:
    """What stands on the fields, in the words of the notes."""
    needs = [need for name in section.model_fields for need in section.requirements(name) if not need.strict]
    return {str(need) if "." in need.path else f"{path}.{need}" for need in needs}


def test_each_need_has_its_case():
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    every = set().union(*(needs_of(section, name) for name, section in sections.items()))
    assert every | needs_of(RopeScaling, "model.rope_scaling") == READ_WITH.keys()


@pytest.mark.parametrize("need", READ_WITH)
def test_a_setting_is_read_with_what_it_needs_and_not_without(need):
    own, beside = (words.split() for words in READ_WITH[need])
    off = ["optim.optimizer=sgd"] if "other than sgd" in need else []
    if need.endswith("no_shard"):
        off = ["parallel.data_parallel_sharding_strategy=optim"]
    if need.endswith(("capacity_factor", "bf16 or fp16")):
        off = ["model.num_experts=8"]
    if need == "data.fim_split_sample":
        off = ["data.fim_data=true"]
    if "rope_scaling" in need:
        off = ["model.position_embedding_type=rope", "model.rope_scaling.type=linear"]
    if need.startswith("dpo.loss_type"):
        off = ["dpo.enabled=true", "dpo.loss_type=ipo"]
    if need in (
        "dpo.sync_ref_model true",
        "kto.sync_ref_model true",
        "dpo.f_divergence_type alpha_divergence",
    ):
        off = [f"{need[:3]}.enabled=true"]
    if need.startswith("reward.loss_type"):
        off = ["reward.enabled=true", f"reward.loss_type={'mse' if 'bradley' in need else 'bradley_terry'}"]
    if need == "distill.logits_dir" or need.startswith(("distill.divergence", "distill.on_policy")):
        off = ["distill.teacher=runs/large"]
    if need.startswith("distill.engine"):
        off = ["distill.teacher=runs/large", "distill.on_policy_fraction=0.5"]
    if need.startswith("rl.") and need != "rl.prompts_or_rollouts":
        off = ["rl.rollouts=a", "rl.vllm_importance_sampling_correction=false"]
    if need in ("rl.engine own", "rl.prefix_reuse true"):
        off = ["rl.prompts=a", "rl.engine=vllm" if "own" in need else "rl.prefix_reuse=false"]
    notes = idle_notes(RunConfig.load(None, own + off))
    assert [note.partition(" ")[0] for note in notes] == [word.partition("=")[0] for word in own]
    assert all(note.endswith(f"has no effect: it requires {need}") for note in notes)
    assert idle_notes(RunConfig.load(None, own + off + beside)) == []
