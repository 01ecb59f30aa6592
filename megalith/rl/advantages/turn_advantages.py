"""Per-turn advantages (`rl.advantage_level: turn`), for environments that reward each step.

    G_it = Σ_{k ≥ t} γ^(k − t) · w · s_ik + γ^(T_i − 1 − t) · e_i

s_ik is the environment's reward for step k of completion i, w its weight, γ `rl.step_discount`, T_i the number of
turns, and e_i the sum of the completion's other rewards, which count at its last turn. For the advantages of turn t,
`rl.advantage_estimator` is applied to the G_it of the completions of a group that have a turn t. If only one completion
has a turn t, its advantage there is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalith.config import RlConfig
from megalith.rl.advantages.advantages import apply_estimator
from megalith.rl.rollouts.rollouts import PromptGroup, RatedCompletion


def turn_returns(rl: RlConfig, completion: RatedCompletion, total: float) -> np.ndarray:
    """Return the discounted return G of each turn, float64 [turns].

    Args:
        rl: section `rl` of the configuration.
        completion: a completion with `turn_rewards`.
        total: weighted reward of the completion, which includes the discounted sum of its turns' rewards.
    """
    weight = 1.0
    if rl.reward_weights is not None and len(rl.reward_weights) == len(completion.rewards):
        weight = rl.reward_weights[-1]
    steps = weight * np.asarray(completion.turn_rewards)
    returns, after = np.zeros(len(steps)), total - float(rl.step_discount ** np.arange(len(steps)) @ steps)
    for turn in reversed(range(len(steps))):
        is_last = turn == len(steps) - 1
        after = steps[turn] + (after if is_last else rl.step_discount * after)
        returns[turn] = after
    return returns


def turn_advantages(
    rl: RlConfig, groups: Sequence[PromptGroup], totals: np.ndarray, lengths: np.ndarray
) -> list[list[np.ndarray | None]]:
    """Return the advantages of each turn, a float64 array [turns] per group and completion.

    Entries are None for completions without turn rewards. Their tokens get the completion's advantage.

    Args:
        rl: section `rl` of the configuration.
        groups: a rollout batch.
        totals: weighted rewards, float64 [groups, completions], NaN where absent.
        lengths: int [groups, completions], tokens per completion.
    """
    returns = [
        [
            turn_returns(rl, one, total) if one.turn_rewards else np.zeros(0)
            for one, total in zip(group.completions, row)
        ]
        for group, row in zip(groups, totals.tolist())
    ]
    most = max((len(one) for row in returns for one in row), default=0)
    by_turn = np.full((*totals.shape, most), np.nan)
    for g, row in enumerate(returns):
        for n, one in enumerate(row):
            by_turn[g, n, : len(one)] = one
    values = (
        np.stack([apply_estimator(rl, by_turn[..., t], lengths) for t in range(most)], -1)
        if most
        else by_turn
    )
    return [
        [values[g, n, : len(one)] if len(one) else None for n, one in enumerate(row)]
        for g, row in enumerate(returns)
    ]


def token_advantages(completion: RatedCompletion, turns: np.ndarray) -> np.ndarray:
    """Return the advantage of each token, float64 [tokens]. Turn t is the t-th sampled segment.

    Args:
        completion: a completion.
        turns: advantages of its turns, float64 [turns]. Sampled segments after the last turn get the last turn's
            advantage.
    """
    segments = completion.segments or (len(completion.ids),)
    at = np.minimum(np.arange(len(segments)) // 2, len(turns) - 1)
    return np.repeat(turns[at], segments)
