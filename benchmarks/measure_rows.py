"""Measure rows of measured_rows.py, each as a run of `megalith train`, and print the planner's estimates with them.

    python -m benchmarks.measure_rows --missing             # rows of docs/tradeoffs.md without figures that fit here
    python -m benchmarks.measure_rows --rows "PP2 in two chunks" packed --steps 12 --warmup 4

Prints one line of JSON per row when it ends; `--results` appends it to a file. With `--seconds`, no row starts that
may end later.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured_rows import ROWS, TRADEOFFS, TWO_GPUS, Row
from benchmarks.mirrored_rank import mirrored
from benchmarks.plan_accuracy import expected
from megalith.bench.training_speed import environment, medians, run_training

AS_EXPECTED = [  # what a run would choose by its memory, and `expected` leaves out
    ("runtime", "activation_memory_budget", 1.0),
    ("parallel", "fsdp_unsharded_layers", 0),
]
LONGEST = 90.0  # seconds that a row is taken to need


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--missing", action="store_true")
    which.add_argument("--rows", nargs="+", metavar="NAME", help="words that a row's name has")
    parser.add_argument("--mirrored", action="store_true", help="rank 0 alone: benchmarks.mirrored_rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    alone = mirrored if args.mirrored else nullcontext
    room = torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else 0.0
    for row in chosen(args):
        if time.monotonic() + LONGEST > end:
            print(f"not begun: {row.name}", file=sys.stderr, flush=True)
            continue
        memory, seconds = expected(row)
        if args.missing and 0 < room < memory:
            print(
                f"{row.name} is expected to take {memory:.0f} GB of {room:.0f}", file=sys.stderr, flush=True
            )
            continue
        with alone():
            figures = measured(row, args.steps, args.warmup)
        result = {"row": row.name, "model": row.model["preset"], "mirrored": args.mirrored} | figures
        result |= {"expected_ms": round(1e3 * seconds.seconds, 1), "expected_gb": round(memory, 1)}
        print(line := json.dumps(result | environment()), flush=True)
        if args.results:
            with args.results.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def chosen(args: argparse.Namespace) -> list[Row]:
    gpus = max(torch.cuda.device_count(), 1)
    rows = [row for row in TRADEOFFS + TWO_GPUS if row.ms is None]
    if args.rows:
        rows = [row for row in ROWS if any(name in row.name for name in args.rows)]
    return [row for row in rows if fits(row, gpus, args.mirrored)]


def fits(row: Row, gpus: int, mirrored: bool) -> bool:
    """Return True if a row can be measured on `gpus` GPUs, or mirrored, which pipelines cannot be."""
    staged = "pipeline_model_parallel_size" in row.parallel
    return row.processes > 1 and not staged if mirrored else row.processes <= gpus


def measured(row: Row, steps: int, warmup: int) -> dict[str, Any]:
    """Return milliseconds per step and peak GB, medians of the steps after the warm-up, or `failed`."""
    tree = row.tree()
    for section, setting, value in AS_EXPECTED:
        tree[section].setdefault(setting, value)
    tree["train"] |= {"train_iters": steps, "eval_iters": 0}
    tree["checkpoint"] = {"save_at_end": False}
    with tempfile.TemporaryDirectory() as folder:
        result, printed = run_training(tree, Path(folder), row.processes)
    if result is None:
        return {"failed": printed}
    figures = medians(result[warmup:steps])
    names = {"ms": "step_time_ms", "gb": "max_memory_gb"}
    return {short: round(figures[name], 1) for short, name in names.items() if name in figures}


if __name__ == "__main__":
    main()
