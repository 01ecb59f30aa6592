"""Values of `rl.loss_type`, one file each, listed in config/extensions.py."""

from megalith.rl.losses.base import GrpoLoss

__all__ = ["GrpoLoss"]
