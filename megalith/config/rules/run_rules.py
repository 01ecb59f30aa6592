"""Validation of complete runs: rules that involve several settings. `check_training` applies all of them.

model_rules.py has the rules of the model, data_rules.py those of the data, parallel_rules.py and expert_rules.py those
of the layout, optim_rules.py those of length and schedules.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalith.config.base import NOT_YET
from megalith.config.data import SPECIAL_COUNT, DataConfig
from megalith.config.distillation import is_served
from megalith.config.lora import EXPERTS, QKV, WHOLE
from megalith.config.model import ModelConfig
from megalith.config.output import LogConfig
from megalith.config.rl import OF_MARGINS, REFERENCE_FREE, SORTED, DpoConfig, RlConfig
from megalith.config.rules.addresses import check_address
from megalith.config.rules.batch_invariant_rules import check_batch_invariant
from megalith.config.rules.data_rules import check_data
from megalith.config.rules.distill_rules import check_distillation
from megalith.config.rules.dynamic_context_rules import check_dynamic_context
from megalith.config.rules.model_rules import check_model
from megalith.config.rules.optim_rules import check_loss_scale, check_schedule
from megalith.config.rules.parallel_rules import check_parallel, data_parallel_size, divisors
from megalith.config.rules.reference_rules import check_reference_sync
from megalith.config.rules.rejection import rejection_criteria
from megalith.config.rules.speculation_rules import check_rollout_speculation
from megalith.config.run import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError


def check_training(config: RunConfig, world_size: int = 1) -> None:
    """Raise ConfigError unless this run can be trained on `world_size` processes."""
    config.data.check_requirements("data", config)
    config.checkpoint.check_requirements("checkpoint")
    check_model(config.model)
    _check_available(config)
    check_fp8(config)
    check_parallel(config, world_size)
    _check_adapters(config)
    _check_lengths(config.model, config.data)
    check_data(config)
    check_rollouts(config)
    _check_fine_tuning(config)
    check_score_head(config)
    _check_encoder(config)
    check_distillation(config)
    check_reference_sync(config)
    check_batch_invariant(config)
    data = data_parallel_size(config.parallel, world_size)
    check_dynamic_context(config, data * config.parallel.context_parallel_size)
    BatchSizeSchedule.from_config(
        config.train, data_parallel_size=data_parallel_size(config.parallel, world_size)
    )
    check_schedule(config.optim, config.train)
    check_loss_scale(config.optim, config.train.precision)
    _check_mup(config)
    _check_qk_clip(config)
    _check_profile(config.log)


def _check_mup(config: RunConfig) -> None:
    base = config.model.mup_base_num_layers
    if base is not None and "sgd" in config.optim.optimizers:
        raise ConfigError(
            f"model.mup_base_num_layers {base} scales rates by depth for optimizers whose updates do not grow with the "
            "gradient, but sgd's do; choose another optimizer, or leave mup_base_num_layers out"
        )


def _check_qk_clip(config: RunConfig) -> None:
    """Raise ConfigError if qk_clip cannot change the attention logits, or not consistently."""
    if not config.optim.qk_clip:
        return
    model = config.model
    norms = [name for name in ("qk_layernorm", "qk_l2_norm") if getattr(model, name)]
    if norms and not model.multi_latent_attention:
        raise ConfigError(
            f"optim.qk_clip is true and model.{norms[0]} is true, but normalized queries and keys do not depend on the "
            "size of their weights, and their logits are bounded already; turn qk_clip off"
        )
    if config.lora.rank is not None or config.lora.load is not None:
        raise ConfigError(
            "optim.qk_clip is true, but adapters leave the weights of queries and keys frozen; turn qk_clip off"
        )
    if "schedule_free_adamw" in config.optim.optimizers:
        raise ConfigError(
            "optim.qk_clip is true, but schedule_free_adamw averages weights, which would not be rescaled; choose "
            "another optimizer, or turn qk_clip off"
        )


def check_base(config: RunConfig) -> None:
    """Raise ConfigError for adapters on random weights, and for an evaluation without weights."""
    _check_evaluation(config)
    lora = config.lora
    if config.model.init_from is None and (lora.rank is not None or lora.load is not None):
        setting = f"lora.rank is {lora.rank}" if lora.load is None else f"lora.load is {lora.load}"
        raise ConfigError(
            f"{setting}, but model.init_from is not set: adapters would be trained on random weights, which stay "
            "frozen; set it to the weights that they are for, a Hugging Face folder or name, or a run folder"
        )


def _check_evaluation(config: RunConfig) -> None:
    if not config.train.skip_train:
        return
    if config.checkpoint.load is None and config.model.init_from is None:
        raise ConfigError(
            "train.skip_train is true, but there are no weights to evaluate; set checkpoint.load or model.init_from, "
            "or leave it out to train"
        )
    if not config.train.eval_iters:
        raise ConfigError(
            "train.skip_train is true and train.eval_iters 0, so there is nothing to do; set it to the number of "
            "global batches to evaluate"
        )


def _check_available(config: RunConfig) -> None:
    """Raise ConfigError for settings marked NOT_YET on their fields."""
    for section in RunConfig.model_fields:
        values = getattr(config, section)
        for name, field in type(values).model_fields.items():
            if NOT_YET not in field.metadata or (value := getattr(values, name)) == field.default:
                continue
            if name not in values.unread(config):
                meaning = field.description.partition(":")[0]
                raise ConfigError(
                    f"{section}.{name} is {value}, but this version does not have {meaning}; leave it at "
                    f"{field.default} or remove it"
                )


def _check_adapters(config: RunConfig) -> None:
    lora, model = config.lora, config.model
    lora.check_requirements("lora")
    if lora.rank is None:
        return
    parts = lora.parts(model)
    experts = [site for site in parts if site.startswith(EXPERTS)]
    if experts and lora.dropout:
        raise ConfigError(
            f"lora.dropout {lora.dropout} with adapters on experts is not supported, as in PEFT: set it to 0, or name "
            "targets other than the experts, such as linear_qkv and linear_proj"
        )
    if lora.use_dora and (experts or lora.dropout):
        raise ConfigError(
            "lora.use_dora with "
            f"{'adapters on experts' if experts else f'lora.dropout {lora.dropout}'} is not supported; "
            f"{'name other targets' if experts else 'set dropout to 0'}, or turn use_dora off"
        )
    if lora.decomposes_base and (experts or lora.has_quantized_base):
        raise ConfigError(
            f"lora.init_lora_weights is {lora.init_lora_weights}, which is not supported "
            + (
                "on experts, as in PEFT; name other targets, or leave it out"
                if experts
                else f"with lora.quantize_base {lora.quantize_base}, because the base that PiSSA and OLoRA leave would "
                "have to be quantized; leave one of the two out"
            )
        )
    if lora.has_quantized_base and config.train.fp8_format is not None:
        raise ConfigError(
            f"lora.quantize_base is {lora.quantize_base} and train.fp8_format {config.train.fp8_format}, but matmuls "
            "of a quantized base are in train.precision; set one of the two"
        )
    stack = max(model.num_layers - model.encoder_layers, model.encoder_layers)
    if beyond := [number for number in lora.layers_to_transform or () if number >= stack]:
        raise ConfigError(
            f"lora.layers_to_transform has {beyond[0]}, but the layers are numbered from 0 to {stack - 1}; correct it"
        )
    if model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate:
        raise ConfigError(
            f"lora.rank {lora.rank} freezes the model, but model.moe_router_enable_expert_bias moves the experts' "
            "biases; set model.moe_router_bias_update_rate to 0"
        )
    if config.checkpoint.export_hf:
        raise ConfigError(
            f"checkpoint.export_hf writes a full model, but with lora.rank {lora.rank} a run only has adapters; turn "
            "it off, and merge or export them afterwards with megalith lora"
        )
    size = config.parallel.tensor_model_parallel_size
    if parts.get(QKV) == (WHOLE,) and model.query_groups % size:
        raise ConfigError(
            f"lora.targets {', '.join(lora.targets)} has one adapter for all rows of linear_qkv, but "
            f"parallel.tensor_model_parallel_size {size} does not divide model.num_query_groups {model.query_groups}; "
            "name linear_qkv, which has one each for queries, keys and values, or choose a tensor size among "
            f"{divisors(model.query_groups)}"
        )


def _check_lengths(model: ModelConfig, data: DataConfig) -> None:
    lengths = {"seq_length": data.seq_length}
    if model.encoder_layers:
        lengths["decoder_seq_length"] = data.decoder_length
    for name, length in lengths.items():
        if (longest := model.max_position_embeddings) is not None and length > longest:
            raise ConfigError(
                f"data.{name} {length} is longer than model.max_position_embeddings {longest}; shorten the "
                "sequences, or raise the model's limit"
            )


def _check_fine_tuning(config: RunConfig) -> None:
    data, chat = config.data, config.chat
    if chat is None:
        return
    enabled = [f"{section.name}.enabled" for section in config.chat_sections if section.enabled]
    if len(enabled) > 1:
        raise ConfigError(
            f"{enabled[0]} and {enabled[1]} are both on, and a run uses one method; leave out the other"
        )
    if config.rl.prompts_or_rollouts:
        raise ConfigError(
            f"rl.{'prompts' if config.rl.prompts else 'rollouts'} is set, which `megalith grpo` trains on, but "
            f"{chat.name}.enabled reads data.data_path; use `megalith grpo`, or leave it out"
        )
    names = ("dataset", "mock", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    if conflicting := [name for name in names if getattr(data, name)]:
        raise ConfigError(
            f"data.{' and data.'.join(conflicting)} {'are' if conflicting[1:] else 'is'} on, but "
            f"{chat.name}.enabled reads chat data, whose samples are always separate; leave it out, and set the data's "
            "paths"
        )
    if chat.num_train_epochs is not None:
        check_epochs(config)
    if config.dpo.enabled:
        check_preference_losses(config.dpo)
    if config.sft.enabled and config.sft.loss_type == "dft" and config.distill.teacher_or_logits is not None:
        raise ConfigError("sft.loss_type is dft, but `megalith distill` has a loss of its own; leave it out")
    fp8 = config.train.fp8_format
    if (config.dpo.enabled or config.kto.enabled) and fp8 is not None:
        raise ConfigError(
            f"train.fp8_format is {fp8}, but {chat.name} computes the reference's log-probabilities before a backward "
            "pass has set the FP8 scales; leave it out"
        )


def _check_encoder(config: RunConfig) -> None:
    model, data = config.model, config.data
    if model.causal:
        return
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    conflicting = [f"data.{name}" for name in names if getattr(data, name)]
    conflicting += [f"{config.chat.name}.enabled"] if config.chat is not None else []
    conflicting += ["rl.prompts or rl.rollouts"] if config.rl.prompts_or_rollouts else []
    conflicting += ["distill.teacher"] if config.distill.teacher_or_logits is not None else []
    if conflicting:
        raise ConfigError(
            f"{' and '.join(conflicting)} {'are' if conflicting[1:] else 'is'} for models that continue a text, but "
            f"model.model_type is {model.model_type}, which learns what an encoder has read; leave it out"
        )
    if not model.add_lm_head:
        raise ConfigError(
            "model.add_lm_head is false, so there is nothing that masked words are learnt by; set it to true"
        )
    if model.model_type == "bert" and data.mask_prob * (data.seq_length - SPECIAL_COUNT) < 1:
        raise ConfigError(
            f"data.mask_prob {data.mask_prob} of data.seq_length {data.seq_length} without its {SPECIAL_COUNT} special "
            "tokens is less than one token, so that none would ever be masked; raise one of the two"
        )


def check_score_head(config: RunConfig) -> None:
    """Raise ConfigError if a reward model has no score head, or a model with one is trained otherwise."""
    if config.model.score_head and not config.reward.enabled:
        raise ConfigError(
            "model.score_head is on, so the model gives scores in place of tokens, and only `megalith reward` trains "
            "such a model; use that, or omit model.score_head"
        )
    if not config.reward.enabled:
        return
    if not config.model.score_head:
        raise ConfigError("reward.enabled trains a score, but model.score_head is off; omit model.score_head")


def check_preference_losses(dpo: DpoConfig) -> None:
    """Raise ConfigError unless every loss of a pair has its weight and its settings."""
    names = dpo.loss_type if isinstance(dpo.loss_type, list) else [dpo.loss_type]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"dpo.loss_type names {repeated[0]} {names.count(repeated[0])} times; name it once, "
            "and set dpo.loss_weights"
        )
    if dpo.loss_weights is not None and len(dpo.loss_weights) != len(names):
        raise ConfigError(
            f"dpo.loss_weights has {len(dpo.loss_weights)} weights for {len(names)} losses; give one for each"
        )
    if dpo.f_divergence_type != "reverse_kl" and (
        others := {name for name in names if ":" not in name} - OF_MARGINS - {"sft"}
    ):
        raise ConfigError(
            f"dpo.f_divergence_type is {dpo.f_divergence_type}, but dpo.loss_type {min(others)} reads log ratios; use "
            f"{', '.join(sorted(OF_MARGINS))} or sft, or leave it out"
        )
    if dpo.ld_alpha is not None and (others := set(names) & (REFERENCE_FREE | SORTED) - {"sft"}):
        raise ConfigError(
            f"dpo.ld_alpha is {dpo.ld_alpha}, but dpo.loss_type {min(others)} does not read a pair's own log ratios to "
            "a reference; leave it out"
        )
    if dpo.use_weighting and (others := set(names) & SORTED):
        raise ConfigError(
            f"dpo.use_weighting is true, but dpo.loss_type {min(others)} compares a pair with other pairs; leave it out"
        )
    if "exo_pair" in names and not dpo.label_smoothing:
        raise ConfigError(
            "dpo.loss_type exo_pair needs dpo.label_smoothing above 0, because it compares the policy with "
            "probabilities of 1 − label_smoothing and label_smoothing; set it, such as to 0.001"
        )


def check_epochs(config: RunConfig) -> None:
    """Raise ConfigError if num_train_epochs of the chat data cannot set the length of the run."""
    train, setting = config.train, f"{config.chat.name}.num_train_epochs"
    lengths = {name: getattr(train, name) for name in ("train_iters", "train_samples", "rampup_batch_size")}
    lengths = [f"train.{name} is {value}" for name, value in lengths.items() if value is not None]
    if lengths:
        raise ConfigError(
            f"{setting} is {config.chat.num_train_epochs} and {' and '.join(lengths)}; both set the length of the run: "
            "leave out one"
        )
    if train.global_batch_size is None:
        raise ConfigError(f"train.global_batch_size is not set; {setting} needs it, as training does")


def _check_profile(log: LogConfig) -> None:
    if log.profile and log.profile_step_end <= log.profile_step_start:
        raise ConfigError(
            f"log.profile_step_end {log.profile_step_end} must come after log.profile_step_start "
            f"{log.profile_step_start}"
        )


def check_rollouts(config: RunConfig) -> None:
    """Raise ConfigError unless the run can be trained on its rollouts. A run without rollouts passes."""
    rl, train = config.rl, config.train
    rl.check_requirements("rl")
    if not rl.prompts_or_rollouts:
        return
    if rl.prompts:
        _check_prompts(config)
    if train.rampup_batch_size is not None:
        raise ConfigError(
            f"train.rampup_batch_size is {train.rampup_batch_size}, but rollout batches are of one size; leave it out"
        )
    if config.runtime.loss_spike_threshold is not None:
        raise ConfigError(
            f"runtime.loss_spike_threshold is {config.runtime.loss_spike_threshold}, but a policy's loss is around 0 "
            "and no measure of its health; leave it out"
        )
    if rl.use_adaptive_entropy and rl.top_entropy_quantile < 1:
        raise ConfigError(
            f"rl.use_adaptive_entropy follows the mean entropy of all tokens, but rl.top_entropy_quantile is "
            f"{rl.top_entropy_quantile:g}; leave out one"
        )
    if rl.use_kl_in_reward and (
        rl.advantage_estimator in ("gdpo", "gae") or rl.advantage_level != "trajectory"
    ):
        raise ConfigError(
            f"rl.use_kl_in_reward is on, but rl.advantage_estimator {rl.advantage_estimator} with rl.advantage_level "
            f"{rl.advantage_level} does not take one reward per completion; choose another estimator, or leave it out"
        )
    if rl.num_generations == 1 and not rl.uses_critic and rl.teacher is None:
        raise ConfigError(
            "rl.num_generations is 1, but an advantage is over the other completions of a prompt, so all would be 0; "
            "choose at least 2"
        )
    completions = (train.global_batch_size or 0) * rl.mini_batches
    if completions % rl.num_generations:
        raise ConfigError(
            f"train.global_batch_size {train.global_batch_size} × rl.mini_batches {rl.mini_batches} = {completions} "
            f"completions are not whole groups of rl.num_generations {rl.num_generations}; choose a multiple of it"
        )
    selects = rl.top_entropy_quantile < 1 or rl.loss_type in ("kl_cov", "clip_cov")
    if train.fp8_format is not None and (rl.beta or rl.needs_old_logprobs_pass or selects):
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but log-probabilities are computed before a backward pass has "
            "set the FP8 scales; leave it out, or set rl.beta to 0 and rl.old_logprobs to rollout, and leave out "
            "rl.top_entropy_quantile, kl_cov and clip_cov"
        )
    _check_clips(config)
    _check_rollout_correction(rl)
    if rl.compares_completions:
        _check_pairs(config)
    if rl.replays_routes:
        _check_router_replay(config)


def _check_router_replay(config: RunConfig) -> None:
    rl = config.rl
    if config.model.num_experts is None:
        raise ConfigError(
            f"rl.router_replay is {rl.router_replay}, but the model has no experts (model.num_experts); leave it out"
        )
    if rl.overlap_tools:
        raise ConfigError(
            f"rl.router_replay is {rl.router_replay} and rl.overlap_tools is on, but turns that are sampled meanwhile "
            "return no routes; leave out one"
        )
    if rl.agent:
        raise ConfigError(
            f"rl.router_replay is {rl.router_replay} and rl.agent is set, but the requests of an agent return no "
            "routes; leave out one"
        )
    if rl.prompts and rl.is_colocated:
        raise ConfigError(
            f"rl.router_replay is {rl.router_replay}, but vLLM in the trainer's processes returns no routes; set "
            "rl.engine_url to a server that was started with --enable-return-routed-experts, or rl.engine to own"
        )


def _check_prompts(config: RunConfig) -> None:
    rl, seq_length = config.rl, config.data.seq_length
    if rl.rollouts:
        raise ConfigError(
            f"rl.prompts is {rl.prompts!r} and rl.rollouts {rl.rollouts!r}; either sample or read: leave out one"
        )
    if not rl.rewards and not rl.environment and not rl.agent and not rl.reward_models:
        raise ConfigError(
            "rl.prompts is set, but rl.reward_funcs is not, and neither is rl.reward_models; set one of them, to give "
            "completions a reward"
        )
    check_rollout_speculation(rl, config.model)
    if rl.overlap_tools and rl.is_colocated:
        raise ConfigError(
            "rl.overlap_tools is on and rl.engine is vllm without rl.engine_url, but vLLM in the trainer's processes "
            "takes no requests while it samples; name a server by rl.engine_url, or turn rl.overlap_tools off"
        )
    if rl.agent and rl.tools_or_environment:
        raise ConfigError(
            f"rl.agent is {rl.agent!r}, which runs its own tools and environments; leave out rl.tools and "
            "rl.environment"
        )
    if rl.agent and rl.is_colocated:
        raise ConfigError(
            "rl.agent is set and rl.engine is vllm without rl.engine_url, but vLLM in the trainer's processes takes no "
            "requests while it samples; name a server by rl.engine_url, or set rl.engine to own"
        )
    rewards = len(rl.rewards) + len(rl.reward_model_paths)
    weights = None if rl.reward_weights is None else len(rl.reward_weights) - rewards
    if weights not in (None, 0) and not (rl.environment and weights == 1):
        models = f" and {len(rl.reward_model_paths)} reward_models" if rl.reward_models else ""
        raise ConfigError(
            f"rl.reward_weights has {len(rl.reward_weights)} weights for {len(rl.rewards)} reward_funcs{models}; give "
            "one each"
        )
    of_all, unpenalized = "are those of all tokens", "have no penalties"
    for name, neutral, reason in (
        ("top_p", 1.0, of_all), ("top_k", 0, of_all), ("min_p", 0.0, of_all), ("repetition_penalty", 1.0, unpenalized),
        ("presence_penalty", 0.0, unpenalized), ("frequency_penalty", 0.0, unpenalized),
    ):  # fmt: skip
        if getattr(rl, name) != neutral:
            raise ConfigError(
                f"rl.{name} is {getattr(rl, name)}, but the trainer's probabilities {reason}, so the ratio would be "
                f"biased; leave it at {neutral}"
            )
    if rl.stop_texts and (rl.engine != "own" or rl.uses_turns):
        where = f"rl.engine is {rl.engine}" if rl.engine != "own" else "rollouts have several turns"
        raise ConfigError(
            f"rl.stop_strings is {list(rl.stop_texts)} and {where}, but only Megalith's engine looks for them, in "
            "single answers; leave it out, or set rl.engine to own without tools, environments and agents"
        )
    if not all(rl.stop_texts):
        raise ConfigError("rl.stop_strings has an empty text; give each at least one character")
    if rl.engine_url in ([], ""):
        raise ConfigError(
            f"rl.engine is {rl.engine}, but rl.engine_url is empty; name a server, or leave it out"
        )
    for url in rl.engine_urls:
        check_address(url, "rl.engine_url")
    for path in filter(is_served, rl.reward_model_paths):
        check_address(path, "rl.reward_models")
    if repeated := [url for url in rl.engine_urls if rl.engine_urls.count(url) > 1]:
        raise ConfigError(
            f"rl.engine_url names {repeated[0]} {rl.engine_urls.count(repeated[0])} times; name each "
            "server once"
        )
    if rl.weight_sync_method == "ipc" and rl.engine != "vllm":
        raise ConfigError(
            f"rl.weight_sync_method is ipc, but rl.engine is {rl.engine}: only vLLM takes handles of GPU memory; "
            "choose nccl, gloo or checkpoint"
        )
    if rl.weight_sync_method == "lora" and (
        rl.is_colocated or (config.lora.rank is None and config.lora.load is None)
    ):
        reason = (
            "vLLM samples in the trainer's processes" if rl.is_colocated else "the run trains no adapters"
        )
        raise ConfigError(
            f"rl.weight_sync_method is lora, but {reason}; choose another method, or set "
            f"{'rl.engine_url' if rl.is_colocated else 'lora.rank'}"
        )
    if rl.weight_sync_delta and (rl.is_colocated or rl.weight_sync_method in ("checkpoint", "lora")):
        where = (
            "vLLM in the trainer's processes"
            if rl.is_colocated
            else f"weight_sync_method {rl.weight_sync_method}"
        )
        raise ConfigError(
            f"rl.weight_sync_delta is on, but {where} loads complete weights; turn it off, or use a server with nccl, "
            "gloo or ipc"
        )
    if rl.max_staleness and rl.is_colocated:
        raise ConfigError(
            f"rl.max_staleness is {rl.max_staleness}, but vLLM without rl.engine_url samples on the trainer's devices, "
            "which are busy meanwhile; name a server on others by rl.engine_url, or leave it at 0"
        )
    if rl.max_staleness and rl.max_resamples:
        raise ConfigError(
            f"rl.max_staleness is {rl.max_staleness} and rl.max_resamples {rl.max_resamples}, but the prompts to "
            "sample again are known only after the previous batch; leave one out"
        )
    if rl.max_staleness and rl.old_logprobs == "policy" and not rl.mismatch_mode:
        raise ConfigError(
            f"rl.max_staleness is {rl.max_staleness} without rl.vllm_importance_sampling_correction, so nothing would "
            "correct for the older weights; leave it on, or set rl.use_decoupled_loss, or rl.old_logprobs to rollout"
        )
    room = seq_length + 1 - rl.max_completion_length
    if (rl.max_prompt_length or 1) > room:
        raise ConfigError(
            f"rl.max_prompt_length {rl.max_prompt_length or 'of one token'} and rl.max_completion_length "
            f"{rl.max_completion_length} do not fit into data.seq_length + 1 = {seq_length + 1}; raise it, or shorten "
            "one of them"
        )


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


def _check_clips(config: RunConfig) -> None:
    rl = config.rl
    if rl.epsilon > 1:
        raise ConfigError(f"rl.epsilon is {rl.epsilon}, but a ratio is never below 0; choose at most 1")
    if rl.delta is not None and rl.delta <= 1 + rl.upper_epsilon and rl.loss_type not in OTHER_RATIOS:
        raise ConfigError(
            f"rl.delta {rl.delta} is not above 1 + epsilon_high = {1 + rl.upper_epsilon}, so the clip would never "
            "count; raise it, or leave it out"
        )
    if rl.loss_type in OTHER_RATIOS:
        unread = {"delta": rl.delta, "clip_ratio_c": rl.clip_ratio_c}
        for name in (name for name, value in unread.items() if value is not None):
            raise ConfigError(
                f"rl.{name} is {unread[name]}, but loss_type {rl.loss_type} has no clip of PPO's; leave it out"
            )
        if rl.importance_sampling_level == "sequence" and (ratio := OTHER_RATIOS[rl.loss_type]):
            raise ConfigError(
                f"rl.importance_sampling_level is sequence, but {rl.loss_type} {ratio}; use token"
            )
    if rl.loss_type == "cispo":
        _check_cispo_bounds(rl)
    if rl.clip_cov_lb >= rl.clip_cov_ub:
        raise ConfigError(
            f"rl.clip_cov_lb {rl.clip_cov_lb} is not below rl.clip_cov_ub {rl.clip_cov_ub}, so no token would be "
            "excluded; lower it, or raise the other"
        )
    if rl.loss_type == "gmpo" and rl.top_entropy_quantile < 1:
        raise ConfigError(
            f"rl.top_entropy_quantile is {rl.top_entropy_quantile}, but gmpo has one ratio per sequence, not per "
            "token; leave it out"
        )
    if rl.loss_type == "vespo" and (mode := rl.mismatch_mode) and not mode.startswith("token"):
        raise ConfigError(
            f"rl.vllm_importance_sampling_mode is {mode}, but vespo multiplies the weights of a sequence's tokens; "
            "choose token_truncate or token_mask"
        )
    if rl.use_decoupled_loss and rl.old_logprobs == "rollout":
        raise ConfigError(
            "rl.use_decoupled_loss is set, but rl.old_logprobs is rollout: the proximal policy would be the one that "
            "sampled, and nothing decoupled; leave out one"
        )
    clips = rl.vllm_importance_sampling_clip_min, rl.vllm_importance_sampling_clip_max
    if rl.use_decoupled_loss and clips != (None, None):
        raise ConfigError(
            f"rl.vllm_importance_sampling_clip_min is {clips[0]} and _max {clips[1]}, but with rl.use_decoupled_loss "
            "the weight has no bound but rl.behav_imp_weight_cap; set that, or leave out one"
        )
    if rl.interpolates_old_logprobs and rl.rollouts:
        raise ConfigError(
            "rl.prox_logp_method is loglinear, but rl.rollouts are of another run, whose versions say nothing of this "
            "one's weights; set it to recompute"
        )
    if rl.vllm_importance_sampling_mode.endswith("_unbounded") and clips != (None, None):
        raise ConfigError(
            f"rl.vllm_importance_sampling_mode is {rl.vllm_importance_sampling_mode}, but "
            f"vllm_importance_sampling_clip_min is {clips[0]} and _max {clips[1]}; choose a mode that has bounds, or "
            "leave them out"
        )
    low, high = rl.mismatch_bounds
    if low is not None and low > high:
        raise ConfigError(
            f"rl.vllm_importance_sampling_clip_min {low} is above vllm_importance_sampling_clip_max {high} "
            f"({rl.vllm_importance_sampling_mode}); lower it, or raise the other"
        )


def _check_pairs(config: RunConfig) -> None:
    """Raise ConfigError if a loss of pairs of completions cannot be computed."""
    rl = config.rl
    if rl.num_generations != 2 or config.train.global_batch_size % 2:
        raise ConfigError(
            f"rl.loss_type is {rl.loss_type}, which compares two completions of a prompt, but rl.num_generations is "
            f"{rl.num_generations} and train.global_batch_size {config.train.global_batch_size}; set the first to 2, "
            "and the second to an even number"
        )
    if not rl.beta:
        raise ConfigError(f"rl.loss_type is {rl.loss_type}, but rl.beta, its β, is 0; set it, such as to 0.1")
    others = {
        "mask_truncated_completions": rl.mask_truncated_completions,
        "max_staleness": rl.max_staleness,
        "rollout_rs": rl.rollout_rs is not None,
        "use_kl_in_reward": rl.use_kl_in_reward,
        "teacher": rl.teacher is not None,
        "off_policy_mask_threshold": rl.off_policy_mask_threshold is not None,
        "top_entropy_quantile": rl.top_entropy_quantile < 1,
        "importance_sampling_level": rl.importance_sampling_level == "sequence",
        "advantage_estimator gae": rl.uses_critic,
        "agents and environments": bool(rl.agent or rl.uses_turns),
    }
    if used := [name for name, is_used in others.items() if is_used]:
        raise ConfigError(
            f"rl.loss_type is {rl.loss_type}, a loss of pairs of completions, which rl.{used[0]} does not apply to; "
            "leave it out"
        )


def _check_rollout_correction(rl: RlConfig) -> None:
    """Raise ConfigError if rejection or normalized mismatch weights cannot be computed."""
    if rl.rollout_rs is not None:
        rejection_criteria(rl.rollout_rs, rl.rollout_rs_threshold)
    if rl.normalizes_mismatch and (rl.old_logprobs == "rollout" or rl.loss_type == "reinforce"):
        raise ConfigError(
            f"rl.rollout_is_batch_normalize is set, but with rl.old_logprobs {rl.old_logprobs} and rl.loss_type "
            f"{rl.loss_type} the weights change within the step, and their mean would be that of a micro-batch; leave "
            "it out"
        )
    if rl.corrects_batches and (rl.interpolates_old_logprobs or rl.uses_critic):
        other = "advantage_estimator is gae" if rl.uses_critic else "prox_logp_method is loglinear"
        raise ConfigError(
            f"rl.{other}, which rl.rollout_rs and rl.rollout_is_batch_normalize do not support; leave one out"
        )


def _check_cispo_bounds(rl: RlConfig) -> None:
    if rl.epsilon_high is None:
        raise ConfigError(
            f"rl.loss_type is cispo, but rl.epsilon_high, the cap of its ratio, is not set: epsilon, {rl.epsilon:g}, "
            "would cap every token; set it to 5 (TRL's recommendation), or rl.clip_ratio_high to 0.28 (verl's and "
            "NeMo-RL's spelling of a cap of 1.28)"
        )
    if rl.cispo_ratio_min is not None and rl.cispo_ratio_min > rl.epsilon_high:
        raise ConfigError(
            f"rl.cispo_ratio_min {rl.cispo_ratio_min} is above rl.epsilon_high {rl.epsilon_high}, the cap of the same "
            "ratio; lower it, or raise the other"
        )


SIXTEEN, BLOCK = 16, 128  # multiples required by FP8 matmuls, and by the blockwise recipe


def check_fp8(config: RunConfig) -> None:
    """Raise ConfigError unless the FP8 settings are supported; names the sizes that do not divide."""
    train = config.train
    if train.fp8_format is None:
        return
    if train.fp8_recipe == "mxfp8":
        raise ConfigError(
            "train.fp8_recipe is mxfp8, whose blocks of 32 only GPUs of compute capability 10 multiply; choose "
            "delayed, tensorwise or blockwise"
        )
    if train.fp8_recipe == "blockwise" and train.fp8_format != "e4m3":
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but PyTorch's blockwise matmul supports only e4m3, whose range "
            "suffices for gradients because each block has a scale; set it to e4m3 with train.fp8_recipe blockwise"
        )
    kept = train.num_layers_at_start_in_bf16 + train.num_layers_at_end_in_bf16
    if train.first_last_layers_bf16 and kept >= config.model.num_layers:
        raise ConfigError(
            f"train.num_layers_at_start_in_bf16 {train.num_layers_at_start_in_bf16} and num_layers_at_end_in_bf16 "
            f"{train.num_layers_at_end_in_bf16} leave none of the {config.model.num_layers} layers to FP8; lower them, "
            "or leave train.fp8_format out"
        )
    multiple = BLOCK if train.fp8_recipe == "blockwise" else SIXTEEN
    wrong = [f"{name} {value}" for name, value in (*_widths(config), *_tokens(config)) if value % multiple]
    if wrong:
        raise ConfigError(
            f"train.fp8_recipe {train.fp8_recipe} takes multiples of {multiple}, and on a rank there are "
            f"{', '.join(dict.fromkeys(wrong))}; change these sizes or their parallel sizes, or leave "
            "train.fp8_format out"
        )


def _tokens(config: RunConfig) -> Iterator[tuple[str, int]]:
    parallel, data = config.parallel, config.data
    lengths = {"": data.seq_length}
    if config.model.encoder_layers:
        lengths[" in the decoder"] = data.decoder_length
    for where, length in lengths.items():
        tokens = config.train.micro_batch_size * length // parallel.context_parallel_size
        yield f"tokens of a micro-batch{where}", tokens
        if parallel.overlaps:  # micro-batches are halved
            tokens //= 2
            yield f"tokens of half a micro-batch{where}", tokens
        if parallel.sequence_parallel:
            yield f"tokens under sequence_parallel{where}", tokens // parallel.tensor_model_parallel_size
        if parallel.context_parallel_size > 1 and config.train.fp8_recipe == "blockwise":
            # otherwise a block would contain other tokens than in one process
            yield f"tokens of a rank's chunk{where}", length // (2 * parallel.context_parallel_size)


def _widths(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Yield the input and output widths of a rank's matmuls, with names."""
    model, size = config.model, config.parallel.tensor_model_parallel_size
    yield "model.hidden_size", model.hidden_size
    if model.multi_latent_attention:
        yield from _latent_widths(model, size)
    elif model.attention_layers:
        heads, groups = model.num_attention_heads // size, max(model.query_groups // size, 1)
        yield "rows of linear_qkv", (heads * (1 + model.attention_output_gate) + 2 * groups) * model.head_dim
        yield "columns of linear_proj", heads * model.head_dim
    if "mamba2" in model.recurrent_mixers:
        yield "columns of Mamba-2's linear_out", model.mamba_heads * model.mamba_head_dim // size
    if "short_conv" in model.recurrent_mixers:
        yield "columns of the short convolution's linear_out", model.hidden_size // size
    if "gated_delta_net" in model.recurrent_mixers:
        keys, values = model.linear_num_key_heads // size, model.linear_num_value_heads // size
        yield (
            "rows of linear_in",
            2 * (keys * model.linear_key_head_dim + values * model.linear_value_head_dim),
        )
        yield "columns of linear_out", values * model.linear_value_head_dim
    if len(model.expert_layers) < model.num_layers + len(model.mtp_layers):
        yield "ffn_hidden_size", model.ffn_size // size
    if model.num_experts is not None:
        yield "moe_ffn_hidden_size", model.expert_size // config.parallel.expert_tensor_parallel_size
    if model.moe_shared_expert_intermediate_size:
        yield "moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size // size


def _latent_widths(model: ModelConfig, size: int) -> Iterator[tuple[str, int]]:
    heads = model.num_attention_heads // size
    keys = model.qk_head_dim + model.qk_pos_emb_head_dim
    if model.q_lora_rank:
        yield "q_lora_rank", model.q_lora_rank
    yield "rows of queries", heads * keys
    yield "kv_lora_rank", model.kv_lora_rank
    yield "rows of linear_kv_down_proj", model.kv_lora_rank + model.qk_pos_emb_head_dim
    yield "rows of linear_kv_up_proj", heads * (model.qk_head_dim + model.v_head_dim)
    yield "columns of linear_proj", heads * model.v_head_dim
