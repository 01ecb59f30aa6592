"""Causes that give micro-batches or ranks wrong weights: means of means, lost gradients, missing
reductions, factors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megalith.parity.audit.evidence import StepEvidence, Sums
from megalith.parity.audit.factors import name_factor
from megalith.parity.audit.findings import Finding, find


def name_combination(
    e: StepEvidence, sums: Sums, cause: str = "", only_factors: bool = False
) -> list[Finding]:
    """Return the causes if one combination of these sums, times a factor, equals every recorded gradient."""
    for combined, weights in combinations(e, sums.counts):
        if only_factors and combined:
            break
        predicted = e.combine(weights, sums)
        factor = e.factor(predicted)
        if not factor or not e.explains(factor * predicted):
            continue
        causes = [find(e, cause)] if cause else []
        tolerance = 2 * e.bound.min().item()
        if abs(factor - 1) > tolerance:
            factors = name_factor(e, factor)
            # A changed batch has another number of tokens, and what it divides by is part of that fault.
            if not cause or factors.cause not in ("factor", "sum-not-mean"):
                causes.append(factors)
        if combined:
            causes.append(find(e, combined, _counts_text(combined, sums.counts)))
        if causes:
            return causes
    return []


def combinations(e: StepEvidence, counts: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each cause with the weights [ranks, dp, micro-batches] that it leads to. The cause "" has the weights of a
    correct job.
    """
    ranks, (dp, micro_batches) = len(e.ranks), counts.shape
    counted = counts > 0
    by_micro_batch = counted / counts.clamp(min=1)
    by_rank = counted / counts.sum(1, keepdim=True).clamp(min=1)
    only_mine = torch.nn.functional.one_hot(e.dp, dp)[:, :, None]  # [ranks, dp, 1]
    last = torch.zeros(micro_batches)
    last[-1] = 1
    yield "", (counted / counts.sum().clamp(min=1)).expand(ranks, -1, -1)
    if micro_batches > 1:
        yield "micro-batch-mean", (by_micro_batch / (dp * micro_batches)).expand(ranks, -1, -1)
    if dp > 1:
        yield "rank-mean", (by_rank / dp).expand(ranks, -1, -1)
        yield "missing-dp-reduction", only_mine * by_rank
        yield "missing-dp-reduction", only_mine * counted / counts.sum().clamp(min=1)
        yield "missing-dp-reduction", only_mine * by_micro_batch / micro_batches
    if micro_batches > 1:
        yield "last-micro-batch", (by_micro_batch * last / dp).expand(ranks, -1, -1)
        yield "first-micro-batch", (by_micro_batch * last.flip(0) / dp).expand(ranks, -1, -1)


def _counts_text(cause: str, counts: Tensor) -> str:
    if cause not in ("micro-batch-mean", "rank-mean"):
        return ""
    sizes = counts.flatten() if cause == "micro-batch-mean" else counts.sum(1)
    return f"valid tokens: {', '.join(f'{size:.0f}' for size in sizes.tolist())}"


def name_not_zeroed(e: StepEvidence, previous: StepEvidence | None) -> list[Finding]:
    """Return a finding if this step's gradients include the gradients of the previous step."""
    if previous is None or previous.observed.shape != e.observed.shape:
        return []
    errors = e.errors(e.expected, e.observed - previous.observed)
    return [find(e, "not-zeroed")] if bool((errors <= e.bound).all()) else []
