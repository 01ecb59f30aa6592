"""Causes that multiply every gradient by a factor: divisions, reductions, loss scales and clipping."""

from __future__ import annotations

import math

import torch

from megalith.parity.audit.causes import CAUSES
from megalith.parity.audit.evidence import StepEvidence
from megalith.parity.audit.findings import Finding, find

ROUND_NORMS = (0.1, 0.25, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds of the gradient norm that jobs usually clip to."""


def name_factor(e: StepEvidence, factor: float) -> Finding:
    """Return the cause if every gradient is off by `factor`."""
    dp, micro_batches = e.shape
    tp = 1 + max(dump.at("tp") for dump in e.ranks)
    tolerance = max(0.02, e.bound.min().item())
    norm = e.recorded_norm()
    text = f"factor {factor:.4g}"

    def near(value: float) -> bool:
        return abs(factor / value - 1) < tolerance

    unshifted = sum(b.token_weights.sum().item() for of_rank in e.batches for b in of_rank)
    if unshifted != e.tokens and abs(factor * unshifted / e.tokens - 1) < 2 * e.bound.min().item():
        return find(e, "unshifted-count", f"{unshifted:.0f} instead of {e.tokens:.0f}")
    if factor < 1 and any(abs(norm / bound - 1) < 2e-3 for bound in ROUND_NORMS):
        return find(e, "clipped", f"{text}, norm {norm:.4g}")
    candidates = [
        ("not-divided", dp, dp), ("divided-twice", 1 / dp, dp),
        ("accumulation-not-divided", micro_batches, micro_batches),
        ("accumulation-divided-twice", 1 / micro_batches, micro_batches),
        ("reduced-twice", tp, tp),
        ("not-divided", dp * micro_batches, dp),
        ("divided-twice", 1 / (dp * micro_batches), dp),
        *(("sum-not-mean", e.tokens / part, e.tokens) for part in (1, dp, micro_batches, dp * micro_batches)),
    ]  # fmt: skip
    causes = list(dict.fromkeys(c for c, value, size in candidates if size > 1 and near(value)))
    if causes:
        others = [CAUSES[cause] for cause in causes[1:]]
        return find(e, causes[0], "; or ".join([text, *others]))
    if factor >= 128 and near(2.0 ** round(math.log2(factor))):
        return find(e, "loss-scale", text)
    return find(e, "factor", text)


def name_rank_factors(e: StepEvidence) -> list[Finding]:
    """Return the cause if the gradients of each rank are off by one factor per rank."""
    ranks = range(len(e.ranks))
    factors = torch.tensor([e.factor(e.expected, e.rank_index == rank) for rank in ranks])
    if len(factors) == 1 or not e.explains(factors[e.rank_index][:, None] * e.expected):
        return []
    text = ", ".join(f"rank {rank}: {factor:.4g}" for rank, factor in enumerate(factors.tolist()))
    norms = torch.tensor([e.recorded_norm(rank) for rank in ranks])
    clipped = factors.max() < 1.01 and ((norms / norms.max()) > 0.99)[factors < 0.99].all()
    return [find(e, "clipped-per-rank" if clipped else "rank-factor", text)]
