"""Run the tests of this folder on a machine with GPUs, within a time limit, and write a record of the result.

    python tests/gpu/run.py --seconds 560 --logs build/gpu [--record tests/gpu/record.json] [-k EXPRESSION]

Tests of several GPUs run first: jobs of two GPUs side by side, then those of four. The tests of one GPU follow in one
pytest-xdist session whose workers share all GPUs. The record has the commit, the GPUs, the versions, and for each
file how many tests passed, failed, were skipped and were not reached. The exit status is 0 if every test was reached
and none failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Condition, Thread
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
RECORD = FOLDER / "record.json"
LEAST = 20.0  # seconds without which a job is not started
ENDING = 15.0  # seconds that an interrupted job has to report what it did
OUTCOMES = "passed", "failed", "skipped", "not_reached"


class Job(NamedTuple):
    name: str
    gpus: int
    options: tuple[str, ...]  # of pytest
    workers: int = 1


def jobs(count: int, workers: int) -> list[Job]:
    """Return the jobs for a machine with `count` GPUs, in the order in which they start."""

    def several(files: str, gpus: int) -> Job:
        marker = {2: "two_gpus", 4: "four_gpus"}[gpus]
        return Job(f"{files}-{gpus}", gpus, (f"{FOLDER}/test_{files}_gpu.py", "-m", marker))

    found = []
    if count >= 2:
        found += [
            several(name, 2) for name in ("layout", "grid", "hang", "copy_engine_heads", "copy_engine", "fp8")
        ]
        found += [several("generation", 2)]
    if count >= 4:
        found += [several("copy_engine_heads", 4), several("grid", 4)]
    one = ("-m", "not two_gpus and not four_gpus")
    return [*found, Job("one_gpu", count, (str(FOLDER), *one), workers * count)]


class Queue:
    """Runs jobs in order, each on GPUs of its own, as soon as enough of them are free."""

    def __init__(self, gpus: Sequence[str], seconds: float, logs: Path, options: Sequence[str]):
        self._end, self._logs, self._options = time.monotonic() + seconds, logs, options
        self._free, self._changed = list(gpus), Condition()
        self.complete = True  # no job failed, was cut short or was not started

    def run(self, all_jobs: Sequence[Job]) -> None:
        threads = []
        for job in all_jobs:
            with self._changed:
                self._changed.wait_for(lambda job=job: len(self._free) >= job.gpus)
                taken, self._free = self._free[: job.gpus], self._free[job.gpus :]
            threads.append(Thread(target=self._run, args=(job, taken)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _run(self, job: Job, gpus: list[str]) -> None:
        started = time.monotonic()
        left = self._end - started - LEAST
        status = self._pytest(job, gpus, left) if left > LEAST else None
        word = {None: "not started", 0: "passed", 1: "FAILED", 2: "cut short", 5: "passed"}.get(
            status, f"exit {status}"
        )
        self.complete &= status in (0, 5)  # 5: nothing was selected
        print(f"{job.name:24} {word:12} {time.monotonic() - started:5.0f} s on {','.join(gpus)}", flush=True)
        with self._changed:
            self._free = sorted(self._free + gpus)
            self._changed.notify_all()

    def _pytest(self, job: Job, gpus: list[str], seconds: float) -> int:
        """Return the exit status of pytest, 2 if the time limit ended it."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            *job.options,
            *self._options,
            "-v",
            "-rf",
            "-p",
            "no:cacheprovider",
        ]
        if job.workers > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-p", "xdist", "-n", str(job.workers), "--dist", "worksteal"]
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "MEGALITH_TEST_GPUS": ",".join(gpus),
            "MEGALITH_TEST_LOG": str(self._logs / f"{job.name}.jsonl"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
        }
        with open(self._logs / f"{job.name}.log", "w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(ENDING)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                return 2


def outcomes(logs: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """Read what conftest.py logged: the outcomes of each file's tests, and the names of the tests that failed."""
    found: dict[str, str] = {}
    seconds: Counter[str] = Counter()
    for path in sorted(logs.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            for name in entry.get("collected", ()):
                found.setdefault(name, "not_reached")
            if "test" in entry:
                found[entry["test"]] = entry["outcome"]
                seconds[file_of(entry["test"])] += entry["seconds"]
    files: dict[str, Counter[str]] = {}
    for name, outcome in found.items():
        files.setdefault(file_of(name), Counter())[outcome] += 1
    for name, counts in files.items():
        counts["seconds"] = round(seconds[name])
    return files, sorted(name for name, outcome in found.items() if outcome == "failed")


def file_of(test: str) -> str:
    return Path(test.split("::")[0]).name


def record_of(
    files: dict[str, Counter[str]], failed: list[str], complete: bool, commit: str | None
) -> dict[str, Any]:
    import torch

    if commit is None:
        shown = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=FOLDER)
        commit = shown.stdout.strip() or None
    return {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "whole": complete and not failed and not any(counts["not_reached"] for counts in files.values()),
        "files": {
            name: {key: counts[key] for key in (*OUTCOMES, "seconds")}
            for name, counts in sorted(files.items())
        },
        "failed": failed,
    }


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(number) for number in range(len(listed.stdout.splitlines()))] or ["0"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--logs", type=Path, default=Path("build/gpu"))
    parser.add_argument(
        "--record", type=Path, help="write the record here; tests/gpu/record.json is the one in git"
    )
    parser.add_argument("--commit", help="of the tree that is tested (default: git's HEAD)")
    parser.add_argument(
        "--workers", type=int, default=10, help="processes per GPU that share the tests of one GPU"
    )
    parser.add_argument("-k", dest="expression", help="run only the tests that match, as pytest's -k does")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    for old in args.logs.glob("*.jsonl"):
        old.unlink()
    gpus = visible_gpus()
    queue = Queue(gpus, args.seconds, args.logs, ("-k", args.expression) if args.expression else ())
    queue.run(jobs(len(gpus), args.workers))
    files, failed = outcomes(args.logs)
    record = record_of(files, failed, queue.complete, args.commit)
    print()
    for name, counts in record["files"].items():
        print(
            f"{name:32} "
            + ", ".join(f"{counts[key]} {key.replace('_', ' ')}" for key in OUTCOMES if counts[key])
        )
    print("\n".join(f"FAILED {name}" for name in failed))
    if args.record:
        args.record.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{'whole and green' if record['whole'] else 'NOT whole and green'} on {len(gpus)} × {record['gpus'][:1]}"
    )
    return 0 if record["whole"] else 1


if __name__ == "__main__":
    sys.exit(main())
