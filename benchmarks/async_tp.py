"""PyTorch's asynchronous tensor parallelism against Megalith's, on two GPUs: `python -m benchmarks.async_tp llama3-8b`.

`ours` is ping-pong micro-batches over NCCL and over copy engines, `pytorch` is Inductor's micro-pipelining of
all-gather + matmul and matmul + reduce-scatter over symmetric memory, `plain` overlaps nothing. Each is the same run of
`megalith train`; printed are medians of the steps' later half and the loss of the last step, which has to be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import yaml

from megalith.bench.workloads import WORKLOADS

VARIANTS = {
    "plain": {"tp_comm_overlap": False},
    "ours": {"tp_comm_overlap": True, "symmetric_memory_groups": []},
    "ours, copy engines": {"tp_comm_overlap": True, "symmetric_memory_groups": ["tp"]},
    "pytorch": {"tp_comm_overlap": True, "symmetric_memory_groups": []},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch", type=int, required=True, help="sequences per step, one micro-batch")
    parser.add_argument("--layers", type=int, help="fewer layers than the workload has")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds a run may take (default: %(default)s)"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker)
    for name in args.variant:
        print(f"{args.workload} tp2+sp {name:20} {measure(args, name)}", flush=True)


def measure(args: argparse.Namespace, variant: str) -> str:
    workload = WORKLOADS[args.workload]
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "model": dict(workload["model"], **({"num_layers": args.layers} if args.layers else {})),
            "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, **VARIANTS[variant]},
            "data": {"mock": True, "seq_length": workload["seq_length"]},
            "optim": {"lr": 1e-4, "lr_decay_style": "constant"},
            "checkpoint": {"save_at_end": False},
            "train": {
                "micro_batch_size": args.batch,
                "global_batch_size": args.batch,
                "precision": workload["precision"],
                "train_iters": args.steps,
                "eval_iters": 0,
                "output_dir": f"{folder}/run",
            },
        }
        run = Path(folder) / "run.yaml"
        run.write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if variant == "pytorch":
            command += ["-m", "benchmarks.async_tp", args.workload, "--batch", "1", "--worker", str(run)]
        else:
            command += ["-m", "megalith", "train", str(run)]
        code, printed = run_logged(command, Path(folder) / "printed.txt", args.limit)
        metrics = Path(folder) / "run" / "metrics.jsonl"
        if code or not metrics.exists():
            return f"failed with {code}: {printed[-3000:]}"
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        notes = "; ".join(
            sorted({line.strip()[-160:] for line in printed.splitlines() if "async TP" in line})
        )
    step = statistics.median(s["step_time_ms"] for s in steps[args.steps // 2 :])
    memory = steps[-1]["max_memory_gb"]  # None on a CPU
    shown = "" if memory is None else f"{memory:6.1f} GB  "
    return f"{step:8.1f} ms  {shown}loss {steps[-1]['loss']:.4f} {notes}"


def run_logged(command: list[str], file: Path, limit: float) -> tuple[int, str]:
    """Return the exit status and the output. After `limit` seconds, end all processes."""
    with file.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, file.read_text(encoding="utf-8")


def worker(run: Path) -> None:
    """One rank of a run whose layers Inductor micro-pipelines, in place of ping-pong micro-batches."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    import megalith
    from megalith.parallel import apply as order

    def enable(model, parallel, tensor) -> None:
        enable_symm_mem_for_group(tensor.axis.name)

    with (
        mock.patch.object(order, "apply_ping_pong", enable),
        mock.patch.object(order, "interleaving", lambda: {"_micro_pipeline_tp": True}),
    ):
        megalith.train(megalith.RunConfig.load(str(run)))


if __name__ == "__main__":
    main()
