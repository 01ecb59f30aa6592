"""verl's and NeMo-RL's spellings of advantages."""

from __future__ import annotations

from typing import Any

from megalith.config.rules.spellings.spelling import EPSILON, Rl

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


def estimator(name: str, rl: Rl) -> dict[str, Any]:
    if ESTIMATORS[name] == "group":
        return {"advantage_baseline": "group"}
    return {"advantage_estimator": ESTIMATORS[name]}


def estimator_defaults(name: str, rl: Rl) -> dict[str, Any]:
    return {"advantage_epsilon": EPSILON} if name == "grpo_passk" else {}


def scale(value: bool, rl: Rl) -> dict[str, Any]:
    return {"scale_rewards": "group" if value else "none"}


def advantage_epsilon(value: bool, rl: Rl) -> dict[str, Any]:
    return {"advantage_epsilon": EPSILON} if value else {}


def baseline(value: bool, rl: Rl) -> dict[str, Any]:
    return {"advantage_baseline": "leave_one_out" if value else "group"}


def deviation(value: bool, rl: Rl) -> dict[str, Any]:
    """Return the settings for NeMo-RL's standard deviation, which is over the other completions of the prompt."""
    return {"advantage_deviation": "others", "advantage_epsilon": EPSILON} if value else {}
