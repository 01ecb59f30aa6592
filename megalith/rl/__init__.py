"""Training on what a model has generated: objectives, advantages, rollouts, and the runs made of them."""

from megalith.rl.grpo import train_grpo
from megalith.rl.grpo_trainer import GRPOTrainer
from megalith.rl.objective import PolicyLoss, PreferenceBatch, RolloutBatch, SigmoidPreference
from megalith.rl.rollouts import PromptGroup, RatedCompletion, Rollouts, load_rollouts, save_rollouts

__all__ = [
    "GRPOTrainer",
    "PolicyLoss",
    "PreferenceBatch",
    "PromptGroup",
    "RatedCompletion",
    "RolloutBatch",
    "Rollouts",
    "SigmoidPreference",
    "load_rollouts",
    "save_rollouts",
    "train_grpo",
]
