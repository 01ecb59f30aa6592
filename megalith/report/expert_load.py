"""How a step's tokens were spread over the experts, in figures for the log."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megalith.config import RunConfig
from megalith.models.load_balance import AUX, DROPPED, Z


@dataclass(frozen=True)
class ExpertLoad:
    """One step."""

    aux_loss: float | None
    """Mean over layers and micro-batches, before its coefficient: 1 when balanced; None where there is none."""
    z_loss: float | None
    """As aux_loss."""
    dropped: float
    """Share of the pairs of token and expert that capacities dropped, 0 to 1."""
    imbalance: float
    """The most tokens of an expert against the mean of its layer, averaged over layers; 1 when balanced."""
    tokens: dict[int, list[int]]
    """Tokens sent to each expert, by layer number."""


def expert_load(tallies: Tensor, config: RunConfig, batch_size: int) -> ExpertLoad:
    """From the tallies float32 [layers with experts, experts + 3] of a step of `batch_size` sequences.

    Reads them on the host.
    """
    model, rows = config.model, tallies.double().cpu()
    micro_batches = batch_size // config.train.micro_batch_size
    counts = rows[:, : model.num_experts]
    losses = rows[:, [AUX, Z]].mean(0).div(micro_batches).tolist()
    balances = model.moe_aux_loss_coeff > 0 and model.moe_router_load_balancing_type != "none"
    return ExpertLoad(
        aux_loss=losses[0] if balances else None,
        z_loss=losses[1] if model.moe_z_loss_coeff > 0 else None,
        dropped=(rows[:, DROPPED].sum() / counts.sum()).item(),
        imbalance=(counts.amax(1) / counts.mean(1)).mean().item(),
        tokens=dict(zip(model.expert_layers, counts.long().tolist())),
    )
