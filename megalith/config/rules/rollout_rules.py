"""Rules of GRPO: prompts, rollouts, engines and batches. policy_loss_rules.py has the rules of its losses."""

from __future__ import annotations

from megalith.config.distillation import is_served
from megalith.config.rules.addresses import check_address
from megalith.config.rules.policy_loss_rules import check_clips, check_pairs, check_rollout_correction
from megalith.config.rules.speculation_rules import check_rollout_speculation
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


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
            f"train.rampup_batch_size is {train.rampup_batch_size}, but all rollout batches have the same size; "
            "leave train.rampup_batch_size out"
        )
    if config.runtime.loss_spike_threshold is not None:
        raise ConfigError(
            f"runtime.loss_spike_threshold is {config.runtime.loss_spike_threshold}, but a policy's loss is around 0 "
            "and does not show spikes; leave runtime.loss_spike_threshold out"
        )
    if rl.use_adaptive_entropy and rl.top_entropy_quantile < 1:
        raise ConfigError(
            "rl.use_adaptive_entropy follows the mean entropy of all tokens, but rl.top_entropy_quantile is "
            f"{rl.top_entropy_quantile:g}; leave one of the two out"
        )
    if rl.use_kl_in_reward and (
        rl.advantage_estimator in ("gdpo", "gae") or rl.advantage_level != "trajectory"
    ):
        raise ConfigError(
            "rl.use_kl_in_reward needs one reward per completion, which rl.advantage_estimator "
            f"{rl.advantage_estimator} with rl.advantage_level {rl.advantage_level} does not use; choose another "
            "estimator, or set rl.use_kl_in_reward to false"
        )
    if rl.num_generations == 1 and not rl.uses_critic and rl.teacher is None:
        raise ConfigError(
            "rl.num_generations is 1, but an advantage compares a completion with the prompt's "
            "other completions, so all would be 0; choose at least 2"
        )
    completions = (train.global_batch_size or 0) * rl.mini_batches
    if completions % rl.num_generations:
        raise ConfigError(
            f"train.global_batch_size {train.global_batch_size} × rl.mini_batches {rl.mini_batches} = {completions} "
            f"completions is not a multiple of rl.num_generations {rl.num_generations}; choose sizes whose product "
            "is a multiple"
        )
    selects = rl.top_entropy_quantile < 1 or rl.loss_type in ("kl_cov", "clip_cov")
    if train.fp8_format is not None and (rl.beta or rl.needs_old_logprobs_pass or selects):
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but log-probabilities are computed before a backward pass has "
            "set the FP8 scales; leave train.fp8_format out, or compute no log-probabilities before the step: set "
            "rl.beta to 0 and rl.old_logprobs to rollout, and leave out rl.top_entropy_quantile, kl_cov and clip_cov"
        )
    check_clips(config)
    check_rollout_correction(rl)
    if rl.compares_completions:
        check_pairs(config)
    if rl.replays_routes:
        _check_router_replay(config)


def _check_router_replay(config: RunConfig) -> None:
    rl = config.rl
    if config.model.num_experts is None:
        raise ConfigError(
            f"rl.router_replay is {rl.router_replay}, but the model has no experts (model.num_experts); leave "
            "rl.router_replay out"
        )
    if rl.overlap_tools:
        raise ConfigError(
            f"rl.router_replay is {rl.router_replay} and rl.overlap_tools is on, but turns that are sampled while "
            "tools run do not record expert choices; leave one of the two out"
        )
    if rl.agent:
        raise ConfigError(
            f"rl.router_replay is {rl.router_replay} and rl.agent is set, but the requests of an agent do not "
            "record expert choices; leave one of the two out"
        )
    if rl.prompts and rl.is_colocated:
        raise ConfigError(
            f"rl.router_replay is {rl.router_replay}, but vLLM in the trainer's processes returns no expert choices; "
            "set rl.engine_url to a server that was started with --enable-return-routed-experts, or rl.engine to own"
        )


def _check_prompts(config: RunConfig) -> None:
    rl, seq_length = config.rl, config.data.seq_length
    if rl.rollouts:
        raise ConfigError(
            f"rl.prompts is {rl.prompts!r} and rl.rollouts {rl.rollouts!r}, but a run either samples completions or "
            "reads them; leave one of the two out"
        )
    if not rl.rewards and not rl.environment and not rl.agent and not rl.reward_models:
        raise ConfigError(
            "rl.prompts is set, but neither rl.reward_funcs nor rl.reward_models is, so completions would have no "
            "reward; set one of the two"
        )
    check_rollout_speculation(rl, config.model)
    if rl.overlap_tools and rl.is_colocated:
        raise ConfigError(
            "rl.overlap_tools is on and rl.engine is vllm without rl.engine_url, but vLLM in the trainer's "
            "processes takes no requests while it samples; set rl.engine_url to a server, or rl.overlap_tools to "
            "false"
        )
    if rl.agent and rl.tools_or_environment:
        raise ConfigError(
            f"rl.agent is {rl.agent!r}, but an agent runs its own tools and environments; leave out rl.tools and "
            "rl.environment"
        )
    if rl.agent and rl.is_colocated:
        raise ConfigError(
            "rl.agent is set and rl.engine is vllm without rl.engine_url, but vLLM in the trainer's processes takes no "
            "requests while it samples; set rl.engine_url to a server, or rl.engine to own"
        )
    rewards = len(rl.rewards) + len(rl.reward_model_paths)
    weights = None if rl.reward_weights is None else len(rl.reward_weights) - rewards
    if weights not in (None, 0) and not (rl.environment and weights == 1):
        models = f" and {len(rl.reward_model_paths)} reward_models" if rl.reward_models else ""
        raise ConfigError(
            f"rl.reward_weights has {len(rl.reward_weights)} weights for {len(rl.rewards)} "
            f"reward_funcs{models}; list one weight for each"
        )
    of_all, unpenalized = "are those of all tokens", "have no penalties"
    for name, neutral, reason in (
        ("top_p", 1.0, of_all), ("top_k", 0, of_all), ("min_p", 0.0, of_all), ("repetition_penalty", 1.0, unpenalized),
        ("presence_penalty", 0.0, unpenalized), ("frequency_penalty", 0.0, unpenalized),
    ):  # fmt: skip
        if getattr(rl, name) != neutral:
            raise ConfigError(
                f"rl.{name} is {getattr(rl, name)}, but the trainer's probabilities {reason}, so the ratio would be "
                f"biased; set rl.{name} to {neutral}"
            )
    if rl.stop_texts and (rl.engine != "own" or rl.uses_turns):
        where = f"rl.engine is {rl.engine}" if rl.engine != "own" else "rollouts have several turns"
        raise ConfigError(
            f"rl.stop_strings is {list(rl.stop_texts)} and {where}, but stop strings are "
            "supported only by Megalith's engine, in completions of one turn; leave rl.stop_strings "
            "out, or set rl.engine to own without tools, environments and agents"
        )
    if not all(rl.stop_texts):
        raise ConfigError(
            "rl.stop_strings has an empty string; each stop string must have at least one character"
        )
    if rl.engine_url in ([], ""):
        raise ConfigError(
            f"rl.engine is {rl.engine}, but rl.engine_url is empty; set it to a server's address, or leave it out"
        )
    for url in rl.engine_urls:
        check_address(url, "rl.engine_url")
    for path in filter(is_served, rl.reward_model_paths):
        check_address(path, "rl.reward_models")
    if repeated := [url for url in rl.engine_urls if rl.engine_urls.count(url) > 1]:
        raise ConfigError(
            f"rl.engine_url has {repeated[0]} {rl.engine_urls.count(repeated[0])} times; list each "
            "server once"
        )
    if rl.weight_sync_method == "ipc" and rl.engine != "vllm":
        raise ConfigError(
            f"rl.weight_sync_method is ipc, but rl.engine is {rl.engine}, and only vLLM accepts GPU memory handles; "
            "set rl.weight_sync_method to nccl, gloo or checkpoint"
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
            f"rl.weight_sync_delta is on, but {where} loads complete weights; set rl.weight_sync_delta to false, or "
            "use a server with nccl, gloo or ipc"
        )
    if rl.max_staleness and rl.is_colocated:
        raise ConfigError(
            f"rl.max_staleness is {rl.max_staleness}, but vLLM without rl.engine_url samples on the trainer's own "
            "devices, which are training at that time; set rl.engine_url to a server on other devices, or leave "
            "rl.max_staleness at 0"
        )
    if rl.max_staleness and rl.max_resamples:
        raise ConfigError(
            f"rl.max_staleness is {rl.max_staleness} and rl.max_resamples is {rl.max_resamples}, but the prompts to "
            "sample again are known only after the previous batch; leave one of the two out"
        )
    if rl.max_staleness and rl.old_logprobs == "policy" and not rl.mismatch_mode:
        raise ConfigError(
            f"rl.max_staleness is {rl.max_staleness} without rl.vllm_importance_sampling_correction, so nothing "
            "would correct for the older weights; set rl.vllm_importance_sampling_correction or "
            "rl.use_decoupled_loss to true, or rl.old_logprobs to rollout"
        )
    room = seq_length + 1 - rl.max_completion_length
    if rl.max_prompt_length is None and room < 1:
        raise ConfigError(
            f"rl.max_completion_length {rl.max_completion_length} leaves no room for a prompt in data.seq_length + 1 = "
            f"{seq_length + 1} tokens; raise data.seq_length, or lower rl.max_completion_length"
        )
    if rl.max_prompt_length is not None and rl.max_prompt_length > room:
        raise ConfigError(
            f"rl.max_prompt_length {rl.max_prompt_length} and rl.max_completion_length {rl.max_completion_length} "
            f"together exceed data.seq_length + 1 = {seq_length + 1}; raise data.seq_length, or lower one of the two"
        )
