"""Runs the tests of this folder on a machine with GPUs, within a time, and says of each file what came of it.

    python tests/gpu/run.py --seconds 560 --logs OUT [--one-gpu-workers 4] [FILE …]

Files of one GPU run first, their tests spread over processes where pytest-xdist is there; then those that measure or
take several GPUs, a file at a time, for they would disturb each other. Without FILEs all run. A file that the time does
not reach is told as such, and one that is cut short shows what it had done. The exit status is 0 where every file ran
to its end and nothing failed.
"""

import argparse
import importlib.util
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
SEVERAL = [
    "test_layout_gpu",
    "test_copy_engine_gpu",
    "test_copy_engine_heads_gpu",
    "test_hang_gpu",
]
LEAST = 20.0  # seconds without which a file is not begun
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error|errors)\b")


def run(path: Path, seconds: float, workers: int, log: Path) -> tuple[int, str]:
    """The exit status of pytest on a file (2 where the time ended it) and its counts."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(path),
        "-v",
        "-rf",
        "--durations=8",
        "-p",
        "no:cacheprovider",
    ]
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-p", "xdist", "-n", str(workers)]
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--logs", type=Path, default=Path("gpu_logs"))
    parser.add_argument("--one-gpu-workers", type=int, default=4)
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    paths = given.files or sorted(FOLDER.glob("test_*.py"), key=lambda path: path.stem in SEVERAL)
    deadline, rows, whole = time.monotonic() + given.seconds, [], True
    for path in paths:
        began = time.monotonic()
        left = deadline - began - LEAST
        if left < LEAST:
            status, counts = 2, "not begun"
        else:
            workers = 1 if path.stem in SEVERAL else given.one_gpu_workers
            status, counts = run(path, left, workers, given.logs / f"{path.stem}.log")
        whole = whole and status == 0
        word = {0: "whole", 1: "FAILED", 2: "cut short"}.get(status, f"status {status}")
        rows.append(f"{path.stem:24} {word:10} {time.monotonic() - began:6.0f} s  {counts}")
        print(rows[-1], flush=True)
    print("\n".join(["", *rows]))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
