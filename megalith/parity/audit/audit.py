"""`megalith audit`: rerun the steps of a dump and collect the gradients and losses that depart from the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.families import family_of
from megalith.bridge.family import Family
from megalith.config import ModelConfig
from megalith.config.rules.model_rules import check_model
from megalith.errors import CheckpointError, ConfigError
from megalith.parity.audit.dump import WAY_OUT, RankDump, read_dump
from megalith.parity.audit.evidence import Change, StepEvidence, Sums, run_batches
from megalith.parity.audit.findings import Finding
from megalith.parity.audit.namer import name_causes
from megalith.parity.audit.recorded_causes import data_findings, unequal_weights
from megalith.parity.audit.recorded_parameters import layer_number, read_parameters
from megalith.parity.audit.rerun import Reference
from megalith.parity.audit.tokens import read_tokens

FLOORS = {"fp32": 2e-4, "tf32": 1e-2, "bf16": 2e-2, "fp16": 5e-3}
"""Smallest relative error that counts as a departure, by precision. The bound is higher if rounding in this job
explains more.
"""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
WORST = 10
"""Number of departing parameters that a report lists per step."""


@dataclass(frozen=True)
class Departure:
    """A rank's gradient that differs from the reference: its relative error ‖a − b‖ / ‖b‖ and the error's bound."""

    parameter: str
    layer: int | None
    rank: int
    error: float
    bound: float


@dataclass(frozen=True)
class StepReport:
    """Result of the audit of one step."""

    step: int
    gradients: int
    """Number of compared gradients, of all ranks."""
    departing: int
    worst: list[Departure]
    losses_depart: bool
    findings: list[Finding]


@dataclass(frozen=True)
class AuditReport:
    """Result of an audit: one report per step."""

    precision: str
    ranks: int
    steps: list[StepReport]

    @property
    def findings(self) -> list[Finding]:
        return [finding for step in self.steps for finding in step.findings]

    @property
    def causes(self) -> list[str]:
        """Distinct causes, in step order."""
        return list(dict.fromkeys(finding.cause for finding in self.findings))


def audit(folder: str | Path, hf_config: Mapping[str, Any], precision: str | None = None) -> AuditReport:
    """Rerun a dump's steps in one process in fp32. Reports the differences and their causes.

    Args:
        folder: folder that audit_hook.py wrote.
        hf_config: contents of the model's config.json.
        precision: precision of the job: fp32, tf32, bf16 or fp16. Default: the precision that the hook recorded.

    Raises:
        CheckpointError: the dump is damaged, or not of this model.
        ConfigError: the model is not supported.
    """
    family = family_of(hf_config, "--model")
    model = family.read_config(hf_config)
    check_model(model)
    if model.model_type != "gpt":
        raise ConfigError(
            f"--model is {family.architecture}, but only decoders can be audited; pass a decoder's config.json"
        )
    steps = read_dump(Path(folder))
    precision = precision or _precision(steps[0])
    reports, previous = [], None
    for ranks in steps:
        step = _Step(ranks, family, model, precision)
        reports.append(step.report(previous))
        previous = step.evidence
    return AuditReport(precision, len(steps[0]), reports)


def _precision(ranks: Sequence[RankDump]) -> str:
    recorded = next((dump.header.precision for dump in ranks if dump.header.precision), "torch.float32")
    if recorded not in PRECISIONS:
        raise CheckpointError(
            f"{ranks[0].path} was recorded in {recorded}, for which the audit has no bound; set --precision "
            f"to one of {', '.join(FLOORS)}"
        )
    return PRECISIONS[recorded]


class _Step:
    """A recorded step and its reference."""

    def __init__(
        self,
        ranks: Sequence[RankDump],
        family: Family,
        model: ModelConfig,
        precision: str,
    ):
        self.ranks = ranks
        self.number = ranks[0].header.step
        self.parameters = read_parameters(ranks, family, model)
        self.model = self.parameters.matched.groups[0].model
        self.fields, folder = _fields(ranks), ranks[0].path.parent
        self.batches = [
            [read_tokens(batch, self.model, f"micro-batch {m} of data-parallel rank {d} in {folder}")
             for m, batch in enumerate(of_rank)]
            for d, of_rank in enumerate(self.fields)
        ]  # fmt: skip
        trained = [e for e in self.parameters.entries if ranks[e.rank].header.parameters[e.job_name].trained]
        self.keys = list(dict.fromkeys(entry.key for entry in trained))
        exact = self._rerun()
        noisy = self._reference(
            compute_dtype=DTYPES.get(precision, torch.float32),
            perturbed=precision not in DTYPES,
        )
        self.evidence = StepEvidence(
            ranks,
            trained,
            self.batches,
            self.keys,
            exact,
            run_batches(noisy, self.batches),
            FLOORS[precision],
        )

    def report(self, previous: StepEvidence | None) -> StepReport:
        """Return the differences in this step, and their causes."""
        e = self.evidence
        losses_depart = self._losses_depart()
        copy = self.parameters.tied_copy
        tied = {copy: self.parameters.embedding} if copy else {}
        unequal = unequal_weights(e, tied)
        findings = data_findings(self.number, self.fields) + unequal
        if e.departing.any() and not unequal:  # the reference has the weights of one of the copies
            named = name_causes(
                e,
                previous,
                model=self.model,
                rerun=self._rerun,
                token_gradients=self._token_gradients,
                tied=tied,
                losses_depart=losses_depart,
            )
            findings += [f for f in named if f.cause not in {finding.cause for finding in findings}]
        elif losses_depart and not findings:
            findings.append(Finding("loss-reported", self.number))
        errors = e.errors(e.expected)
        worst = sorted(
            e.departing.nonzero().flatten().tolist(), key=lambda i: -(errors[i] / e.bound[i]).item()
        )
        return StepReport(
            self.number,
            len(e.entries),
            int(e.departing.sum()),
            [self._departure(i, errors) for i in worst[:WORST]],
            losses_depart,
            findings,
        )

    def _departure(self, i: int, errors: Tensor) -> Departure:
        entry, e = self.evidence.entries[i], self.evidence
        return Departure(
            entry.job_name, layer_number(entry.name), entry.rank, errors[i].item(), e.bound[i].item()
        )

    def _rerun(self, change: Change | None = None, model: ModelConfig | None = None) -> Sums:
        return run_batches(self._reference(model=model), self.batches, change)

    def _reference(self, **options: Any) -> Reference:
        padding_idx = next((i for dump in self.ranks for i in dump.header.padding_idx), None)
        return Reference(self.parameters, self.keys, padding_idx=padding_idx, **options)

    def _token_gradients(self):
        reference = self._reference()
        for of_rank in self.batches:
            for batch in of_rank:
                yield from reference.token_gradients(batch)

    def _losses_depart(self) -> bool:
        """Return True if a recorded loss departs: it is neither the reference's sum over its micro-batch nor a mean
        over the micro-batch, the rank or the step.
        """
        e = self.evidence
        sums, counts = e.exact.losses, e.exact.counts.clamp(min=1)
        (dp, micro_batches), by_rank = e.shape, counts.sum(1)
        means = sums / counts
        for dump in self.ranks:
            d = dump.at("dp")
            for m, batch in enumerate(dump.batches):
                if "loss" not in batch:
                    continue
                recorded = batch["loss"]
                if recorded.numel() > 1:
                    recorded = (recorded.flatten() * self.batches[d][m].weights.flatten()).sum()
                total, mean = sums[d, m], means[d, m]
                right = [
                    mean, total, mean / micro_batches, total / by_rank[d], total / e.tokens, total * dp / e.tokens,
                    sums.sum() / e.tokens, means.mean(), means[:, m].mean(), means[d].mean(),
                    sums[d].sum() / by_rank[d],
                ]  # fmt: skip
                if not any(abs(recorded.item() / r.item() - 1) <= e.loss_bound for r in right if r):
                    return True
        return False


def _fields(ranks: Sequence[RankDump]) -> list[list[dict[str, Tensor]]]:
    """Return the recorded micro-batches of each data-parallel rank, from the first of its ranks that has any."""
    count = 1 + max(dump.at("dp") for dump in ranks)
    fields: list[list[dict[str, Tensor]]] = [[] for _ in range(min(count, len(ranks)))]
    for dump in ranks:
        if dump.at("dp") < len(fields) and not fields[dump.at("dp")]:
            fields[dump.at("dp")] = dump.batches
    if count > len(ranks) or not all(fields):
        missing = [d for d, batches in enumerate(fields) if not batches]
        raise CheckpointError(
            f"{ranks[0].path.parent} has no micro-batches of data-parallel rank {(missing or [count - 1])[0]}; "
            f"call audit.batch(input_ids=…) for each, before audit.step(), and {WAY_OUT}"
        )
    return fields
