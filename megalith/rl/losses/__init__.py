"""The built-in losses of `rl.loss_type`, one file each, listed in config/extensions.py."""

from megalith.rl.losses.grpo_loss import GrpoLoss
from megalith.rl.losses.selective_loss import SelectiveLoss
from megalith.rl.losses.sequence_loss import SequenceLoss

__all__ = ["GrpoLoss", "SelectiveLoss", "SequenceLoss"]
