"""Metrics of a step's expert load, and the names of its extra losses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megalith.config import ModelConfig, RunConfig
from megalith.models.load_balance import AUX, DROPPED, Z
from megalith.report.metrics import ExpertStepMetrics, StepMetrics
from megalith.report.trackers import BALANCING_LOSSES


def add_expert_metrics(
    metrics: StepMetrics, tallies: Tensor, config: RunConfig
) -> tuple[ExpertStepMetrics, dict[int, list[int]]]:
    """Add the expert metrics of a step. Synchronizes the device.

    Args:
        metrics: the step's other metrics.
        tallies: float32 [MoE layers, experts + 3], as models/load_balance.py sums them.
        config: the run.

    Returns:
        The metrics, and the number of tokens sent to each expert, by layer number.
    """
    model, rows = config.model, tallies.double().cpu()
    micro_batches = metrics.global_batch_size // config.train.sequences_per_pass
    counts = rows[:, : model.num_experts]
    losses = rows[:, [AUX, Z]].mean(0).div(micro_batches).tolist()
    balances = model.moe_aux_loss_coeff > 0 and model.moe_router_load_balancing_type != "none"
    expert_metrics = ExpertStepMetrics(
        **vars(metrics),
        moe_aux_loss=losses[0] if balances else None,
        moe_z_loss=losses[1] if model.moe_z_loss_coeff > 0 else None,
        moe_dropped=(rows[:, DROPPED].sum() / counts.sum()).item(),
        moe_imbalance=(counts.amax(1) / counts.mean(1)).mean().item(),
    )
    return expert_metrics, dict(zip(model.expert_layers, counts.long().tolist()))


def extra_losses(metrics: StepMetrics, mtp_losses: Sequence[float], model: ModelConfig) -> dict[str, float]:
    """Return the auxiliary and MTP losses of a step, under Megatron-LM's names and in its order, and the output z-loss.

    `mtp_losses`: the loss of each MTP layer.
    """
    losses = {}
    if isinstance(metrics, ExpertStepMetrics):
        name = BALANCING_LOSSES.get(model.moe_router_load_balancing_type, "")
        losses = {name: metrics.moe_aux_loss, "z_loss": metrics.moe_z_loss}
    losses |= {f"mtp_{depth} loss": loss for depth, loss in enumerate(mtp_losses, 1)}
    losses["output_z_loss"] = metrics.output_z_loss
    return {name: loss for name, loss in losses.items() if loss is not None}
