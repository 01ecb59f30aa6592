"""Differences without a predicted cause: they come from dropout, or only their origin is known."""

from __future__ import annotations

import torch

from megalith.errors import shorten
from megalith.parity.audit.evidence import StepEvidence
from megalith.parity.audit.findings import Finding, find, find_in
from megalith.parity.audit.recorded_parameters import layer_number


def name_dropout(e: StepEvidence) -> list[Finding]:
    """Return a finding if dropout modules are active."""
    names = sorted({name for dump in e.ranks for name in dump.header.dropout})
    return [find(e, "dropout", shorten(names))] if names else []


def name_unexplained(e: StepEvidence, losses_depart: bool) -> list[Finding]:
    """Return a finding with the layers, ranks or axis in which the differences first appear."""
    copies_differ = e.copies_differ("tp")
    if _losses_differ_in_tp(e) or (copies_differ and losses_depart):
        return [find(e, "forward-reduction")]
    routers = torch.tensor([".gate.weight" in n.name or ".router." in n.name for n in e.entries])
    layers = torch.tensor([_depth(entry.name) for entry in e.entries])
    departing, right = layers[e.departing], layers[~e.departing]
    deepest = departing.max().item()
    if (
        routers.any()
        and e.departing[routers].all()
        and right.numel()
        and right.max() >= deepest
        and not losses_depart
    ):
        return [find_in(e, "router-loss", e.departing)]
    above, below = layers > deepest, layers < deepest
    if above.any() and not losses_depart and e.departing[below].float().mean() > 0.9:
        cause = "backward-reduction" if copies_differ else "backward"
        return [find_in(e, cause, e.departing, f"from layer {deepest} down")]
    return [find_in(e, "unexplained", e.departing, _closest(e))]


def _losses_differ_in_tp(e: StepEvidence) -> bool:
    """Return True if ranks that differ only in their tp index have different losses."""
    losses: dict[tuple, list[float]] = {}
    for dump in e.ranks:
        others = tuple(sorted((axis, at) for axis, at in dump.header.mesh.items() if axis != "tp"))
        for m, batch in enumerate(dump.batches):
            if "loss" in batch and batch["loss"].numel() == 1:
                losses.setdefault((others, m), []).append(batch["loss"].item())
    return any(max(same) - min(same) > e.loss_bound * abs(max(same)) for same in losses.values())


def _closest(e: StepEvidence) -> str:
    factor = e.factor(e.expected)
    error = e.errors(factor * e.expected).median().item()
    return f"factor {factor:.4g}, after which the median error is {error:.1e}"


def _depth(name: str) -> int:
    """Return the layer index of a parameter; -1 for parameters before the layers, a large number after them."""
    layer = layer_number(name)
    if layer is not None:
        return layer
    return -1 if "embed" in name or "wte" in name or "wpe" in name else 10**6
