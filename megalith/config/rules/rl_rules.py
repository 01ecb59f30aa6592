"""The rules of reinforcement learning from rollouts: whole groups, batches that a checkpoint can stand between."""

from __future__ import annotations

from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_rl(config: RunConfig) -> None:
    """Raises ConfigError unless the run can be trained on its rollouts. A run without any passes."""
    rl, train = config.rl, config.train
    if not rl.files:
        return
    if train.rampup_batch_size is not None:
        raise ConfigError(
            f"train.rampup_batch_size is {train.rampup_batch_size}, but rollout batches are of one size; leave it out"
        )
    if config.runtime.loss_spike_threshold is not None:
        raise ConfigError(
            f"runtime.loss_spike_threshold is {config.runtime.loss_spike_threshold}, but a policy's loss is around 0 "
            "and no measure of its health; leave it out"
        )
    completions = (train.global_batch_size or 0) * rl.mini_batches
    if completions % rl.num_generations:
        raise ConfigError(
            f"train.global_batch_size {train.global_batch_size} × rl.mini_batches {rl.mini_batches} = {completions} "
            f"completions are not whole groups of rl.num_generations {rl.num_generations}; choose a multiple of it"
        )
    if train.fp8_format is not None and (rl.beta or rl.computes_old):
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but log-probabilities are asked for before a backward pass has "
            "given FP8 its scales; leave it out, or set rl.beta to 0 and rl.old_logprobs to rollout"
        )
    _check_clips(config)
    _check_saves(config)


def _check_clips(config: RunConfig) -> None:
    rl = config.rl
    if rl.epsilon > 1:
        raise ConfigError(f"rl.epsilon is {rl.epsilon}, but a ratio is never below 0; choose at most 1")
    if rl.delta is not None and rl.delta <= 1 + rl.upper_epsilon and rl.loss_type != "cispo":
        raise ConfigError(
            f"rl.delta {rl.delta} is not above 1 + epsilon_high = {1 + rl.upper_epsilon}, so the clip would never "
            "count; raise it, or leave it out"
        )
    if rl.loss_type == "cispo":
        unread = {"delta": rl.delta, "clip_ratio_c": rl.clip_ratio_c}
        for name in (name for name, value in unread.items() if value is not None):
            raise ConfigError(
                f"rl.{name} is {unread[name]}, but loss_type cispo has no clip of PPO's; leave it out"
            )
        if rl.importance_sampling_level == "sequence":
            raise ConfigError(
                "rl.importance_sampling_level is sequence, but cispo caps each token's ratio; use token"
            )
    low, high = rl.vllm_importance_sampling_clip_min, rl.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low > high:
        raise ConfigError(
            f"rl.vllm_importance_sampling_clip_min {low} is above vllm_importance_sampling_clip_max {high}; exchange "
            "them"
        )


def _check_saves(config: RunConfig) -> None:
    """Old log-probabilities are of the weights before a rollout batch, which no checkpoint inside of it has."""
    rl, interval = config.rl, config.checkpoint.save_interval
    if rl.computes_old and interval is not None and interval % rl.steps_per_batch:
        raise ConfigError(
            f"checkpoint.save_interval {interval} would save inside of a rollout batch, which is "
            f"{rl.steps_per_batch} steps (rl.num_iterations {rl.num_iterations} × rl.mini_batches "
            f"{rl.mini_batches}); choose a multiple of it"
        )
