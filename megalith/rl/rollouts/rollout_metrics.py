"""Advantages and metrics of a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalith.config import RlConfig
from megalith.rl.advantages.advantages import ZERO_STD, Advantages, compute_advantages
from megalith.rl.advantages.turn_advantages import token_advantages, turn_advantages
from megalith.rl.rollouts.rollouts import PromptGroup, RatedCompletion


def batch_advantages(rl: RlConfig, groups: Sequence[PromptGroup]) -> Advantages:
    rewards = np.array([[completion.rewards for completion in group.completions] for group in groups])
    lengths = np.array([[len(completion.ids) for completion in group.completions] for group in groups])
    return compute_advantages(rl, rewards, lengths)


def batch_token_advantages(
    rl: RlConfig, groups: Sequence[PromptGroup], advantages: Advantages
) -> list[list[float | np.ndarray]]:
    """Return the advantages of the completions, by group and completion.

    A number is the advantage of all tokens. With rl.advantage_level turn, it is an array, float64 [tokens].
    """
    values: list[list[float | np.ndarray]] = advantages.values.tolist()
    if rl.advantage_level == "trajectory":
        return values
    lengths = np.array([[len(one.ids) for one in group.completions] for group in groups])
    by_turn = turn_advantages(rl, groups, advantages.rewards, lengths)
    return [
        [
            value if turns is None else token_advantages(one, turns)
            for one, value, turns in zip(group.completions, *row)
        ]
        for group, *row in zip(groups, values, by_turn)
    ]


def prefill_metrics(prefilled: int, reused: int) -> dict[str, list[float]]:
    """Return as metrics, per replica, how many prompt tokens had their keys and values computed, and how many
    reused.
    """
    fraction = reused / max(prefilled + reused, 1)
    return {"prefill_tokens_reused": [float(reused)], "prefill_reused": [fraction]}


def absent_rewards(names: Sequence[str], groups: Sequence[PromptGroup]) -> list[str]:
    """Return the names of the rewards that no completion has."""
    absent = np.isnan([one.rewards for group in groups for one in group.completions]).all(0)
    return [name for name, is_absent in zip(names, absent) if is_absent]


def absent_message(name: str, groups: Sequence[PromptGroup], streak: str = "") -> str:
    count = sum(len(group.completions) for group in groups)
    return (
        f"the reward {name} is None or NaN for all {count:,} completions{streak} and has no effect; correct "
        "the function, or remove it from the rewards"
    )


def stale_tokens(rl: RlConfig, one: RatedCompletion, first_step: int) -> np.ndarray:
    """Return a mask of the tokens that were sampled by weights older than rl.max_staleness allows, bool [tokens].

    These tokens are left out of the loss.
    """
    if not rl.max_staleness or one.version is None:
        return np.zeros(len(one.ids), dtype=bool)
    oldest = first_step - rl.max_staleness * rl.steps_per_batch
    return np.broadcast_to(one.version < oldest, len(one.ids))


def staleness_metrics(rl: RlConfig, groups: Sequence[PromptGroup], first_step: int) -> dict[str, float]:
    """Return statistics of the staleness, in steps, over all tokens; empty without rl.max_staleness."""
    if not rl.max_staleness:
        return {}
    completions = [one for group in groups for one in group.completions]
    lags = first_step - np.concatenate([np.broadcast_to(one.version, len(one.ids)) for one in completions])
    dropped = sum(int(stale_tokens(rl, one, first_step).sum()) for one in completions)
    return {"staleness": float(lags.mean()), "staleness_max": int(lags.max()), "tokens_dropped": dropped}


def reward_metrics(groups: Sequence[PromptGroup], advantages: Advantages) -> dict[str, float]:
    """Return the metrics of a rollout batch for metrics.jsonl."""
    completions = [completion for group in groups for completion in group.completions]
    rewards, lengths = (
        advantages.rewards[~np.isnan(advantages.rewards)],
        [one.sampled_tokens for one in completions],
    )
    return {
        "rewards_mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "rewards_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "rewards_absent": int(np.isnan(advantages.rewards).sum()),
        "advantages_mean": float(advantages.values.mean()),
        "advantages_std": float(advantages.values.std(ddof=1)) if advantages.values.size > 1 else 0.0,
        "groups_without_spread": float((advantages.group_std <= ZERO_STD).mean()),
        "completion_length": float(np.mean(lengths)),
        "completion_length_max": max(lengths),
        "completions_truncated": float(np.mean([one.truncated for one in completions])),
    }
