"""Training on generated completions, on preferences and on a teacher's predictions."""

from megalith.rl.distill import train_distilled
from megalith.rl.dpo import train_dpo
from megalith.rl.grpo import train_grpo
from megalith.rl.grpo_trainer import GRPOTrainer
from megalith.rl.losses import GrpoLoss
from megalith.rl.objective import PolicyLoss, RolloutBatch
from megalith.rl.preference_loss import PreferenceBatch, PreferenceLoss
from megalith.rl.rollout_reader import load_rollouts
from megalith.rl.rollouts import PromptGroup, RatedCompletion, Rollouts, save_rollouts

__all__ = [
    "GRPOTrainer",
    "GrpoLoss",
    "PolicyLoss",
    "PreferenceBatch",
    "PreferenceLoss",
    "PromptGroup",
    "RatedCompletion",
    "RolloutBatch",
    "Rollouts",
    "load_rollouts",
    "save_rollouts",
    "train_distilled",
    "train_dpo",
    "train_grpo",
]
