"""Training on what a model has generated: objectives, advantages, rollouts, and the runs made of them."""

from megalith.rl.grpo import train_grpo
from megalith.rl.objective import PolicyLoss, PreferenceBatch, RolloutBatch, SigmoidPreference
from megalith.rl.rollouts import Completion, PromptGroup, Rollouts, load_rollouts, save_rollouts

__all__ = [
    "Completion",
    "PolicyLoss",
    "PreferenceBatch",
    "PromptGroup",
    "RolloutBatch",
    "Rollouts",
    "SigmoidPreference",
    "load_rollouts",
    "save_rollouts",
    "train_grpo",
]
