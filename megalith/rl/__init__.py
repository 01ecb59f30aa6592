"""Training on generated completions, on preferences and on a teacher's predictions."""

from megalith.rl.distill import train_distilled
from megalith.rl.dpo import train_dpo
from megalith.rl.grpo import train_grpo
from megalith.rl.grpo_trainer import GRPOTrainer, RLOOTrainer
from megalith.rl.kto import train_kto
from megalith.rl.losses import GrpoLoss
from megalith.rl.objective import PolicyLoss, RolloutBatch
from megalith.rl.preference_loss import PreferenceBatch, PreferenceLoss
from megalith.rl.reward_model import train_reward
from megalith.rl.rollout_reader import load_rollouts
from megalith.rl.rollouts import PromptGroup, RatedCompletion, Rollouts, save_rollouts
from megalith.rl.tuning_trainers import (
    DPOTrainer,
    GKDTrainer,
    KTOTrainer,
    ORPOTrainer,
    RewardTrainer,
    SFTTrainer,
)

__all__ = [
    "DPOTrainer",
    "GKDTrainer",
    "GRPOTrainer",
    "GrpoLoss",
    "KTOTrainer",
    "ORPOTrainer",
    "PolicyLoss",
    "PreferenceBatch",
    "PreferenceLoss",
    "PromptGroup",
    "RLOOTrainer",
    "RatedCompletion",
    "RewardTrainer",
    "RolloutBatch",
    "Rollouts",
    "SFTTrainer",
    "load_rollouts",
    "save_rollouts",
    "train_distilled",
    "train_dpo",
    "train_grpo",
    "train_kto",
    "train_reward",
]
