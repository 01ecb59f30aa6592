"""Post-training: reinforcement learning, preference training, reward models and distillation."""

from megalith.rl.distill import train_distilled
from megalith.rl.dpo import train_dpo
from megalith.rl.from_trl.grpo_trainer import GRPOTrainer, RLOOTrainer
from megalith.rl.from_trl.tuning_trainers import (
    DPOTrainer,
    GKDTrainer,
    KTOTrainer,
    ORPOTrainer,
    RewardTrainer,
    SFTTrainer,
)
from megalith.rl.grpo import train_grpo
from megalith.rl.kto import train_kto
from megalith.rl.losses import GrpoLoss
from megalith.rl.objectives.policy_loss import PolicyLoss, RolloutBatch
from megalith.rl.objectives.preference_loss import PreferenceBatch, PreferenceLoss
from megalith.rl.objectives.token_selection import select_tokens
from megalith.rl.reward_model import train_reward
from megalith.rl.rollouts.rollout_reader import load_rollouts
from megalith.rl.rollouts.rollouts import PromptGroup, RatedCompletion, Rollouts, save_rollouts

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
    "select_tokens",
    "train_distilled",
    "train_dpo",
    "train_grpo",
    "train_kto",
    "train_reward",
]
