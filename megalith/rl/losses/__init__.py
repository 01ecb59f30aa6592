"""Values of `rl.loss_type`, one file each, listed in config/extensions.py."""

from megalith.rl.losses.grpo_loss import GrpoLoss

__all__ = ["GrpoLoss"]
