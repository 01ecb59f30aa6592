"""Causes that the recorded weights and tokens show without a rerun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.parity.audit import tokens as changes
from megalith.parity.audit.evidence import StepEvidence
from megalith.parity.audit.findings import Finding, find_in_entries
from megalith.parity.audit.recorded_parameters import Entry

SAME_WEIGHTS = 1e-6
"""Largest relative difference between two sketches of equal weights that different devices may cause."""


def unequal_weights(e: StepEvidence, tied: Mapping[str, str]) -> list[Finding]:
    """Return the findings about copies of a parameter that have different values.

    Args:
        e: evidence of the step.
        tied: name of the embedding by the name of the output matrix, if config.json ties them; otherwise empty.
    """
    sketches = [dump.vectors("sketch") for dump in e.ranks]
    first: dict[tuple[str, Any], Tensor] = {}
    differing: dict[str, list[Entry]] = {}
    for entry in e.entries:
        value = sketches[entry.rank].get(entry.job_name)
        if value is not None:
            key = tied.get(entry.name, entry.name), entry.shard
            other = first.setdefault(key, value)
            if (value - other).norm() > SAME_WEIGHTS * other.norm():
                cause = "tied-weights" if entry.name in tied else "weights-differ"
                differing.setdefault(cause, []).append(entry)
    texts = {"tied-weights": "their values differ"}
    return [find_in_entries(e, cause, entries, texts.get(cause, "")) for cause, entries in differing.items()]


def data_findings(step: int, fields: Sequence[Sequence[Mapping[str, Tensor]]]) -> list[Finding]:
    """Return the findings that need no gradients.

    These are equal data on several ranks, padding in the loss, and labels that were shifted twice.

    Args:
        step: number of the step.
        fields: recorded micro-batches by data-parallel rank.
    """
    findings = []
    for d, of_rank in enumerate(fields[1:], 1):
        equal = [
            other
            for other in range(d)
            if len(fields[other]) == len(of_rank)
            and all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(of_rank, fields[other]))
        ]
        if equal:
            findings.append(Finding("same-data", step, f"data-parallel ranks {equal[0]} and {d}"))
            break
    for d, of_rank in enumerate(fields):
        for m, batch in enumerate(of_rank):
            if (count := changes.padding_labels(batch)) and not any(
                f.cause == "padding-in-loss" for f in findings
            ):
                text = f"data-parallel rank {d}, micro-batch {m}: {count} tokens of the recorded labels"
                findings.append(Finding("padding-in-loss", step, text))
    if any(changes.label_offset(batch) == 2 for of_rank in fields for batch in of_rank):
        findings.append(Finding("labels-shifted-twice", step, "the recorded labels are two tokens ahead"))
    return findings
