"""DAPO (Yu et al. 2025): PPO's clip, averaged over the tokens of the step."""

from megalith.rl.losses.grpo_loss import GrpoLoss


class Dapo(GrpoLoss):
    """Mean of the token losses ℓ over the tokens in the loss (mask m): Σ m·ℓ / Σ m, GrpoLoss's default."""
