"""A launcher whose ranks fail at chosen points: `python in_process_job.py train …` with a plan in PLAN.

The plan is JSON: a list of [rank, point, number, how]. The ranks are forks of the launcher, so they have the points.
Each failure happens once, in the first process of that rank that reaches the point for the `number`th time, counted
from 1; at the point `step` the number is that of a step. `how` is one of the words in `fail`, the name of a signal
that the rank sends itself, or "launcher" and the name of a signal that the rank sends the launcher.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from torch._inductor import compile_fx

from megalith.checkpoint import memory_snapshots, saver
from megalith.checkpoint.memory_snapshots import MemorySnapshots
from megalith.launch import in_process, rank_replacement, restart
from megalith.rl.rewards.rewards import Rewards
from megalith.rl.sampling.rollout_sampler import RolloutSampler
from megalith.rl.sampling.weight_sync import WeightSync
from megalith.training import trainer, training_job
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
    "connecting": (training_job, "init_distributed"),
    "fetch": (MemorySnapshots, "fetch"),
    "restore": (RunSnapshots, "restore"),
}
PHASES = {
    "start": (training_job, "prepare"),
    "compile": (compile_fx, "compile_fx"),
    "generation": (RolloutSampler, "sample_share"),
    "rewards": (Rewards, "__call__"),
    "weight sync": (WeightSync, "update"),
}
"""Points that random plans do not contain: a job in which ranks are replaced does not reach them twice."""
LINK_SWITCH = "TEST_LINK"  # environment variable: a command that cuts or mends the link between two hosts
MEMORY_LIMIT = "TEST_CGROUP"  # environment variable: the memory cgroup that a rank enters at "oom"
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
        if how == "slow":
            time.sleep(2)
        if how == "raise":
            raise ZeroDivisionError("a bug of this rank")
        if how == "abort":
            os.abort()
        if how == "oom":
            run_out_of_memory(Path(os.environ[MEMORY_LIMIT]))
        if how.startswith("cut"):
            cut_link(how.removeprefix("cut").strip())
        if how == "no storage":
            lose_storage()
        target, _, name = how.rpartition(" ")
        if name.startswith("SIG"):
            os.kill(os.getppid() if target == "launcher" else os.getpid(), signal.Signals[name])


def lose_storage() -> None:
    """Have each later look into the folder of the checkpoints fail."""

    def fail_to_read(*_: object) -> None:
        raise OSError(errno.EIO, "the storage does not answer")

    restart._saves = trainer.list_steps = fail_to_read


def cut_link(seconds: str) -> None:
    """Cut the link between two hosts, for some seconds or for good."""
    switch = os.environ[LINK_SWITCH]
    subprocess.run(f"{switch} down", shell=True, check=True)
    if seconds:
        subprocess.Popen(f"sleep {seconds}; {switch} up", shell=True, start_new_session=True)


def run_out_of_memory(cgroup: Path) -> None:
    """Enter a cgroup and use more memory than its limit, until the kernel kills this process."""
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    pages = []
    while True:
        pages.append(bytearray(b"x" * 2**22))


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


def keep_low_priority() -> None:
    """Give this session the niceness of its processes: with autogroups, the kernel compares sessions first."""
    if (niceness := os.nice(0)) > 0:
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))


def main() -> None:
    keep_low_priority()
    step = Run.train_step

    def train_step(run, *arguments):
        fail("step", run.step + 1)
        return step(run, *arguments)

    Run.train_step = train_step
    for point, (owner, name) in (POINTS | PHASES).items():
        wrap(point, owner, name)
    rank_replacement.LIMIT = float(os.environ.get(RESTART_LIMIT, rank_replacement.LIMIT))
    from megalith.cli.main import main

    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    main()
