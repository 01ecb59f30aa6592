"""DAPO (Yu et al. 2025): PPO's clip, averaged over the tokens of the step."""

from megalith.rl.losses.grpo_loss import GrpoLoss


class Dapo(GrpoLoss):
    """Σ m·ℓ / Σ m, which is the default of GrpoLoss."""
