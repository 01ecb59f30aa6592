"""A launcher whose ranks fail at chosen points: `python in_process_job.py train …` with a plan in PLAN.

The plan is JSON: a list of [rank, point, number, how]. The ranks are forks of the launcher, so they have the points.
Each failure happens once, in the first process of that rank that reaches the point for the `number`th time, counted
from 1; at the point `step` the number is that of a step.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from megalith.checkpoint import memory_snapshots, saver
from megalith.checkpoint.memory_snapshots import MemorySnapshots
from megalith.launch import in_process, rank_replacement
from megalith.training import trainer
from megalith.training.run_snapshots import RunSnapshots
from megalith.training.run_state import Run

PLAN, MARKS, RESTART_LIMIT = "TEST_FAILURES", "TEST_FAILURE_MARKS", "TEST_RESTART_LIMIT"
POINTS = {
    "build": (Run, "__init__"),
    "evaluation": (Run, "mean_loss"),
    "save": (saver, "write_step"),
    "copy": (MemorySnapshots, "_copy"),
    "exchange": (memory_snapshots, "_exchange_buffers"),
    "intact": (memory_snapshots.Snapshot, "is_intact"),
    "meeting": (in_process.InProcessRestart, "meet"),
    "connecting": (trainer, "init_distributed"),
    "fetch": (MemorySnapshots, "fetch"),
    "restore": (RunSnapshots, "restore"),
}
counts: Counter = Counter()


def fail(point: str, number: int, when: str = "before") -> None:
    rank = int(os.environ.get("RANK", -1))
    for index, (victim, where, at, how) in enumerate(json.loads(os.environ[PLAN])):
        if (victim, where, at) != (rank, point, number) or when != (
            "after" if how == "kill after" else "before"
        ):
            continue
        try:
            (Path(os.environ[MARKS]) / str(index)).touch(exist_ok=False)
        except FileExistsError:
            continue
        if how.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "sleep":
            time.sleep(1000)
        if how == "raise":
            raise ZeroDivisionError("a bug of this rank")
        if how == "abort":
            os.abort()


def wrap(point: str, owner: object, name: str) -> None:
    function = getattr(owner, name)

    def wrapped(*arguments, **options):
        counts[point] += 1
        number = counts[point]
        fail(point, number)
        result = function(*arguments, **options)
        fail(point, number, "after")
        return result

    setattr(owner, name, wrapped)


def main() -> None:
    step = Run.train_step

    def train_step(run, *arguments):
        fail("step", run.step + 1)
        return step(run, *arguments)

    Run.train_step = train_step
    for point, (owner, name) in POINTS.items():
        wrap(point, owner, name)
    rank_replacement.LIMIT = float(os.environ.get(RESTART_LIMIT, rank_replacement.LIMIT))
    from megalith.cli.main import main

    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    main()
