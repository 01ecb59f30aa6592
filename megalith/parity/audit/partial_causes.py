"""Causes that affect some parameters: no gradient, a missing reduction, a factor, two copies of a tied weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megalith.parity.audit.evidence import StepEvidence
from megalith.parity.audit.findings import Finding, find_in


def name_parts(e: StepEvidence, tied: Mapping[str, str]) -> list[Finding]:
    """Return the causes if only some parameters differ and each has a cause, otherwise none."""
    if e.departing.all():
        return []
    remaining = e.departing.clone()
    findings = [*_absent(e, remaining), *_tied(e, remaining, tied)]
    findings += [*_unequal_copies(e, remaining), *_factors_by_name(e, remaining)]
    return findings if findings and not remaining.any() else []


def _absent(e: StepEvidence, remaining: Tensor) -> Iterator[Finding]:
    absent = remaining & (e.norms == 0)
    if absent.any():
        remaining &= ~absent
        yield find_in(e, "no-gradient", absent)


def _tied(e: StepEvidence, remaining: Tensor, tied: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if tied weights are two parameters whose gradients sum to the correct one."""
    entries = {(e.entries[i].rank, e.entries[i].name): i for i in remaining.nonzero().flatten().tolist()}
    fit = torch.zeros_like(remaining)
    for (rank, name), i in entries.items():
        other = entries.get((rank, tied.get(name, "")))
        if other is not None:
            error = (e.observed[i] + e.observed[other] - e.expected[i]).norm() / e.scale[i]
            fit[[i, other]] |= bool(error <= 2 * e.bound[i])
    if fit.any():
        remaining &= ~fit
        yield find_in(e, "tied-weights", fit)


def _unequal_copies(e: StepEvidence, remaining: Tensor) -> Iterator[Finding]:
    axes = dict.fromkeys(axis for dump in e.ranks for axis in dump.header.mesh)
    for axis in axes:
        size = 1 + max(dump.at(axis) for dump in e.ranks)
        fit = torch.zeros_like(remaining)
        for i in remaining.nonzero().flatten().tolist():
            copies = e.copies(i, axis)
            if len(copies) < 2:
                continue
            total = e.observed[copies].sum(0, keepdim=True)
            spread = (e.observed[copies] - total / len(copies)).norm(dim=1).max() / e.scale[i]
            error = min(((total / part - e.expected[i]).norm() / e.scale[i]).item() for part in (1, size))
            fit[i] = bool(spread > e.bound[i]) and error <= 2 * e.bound[i]
        if fit.any():
            remaining &= ~fit
            yield find_in(e, "missing-reduction", fit, f"axis {axis} of {size} ranks")


def _factors_by_name(e: StepEvidence, remaining: Tensor) -> Iterator[Finding]:
    by_factor: dict[float, Tensor] = {}
    for i in remaining.nonzero().flatten().tolist():
        factor = e.factor(e.expected, torch.arange(len(remaining)) == i)
        error = (e.observed[i] - factor * e.expected[i]).norm() / e.scale[i]
        if error <= e.bound[i] * max(1.0, abs(factor)):
            close = next((f for f in by_factor if abs(f - factor) < 0.03 * max(f, 1e-3)), factor)
            by_factor.setdefault(close, torch.zeros_like(remaining))[i] = True
    if len(by_factor) > 3:  # many factors of their own are no cause
        return
    sizes = {
        axis: 1 + max(dump.at(axis) for dump in e.ranks) for dump in e.ranks for axis in dump.header.mesh
    }
    for factor, fit in by_factor.items():
        remaining &= ~fit
        axes = [axis for axis, size in sizes.items() if size > 1 and abs(factor / size - 1) < 0.03]
        cause, details = ("reduced-twice", f", axis {axes[0]}") if axes else ("factor", "")
        yield find_in(e, cause, fit, f"factor {factor:.4g}{details}")
