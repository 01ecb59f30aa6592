"""`megalith doctor` and `megalith launch`: what a machine has and lacks, and the job files of clusters."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.cli.parser import Arguments, leaf
from megalith.errors import printable

if TYPE_CHECKING:
    from megalith.report.doctor import Check


def add_cluster_commands(commands: argparse._SubParsersAction) -> None:
    parser = leaf(commands, "doctor", "what this machine has and lacks", doctor)
    parser.description = (
        "Checks this machine for training: software, GPUs and their links, shared memory, the output's disk, optional "
        "packages, ports. Exit code 1 where something is bad."
    )
    parser.add_argument("--output", default=".", help="folder on the disk that runs will write to")
    parser.add_argument("--reach", action="append", default=[], metavar="HOST:PORT",
                        help="also try to connect there, such as to the rendezvous on another machine")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="no measurements: no all-reduce, no disk speed")
    parser.add_argument("--json", action="store_true", help="print one object")


def doctor(args: Arguments) -> int:
    import torch

    from megalith.report import doctor as checks
    from megalith.report.device_checks import device_checks

    found: list[Check] = []
    gpus = torch.cuda.device_count()

    def take(more) -> None:
        for check in more:
            found.append(check)
            if not args.json:
                print(_line(check), flush=True)

    take(checks.software_checks())
    take(device_checks(measured=not args.quick))
    take([checks.shared_memory_check(gpus)])
    take(checks.disk_checks(Path(args.output), measured=not args.quick))
    take(checks.package_checks(gpus > 0))
    take(checks.network_checks(os.environ))
    take(checks.reach_check(endpoint) for endpoint in args.reach)
    worst = checks.worst(found)
    if args.json:
        print(json.dumps({"worst": worst, "checks": [vars(check) for check in found]}, ensure_ascii=False))
    else:
        counts = {state: sum(check.state == state for check in found) for state in ("good", "warn", "bad")}
        print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return int(worst == checks.BAD)


def _line(check: Check) -> str:
    do = f"\n{'':26}→ {check.do}" if check.do else ""
    return f"{check.state:<5} {check.name:<19} {printable(check.found)}{printable(do, keep=chr(10))}"
