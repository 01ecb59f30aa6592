"""Findings of an audit: a cause with the affected step, ranks and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from megalith.parity.audit.causes import CAUSES
from megalith.parity.audit.evidence import StepEvidence
from megalith.parity.audit.recorded_parameters import Entry


@dataclass(frozen=True)
class Finding:
    """The cause of a departure in one step."""

    cause: str
    step: int
    details: str = ""
    ranks: list[int] = field(default_factory=list)
    """Ranks that depart; empty: all."""
    parameters: list[str] = field(default_factory=list)
    """Names, in the job, of the parameters that depart; empty: all."""

    @property
    def text(self) -> str:
        return CAUSES[self.cause] + (f" ({self.details})" if self.details else "")


def find(e: StepEvidence, cause: str, details: str = "") -> Finding:
    """Return a finding about all ranks and parameters of a step."""
    return Finding(cause, e.step, details)


def find_in(e: StepEvidence, cause: str, chosen: Tensor, details: str = "") -> Finding:
    """Return a finding about some entries of a step. It lists their ranks and names unless all entries are chosen.

    Args:
        e: evidence of the step.
        cause: one of CAUSES.
        chosen: bool [entries].
        details: text after the cause.
    """
    if chosen.all():
        return find(e, cause, details)
    return find_in_entries(e, cause, (e.entries[i] for i in chosen.nonzero().flatten().tolist()), details)


def find_in_entries(e: StepEvidence, cause: str, entries: Iterable[Entry], details: str = "") -> Finding:
    """Return a finding about these entries, with their ranks and names."""
    entries = list(entries)
    names = list(dict.fromkeys(entry.job_name for entry in entries))
    return Finding(cause, e.step, details, sorted({entry.rank for entry in entries}), names)
