"""Seconds from the kill of a rank to the next completed step: `python -m benchmarks.recovery`.

Starts a small job four times, each with `--nproc` ranks on this machine, kills one rank (SIGKILL) and waits until the
job has completed a step that it had not completed before:

    restart of all processes, from the newest checkpoint
    restart in the same processes, from snapshots in memory
    the same with a spare process
    the same with a spare, and rank 0 killed

Then it measures how long training waits for a snapshot. Prints a table, and JSON with `--json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = {
    "restart of all processes": ([], 1),
    "in-process restart": (["--checkpoint.memory_interval", "5"], 1),
    "in-process restart, spare": (["--checkpoint.memory_interval", "5", "--spares", "1"], 1),
    "in-process restart, spare, rank 0 killed": (
        ["--checkpoint.memory_interval", "5", "--spares", "1"],
        0,
    ),
}
POLL_INTERVAL = 0.02  # seconds


def command(args: argparse.Namespace, output: Path) -> list[str]:
    settings = {
        "model.preset": "tiny-gpt",
        "model.num_layers": args.layers,
        "model.hidden_size": args.hidden_size,
        "model.num_attention_heads": 4,
        "model.vocab_size": 1024,
        "data.mock": True,
        "data.seq_length": 64,
        "data.num_workers": 0,
        "optim.lr": 1e-3,
        "train.micro_batch_size": 1,
        "train.global_batch_size": args.nproc,
        "train.eval_iters": 0,
        "train.train_iters": 100_000,
        "train.output_dir": str(output),
        "checkpoint.save_interval": args.save_interval,
        "checkpoint.keep_last": 2,
        "log.log_interval": 1,
        "log.layout_report": False,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", json.dumps(value))]
    options = ["--nproc", str(args.nproc), "--max-restarts", "3"]
    return [sys.executable, "-m", "megalith", "train", *words, *options]


def steps(output: Path) -> list[int]:
    path = output / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def worker(launcher: int, rank: int) -> int:
    """Return the process id of a rank."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment and not any(
            each.startswith(b"MEGALITH_SPARE=") for each in environment
        ):
            return int(pid)
    raise RuntimeError(f"rank {rank} does not run")


def wait_for(running: subprocess.Popen, output: Path, step: int, log: Path) -> None:
    while max(steps(output), default=0) < step:
        if running.poll() is not None:
            raise RuntimeError(f"the job has ended:\n{log.read_text()}")
        time.sleep(POLL_INTERVAL)


def measure(args: argparse.Namespace, options: list[str], rank: int, folder: Path) -> dict[str, Any]:
    """Start a job, kill one rank, and return the seconds to the next completed step and the number of lost steps."""
    output, log = folder / "run", folder / "log"
    with open(log, "w") as file:
        running = subprocess.Popen([*command(args, output), *options], stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(running, output, args.kill_after, log)
        if "--spares" in options:
            time.sleep(args.spare_seconds)  # until the spare has imported everything
        victim = worker(running.pid, rank)
        os.kill(victim, signal.SIGKILL)
        killed, last = time.monotonic(), max(steps(output))
        while min(steps(output)[-1:], default=last) >= last and time.monotonic() < killed + 0.5:
            time.sleep(POLL_INTERVAL)
        wait_for(running, output, last + 1, log)
        seconds = time.monotonic() - killed
        text = log.read_text()
    finally:
        running.send_signal(signal.SIGINT)
        time.sleep(1)
        running.kill()
        running.wait()
    resumed = [
        line for line in text.splitlines() if "continuing from memory" in line or "resuming from" in line
    ]
    restored = int(resumed[-1].partition("step ")[2].split(",")[0]) if resumed else 0
    return {"seconds": round(seconds, 1), "lost_steps": last - restored}


def _take(numel: int, repeats: int) -> tuple[list[float], list[float], int]:
    """Take snapshots of one tensor and two moments of `numel` elements; return stalls, durations and bytes."""
    import torch
    import torch.distributed as dist

    from megalith.checkpoint.memory_snapshots import MemorySnapshots
    from megalith.comm.collectives import Axis
    from megalith.parallel.shards import LocalShard

    def shard() -> LocalShard:
        values = torch.randn(numel)
        return LocalShard(values, (0,), (numel,), owned=True)

    state = {"model": {"w": shard()}, "optimizer": {"m": shard(), "v": shard()}}
    world = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    snapshots = MemorySnapshots()
    snapshots.connect(world, world.size)
    for step in range(repeats):
        snapshots.take({"step": step}, state)
        snapshots.wait()
    results = snapshots.results()[2:]  # the first ones allocate
    return [each.stalled for each in results], [each.seconds for each in results], snapshots.bytes


def measure_snapshots(nproc: int, numel: int) -> dict[str, float]:
    from megalith.launch.pool import Pool

    pool = Pool(nproc, timeout=600)
    try:
        results = pool.run(_take, numel, 8, size=nproc)
    finally:
        pool.close()
    return {
        "megabytes_per_rank": round(12 * numel / 1e6),
        "host_megabytes_per_rank": round(max(size for *_, size in results) / 1e6),
        "stall": round(statistics.median(max(each) for each in zip(*(stalls for stalls, *_ in results))), 4),
        "seconds": round(
            statistics.median(max(each) for each in zip(*(times for _, times, _ in results))), 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--save-interval", type=int, default=50)
    parser.add_argument("--kill-after", type=int, default=60, help="step after which a rank is killed")
    parser.add_argument("--spare-seconds", type=float, default=30.0, help="time for a spare to get ready")
    parser.add_argument(
        "--numel", type=int, default=2**24, help="parameters per rank for the snapshot's stall"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (options, rank) in CASES.items():
        folder = Path(tempfile.mkdtemp(prefix="recovery-"))
        results[name] = measure(args, options, rank, folder)
        if not args.json:
            each = results[name]
            print(f"{name:42} {each['seconds']:6.1f} s, {each['lost_steps']} steps lost", flush=True)
        shutil.rmtree(folder)
    results["snapshot"] = each = measure_snapshots(args.nproc, args.numel)
    if args.json:
        print(json.dumps(results))
        return
    print(
        f"snapshot of {each['megabytes_per_rank']} MB per rank: training waits {1e3 * each['stall']:.0f} ms, "
        f"the partner has it after {each['seconds']:.2f} s; {each['host_megabytes_per_rank']} MB of host memory"
    )


if __name__ == "__main__":
    main()
