"""Runs the tests of this folder on a machine with GPUs, within a time, and says of each file what came of it.

    python tests/gpu/run.py --seconds 560 --logs OUT [--one-gpu-workers 4] [FILE …]

Each GPU takes files of its own, one after the other, whose tests are spread over processes where pytest-xdist is there.
What measures or takes several GPUs runs then, a file at a time, for these would disturb each other. Without FILEs all
run. A file that the time does not reach is told as such, and one that is cut short shows what it had done. The exit
status is 0 where every file ran to its end and nothing failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from threading import Thread
from typing import NamedTuple

FOLDER = Path(__file__).parent
SEVERAL = "test_layout_gpu", "test_copy_engine_gpu", "test_copy_engine_heads_gpu", "test_hang_gpu"
TOGETHER = {  # of other files what takes two GPUs
    "test_fp8_gpu": "two_gpus",
    "test_generation_gpu": "two_tensor_parallel",
}
LONGEST = "test_generation_gpu", "test_fp8_gpu", "test_families_gpu", "test_single_gpu"  # first, these
LEAST = 20.0  # seconds without which a file is not begun
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error|errors)\b")


class Job(NamedTuple):
    path: Path
    workers: int
    chosen: str | None = None  # pytest's -k

    @property
    def name(self) -> str:
        return self.path.stem + ("" if self.chosen is None else f"-{self.chosen}")


class Calls:
    """The files of a call, and what came of them."""

    def __init__(self, seconds: float, logs: Path):
        self._deadline, self._logs = time.monotonic() + seconds, logs
        self.rows: list[str] = []
        self.whole = True

    def run(self, job: Job, gpu: str | None) -> None:
        """On one GPU, or on all."""
        began = time.monotonic()
        left = self._deadline - began - LEAST
        status, counts = (2, "not begun") if left < LEAST else self._run(job, left, gpu)
        self.whole = self.whole and status == 0
        word = {0: "whole", 1: "FAILED", 2: "cut short"}.get(status, f"status {status}")
        self.rows.append(f"{job.name:28} {word:10} {time.monotonic() - began:6.0f} s  {counts}")
        print(self.rows[-1], flush=True)

    def _run(self, job: Job, seconds: float, gpu: str | None) -> tuple[int, str]:
        """The exit status of pytest on a file (2 where the time ended it) and its counts."""
        command = [sys.executable, "-m", "pytest", str(job.path), "-v", "-rf", "--durations=8"]
        command += ["-p", "no:cacheprovider"]
        if job.chosen is not None:
            command += ["-k", job.chosen]
        if job.workers > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-p", "xdist", "-n", str(job.workers)]
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        log = self._logs / f"{job.name}.log"
        with open(log, "w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest then says what it has done
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                status = 2
        counts = COUNTS.findall(log.read_text(errors="replace")[-2000:])
        return status, ", ".join(" ".join(pair) for pair in dict.fromkeys(counts)) or "no summary"


def gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(number) for number in range(len(listed.stdout.splitlines()))] or ["0"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--logs", type=Path, default=Path("gpu_logs"))
    parser.add_argument("--one-gpu-workers", type=int, default=4, help="processes on each GPU")
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    paths = given.files or sorted(FOLDER.glob("test_*.py"))
    each = gpus()
    alone = [Job(path, given.one_gpu_workers) for path in paths if path.stem not in SEVERAL]
    waiting = deque(sorted(alone, key=lambda job: job.path.stem not in LONGEST))
    calls = Calls(given.seconds, given.logs)

    def run_on(gpu: str) -> None:
        while waiting:
            try:
                job = waiting.popleft()
            except IndexError:  # another GPU's was the last
                return
            calls.run(job, gpu)

    threads = [Thread(target=run_on, args=(gpu,)) for gpu in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(each) > 1:
        for path in paths:
            if path.stem in TOGETHER:
                calls.run(Job(path, 1, TOGETHER[path.stem]), None)
    for path in paths:
        if path.stem in SEVERAL:
            calls.run(Job(path, 1), None)
    print("\n".join(["", *calls.rows]))
    return 0 if calls.whole else 1


if __name__ == "__main__":
    sys.exit(main())
