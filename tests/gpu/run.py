"""Run the tests of this folder on a machine with GPUs, within a time limit, and write a record of the result.

    python tests/gpu/run.py --seconds 560 --logs build/gpu [--record FILE] [--resume | --mended] [--mps]

Tests that measure time run first and alone. Then pytest-xdist sessions for one, two and four GPUs share the GPUs: each
worker sees as many as its tests need. The record has the commit, the GPUs, the versions, and for each file how many
tests passed, failed, were skipped and were not reached. The exit status is 0 if every test was reached and none failed.

Where the time limit cut a run short, --resume runs the tests that it did not reach. It needs the logs of that run, of
the same commit on the same kind of GPUs. A test that failed is not run again: the record keeps its failure.

A commit that mends the failures of a run, and changes nothing else, need not run everything again: --mended runs at
that commit every test of the files with a failure, and what was not reached. The record keeps the first commit, and
says which commit mended which tests.

Processes on one GPU take turns, and a collective waits until all its ranks have theirs. With --mps, NVIDIA's MPS lets
their kernels run at the same time. Tests that kill ranks stay outside it, because a killed client can end the others.

record.json is of the last whole run. A later run without a failure that reached nearly all tests is latest.json.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
LEAST = 20.0  # seconds without which a job is not started
ENDING = 15.0  # seconds that an interrupted job has to report what it did
OUTCOMES = "passed", "failed", "skipped", "not_reached"
RUN_FILE = "run.json"  # in the folder of logs: the commit, the GPUs and the version of torch of the run
DONE_FILE = "done.txt"  # beside it: the tests that a resumed run leaves out
HANGS = FOLDER / "test_hang_gpu.py"  # its tests kill ranks
MPS = "nvidia-cuda-mps-control"


class Job(NamedTuple):
    name: str
    options: tuple[str, ...]  # of pytest
    groups: Sequence[Sequence[str]]  # GPUs: each worker sees one of these groups
    workers_per_group: int = 1
    mps: bool = False  # the processes are clients of MPS, if it runs

    @property
    def gpus(self) -> list[str]:
        return [gpu for group in self.groups for gpu in group]


def stages(gpus: Sequence[str], workers: int) -> list[list[Job]]:
    """Return the jobs for these GPUs. Those of a stage run at the same time, the stages one after the other.

    Tests that measure time come first, each job of them on two GPUs that nothing else uses. `workers` is the number of
    processes per GPU that share the tests of one GPU. Tests of several GPUs get fewer processes: with 3 per pair and 2
    for all four, 10 tests took 215 s; with 7 and 5, in which collectives wait for the GPUs' turns, 11 took 432 s.
    """
    folder = str(FOLDER)
    singles = [[gpu] for gpu in gpus]
    pairs = [gpus[first : first + 2] for first in range(0, len(gpus) - 1, 2)]
    one_gpu = Job("one_gpu", (folder, "-m", "not two_gpus and not four_gpus"), singles, workers)
    if not pairs:
        return [[one_gpu]]
    measured = Job("quiet-measured", (folder, "-m", "quiet", "-k", "measured_step"), pairs[:1])
    compared = Job("quiet-auto", (folder, "-m", "quiet", "-k", "not measured_step"), pairs[-1:])
    if len(pairs) == 1:
        several = Job("two_gpus", (folder, "-m", "(two_gpus or four_gpus) and not quiet"), pairs, 6)
        return [[measured], [compared], [several, one_gpu]]
    two_gpus = Job("two_gpus", (folder, "-m", "two_gpus and not four_gpus and not quiet"), pairs, 3)
    four_gpus = Job("four_gpus", (folder, "-m", "four_gpus and not quiet"), [gpus[:4]], 2)
    return [[measured, compared], [four_gpus, two_gpus, one_gpu]]


def with_mps(all_stages: Sequence[Sequence[Job]]) -> list[list[Job]]:
    """Return the stages whose last one uses MPS, apart from the tests that kill ranks."""
    *first, last = all_stages
    gpus = max((job.gpus for job in last), key=len)
    hangs = Job("hangs", (str(HANGS),), [gpus])
    return [*map(list, first), [hangs, *(_as_client(job) for job in last)]]


def _as_client(job: Job) -> Job:
    """Return the job with MPS. Tests of several GPUs get twice the processes: no collective waits for a turn there.

    On four H200 with MPS, 667 tests of one GPU took 219 s, while 6 and 2 processes ran 59 tests of several GPUs in
    460 s.
    """
    workers = job.workers_per_group * (2 if len(job.groups[0]) > 1 else 1)
    return job._replace(options=(*job.options, f"--ignore={HANGS}"), workers_per_group=workers, mps=True)


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Run NVIDIA's MPS daemon, and yield the environment of its clients.

    Raises:
        ValueError: It is not installed, or does not start.
    """
    if shutil.which(MPS) is None:
        raise ValueError(f"{MPS} is not installed; run without --mps.")
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if status := _mps_control(environment, "-d"):
            raise ValueError(f"{MPS} -d ended with status {status}; run without --mps.")
        try:
            yield environment
        finally:
            _mps_control(environment, text="quit\n")


def _mps_control(environment: dict[str, str], *options: str, text: str = "") -> int:
    """Run the daemon's control program and return its exit status. Its output has no pipe: the daemon would keep it.

    The daemon serves all GPUs. If it served only those in CUDA_VISIBLE_DEVICES, it would number them from 0.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [MPS, *options],
        input=text.encode(),
        env=inherited | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
    ).returncode


class Runner:
    """Runs stages of jobs within a time limit."""

    def __init__(self, seconds: float, logs: Path, mps: dict[str, str] | None = None):
        self._end, self._logs = time.monotonic() + seconds, logs
        self._mps = mps or {}  # the environment of MPS's clients
        self.complete = True  # no job failed, was cut short or was not started

    def run(self, all_stages: Sequence[Sequence[Job]]) -> None:
        for stage in all_stages:
            threads = [Thread(target=self._run, args=(job,)) for job in stage]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _run(self, job: Job) -> None:
        started = time.monotonic()
        left = self._end - started - LEAST
        status = self._pytest(job, left) if left > LEAST else None
        words = {None: "not started", 0: "passed", 1: "FAILED", 2: "cut short", 5: "no tests"}
        self.complete &= status in (0, 5)
        seconds = time.monotonic() - started
        print(
            f"{job.name:16} {words.get(status, f'exit {status}'):12} {seconds:5.0f} s on {','.join(job.gpus)}",
            flush=True,
        )

    def _pytest(self, job: Job, seconds: float) -> int:
        """Return the exit status of pytest, 2 if the time limit ended it."""
        command = [sys.executable, "-m", "pytest", *job.options, "-v", "-rf", "-p", "no:cacheprovider"]
        workers = job.workers_per_group * len(job.groups)
        if workers > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-p", "xdist", "-n", str(workers), "--dist", "worksteal"]
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(job.gpus),
            "MEGALITH_TEST_GPUS": ";".join(",".join(group) for group in job.groups),
            "MEGALITH_TEST_LOG": str(self._logs / f"{job.name}.jsonl"),
            "MEGALITH_TEST_DONE": str(self._logs / DONE_FILE),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
        }
        if job.mps:
            environment |= self._mps
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


def outcome_of_each_test(logs: Path) -> tuple[dict[str, str], Counter[str]]:
    """Read what conftest.py logged: the outcome of each collected test, and the seconds of each file's tests."""
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
    return found, seconds


def outcomes(logs: Path) -> tuple[dict[str, Counter[str]], list[str], list[str]]:
    """Count the outcomes of each file's tests, and name the tests that failed and those that were not reached."""
    found, seconds = outcome_of_each_test(logs)
    files: dict[str, Counter[str]] = {}
    for name, outcome in found.items():
        files.setdefault(file_of(name), Counter())[outcome] += 1
    for name, counts in files.items():
        counts["seconds"] = round(seconds[name])
    failed, missed = (
        sorted(name for name, each in found.items() if each == outcome)
        for outcome in ("failed", "not_reached")
    )
    return files, failed, missed


def file_of(test: str) -> str:
    return Path(test.split("::")[0]).name


def described_run(commit: str | None) -> dict[str, Any]:
    """Describe this run: the commit (git's HEAD by default), the day, the GPUs and the versions."""
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
    }


def prepare_logs(logs: Path, run: dict[str, Any], resume: bool, mended: bool = False) -> dict[str, Any]:
    """Empty the folder of logs, or list the tests that have run and need not run again. Return the run to record.

    Raises:
        ValueError: The logs are of another commit, other GPUs or another version, or there are none.
    """
    logs.mkdir(parents=True, exist_ok=True)
    done: list[str] = []
    if resume or mended:
        if not (logs / RUN_FILE).is_file():
            raise ValueError(f"{logs} has no logs of a run to resume; run without --resume and --mended.")
        earlier = json.loads((logs / RUN_FILE).read_text())
        commit = earlier.get("mended", earlier)["commit"]
        for key, value in (earlier | {"commit": run["commit"] if mended else commit}).items():
            if key in ("commit", "gpus", "torch", "python") and value != run[key]:
                raise ValueError(
                    f"the run in {logs} had {key} {value}, this one has {run[key]}: a record is of one commit on one "
                    "kind of machine. Run without --resume, or with --mended if this commit only mends failures."
                )
        found = outcome_of_each_test(logs)[0]
        failed = sorted(name for name, outcome in found.items() if outcome == "failed")
        again = {file_of(name) for name in failed} if mended else set()
        done = [name for name, was in found.items() if was != "not_reached" and file_of(name) not in again]
        if mended:
            before = earlier.get("mended", {}).get("failed_before", [])
            earlier["mended"] = {"commit": run["commit"], "failed_before": sorted({*before, *failed})}
        run = run | {"commit": earlier["commit"]} | {k: v for k, v in earlier.items() if k == "mended"}
    else:
        for old in logs.glob("*.jsonl"):
            old.unlink()
    (logs / DONE_FILE).write_text("".join(f"{name}\n" for name in done))
    (logs / RUN_FILE).write_text(json.dumps(run))
    return run


def record_of(
    files: dict[str, Counter[str]],
    failed: list[str],
    not_reached: list[str],
    complete: bool,
    run: dict[str, Any],
) -> dict[str, Any]:
    return {
        **run,
        "whole": complete and not failed and not any(counts["not_reached"] for counts in files.values()),
        "files": {
            name: {key: counts[key] for key in (*OUTCOMES, "seconds")}
            for name, counts in sorted(files.items())
        },
        "failed": failed,
        "not_reached": not_reached,
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
    parser.add_argument("--logs", type=lambda path: Path(path).resolve(), default=Path("build/gpu").resolve())
    parser.add_argument(
        "--record", type=Path, help="write the record here; tests/gpu/record.json is the one in git"
    )
    parser.add_argument("--commit", help="of the tree that is tested (default: git's HEAD)")
    names = "quiet-measured", "quiet-auto", "four_gpus", "two_gpus", "one_gpu", "hangs"
    parser.add_argument("--only", nargs="+", choices=names, help="jobs, in place of all of them")
    parser.add_argument(
        "--workers", type=int, default=10, help="processes per GPU that share the tests of one GPU"
    )
    parser.add_argument(
        "--resume", action="store_true", help="run only the tests that the run in --logs did not reach"
    )
    parser.add_argument(
        "--mended",
        action="store_true",
        help="after a commit that only mends failures of the run in --logs: run their files and what it did not reach",
    )
    parser.add_argument(
        "--mps",
        action="store_true",
        help="share the GPUs by NVIDIA's MPS, with a job of its own for the hangs",
    )
    args = parser.parse_args()
    run = described_run(args.commit)
    try:
        run = prepare_logs(args.logs, run, args.resume, args.mended)
    except ValueError as error:
        parser.error(str(error))
    gpus = visible_gpus()
    all_stages = stages(gpus, args.workers)
    chosen = [
        [job for job in stage if not args.only or job.name in args.only]
        for stage in (with_mps(all_stages) if args.mps else all_stages)
    ]
    try:
        with mps_daemon() if args.mps else nullcontext() as mps:
            runner = Runner(args.seconds, args.logs, mps)
            runner.run(chosen)
    except ValueError as error:
        parser.error(str(error))
    files, failed, not_reached = outcomes(args.logs)
    record = record_of(files, failed, not_reached, runner.complete and not args.only, run)
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
