"""`megalith audit`: rerun a recorded job in one process and name what differs."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.cli.parser import Arguments
from megalith.errors import TrainingError, printable, shorten
from megalith.tables import counted

if TYPE_CHECKING:
    from megalith.parity.audit.audit import AuditReport

SHOWN = 3  # worst gradients per step
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Rerun the steps that audit_hook.py has recorded, in one process in fp32. Print which "
        "gradients differ by more than the job's precision explains, and the likely cause. Exit "
        "code 5 if any does."
    )
    parser.add_argument(
        "dump", metavar="DUMP", help="folder with the files that AuditHook has written on all ranks"
    )
    parser.add_argument(
        "--model", required=True, metavar="CONFIG", help="config.json of the model, or its folder"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="the job's precision (default: what the hook recorded)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run_audit(args: Arguments) -> int:
    from megalith.bridge.folder import CONFIG, read_json
    from megalith.bridge.multimodal import language_config
    from megalith.parity.audit.audit import audit

    path = Path(args.model)
    hf_config = language_config(read_json(path / CONFIG if path.is_dir() else path))
    report = audit(args.dump, hf_config, args.precision)
    print(as_json(report) if args.json else as_text(report))
    if report.findings:
        raise TrainingError(
            f"{printable(args.dump)} differs from a run on one process in fp32: {', '.join(report.causes)}; "
            "see docs/audit.md for the causes"
        )
    return 0


def as_json(report: AuditReport) -> str:
    """Return the report as JSON. `causes` lists each cause once. Relative errors that are not finite become null."""
    content = asdict(report) | {"causes": report.causes}
    for step, of_step in zip(content["steps"], report.steps):
        for finding, it in zip(step["findings"], of_step.findings):
            finding["text"] = it.text
        for gradient in step["worst"]:
            gradient["error"] = gradient["error"] if math.isfinite(gradient["error"]) else None
    return json.dumps(content, allow_nan=False)


def as_text(report: AuditReport) -> str:
    """Return the report as lines: for each step its verdict, its findings and the worst gradients."""
    lines, ranks = [], counted(report.ranks, "rank")
    for step in report.steps:
        verdict = (
            "equal" if not step.departing else (f"{step.departing} of {step.gradients} gradients differ")
        )
        loss = ", and so do losses" if step.losses_depart else ""
        lines.append(f"step {step.step}: {verdict}{loss} ({ranks}, {report.precision})")
        for finding in step.findings:
            lines.append(f"  {finding.cause}: {printable(finding.text)}")
            if finding.ranks and len(finding.ranks) < report.ranks:
                lines.append(f"    ranks {shorten([str(rank) for rank in finding.ranks])}")
            if finding.parameters:
                lines.append(f"    {printable(shorten(finding.parameters))}")
        for gradient in step.worst[:SHOWN]:
            lines.append(
                f"    rank {gradient.rank}  error {gradient.error:8.1e}  bound {gradient.bound:.1e}  "
                f"{printable(gradient.parameter)}"
            )
    return "\n".join(lines)
