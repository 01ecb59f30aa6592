"""An Accelerate script compared with `megalith train` for the same work: `python -m benchmarks.accelerate_overhead`.

For each layout the loop of Accelerate's guide over a Hugging Face model, and the run file of a workload of train.py for
the same shape, with the same batches, precision, AdamW and clipping; then the ratio of their times of a step. That of
`megalith train` is the median that metrics.jsonl has, the script's the mean of the steps after the warm-up.

What is under way is told as it comes: a line as a side begins and ends, and one a step of the script. Both sides, and
later calls, share one cache of compiled code (`--cache`). `--steps 8 --warmup 4` and a smaller `--batch` take less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megalith.bench.bench_options import add_result_options
from megalith.bench.peers import build_hugging_face, model_run
from megalith.bench.training_speed import measure, show
from megalith.bench.workloads import LAYOUTS, WORKLOADS, run_tree

FIELDS = {"tensor_model_parallel_size": "tp_degree", "pipeline_model_parallel_size": "pp_degree",
          "sequence_parallel": "sequence_parallelism"}  # fmt: skip
CACHE = Path(tempfile.gettempdir()) / "megalith_accelerate_overhead"
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", nargs="?", choices=WORKLOADS, default="llama3.2-1b")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["tp2", "dp2"])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument(
        "--batch", type=int, help="sequences per step (default: the workload's for each process)"
    )
    parser.add_argument("--micro", type=int, default=2, help="sequences of a micro-batch")
    add_result_options(parser)
    parser.add_argument("--script", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, default=CACHE, help="of compiled code (default: %(default)s)")
    args = parser.parse_args()
    args.kernels, args.losses = False, False
    args.set.append(f"train.micro_batch_size={args.micro}")
    if args.script:
        return script(args)
    for variable, folder in CACHES.items():
        os.environ.setdefault(variable, str(args.cache.absolute() / folder))
    for layout in args.layout:
        theirs = timed(
            args, f"{layout}, Accelerate's loop", lambda layout=layout: measure_script(args, layout)
        )
        ours = timed(args, layout, lambda layout=layout: measure(args, layout, {"mock": True}))
        if "failed" not in ours and "failed" not in theirs:
            ratio = theirs["step_time_ms"] / ours["step_time_ms"]
            print(f"{layout}: script / megalith train = {ratio:.3f}", flush=True)


def timed(args: argparse.Namespace, name: str, side: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Print and return the figures of one side, with its duration."""
    print(f"{name}: {args.steps} steps begin", flush=True)
    began = time.perf_counter()
    result = side()
    show(args, name, {**result, "took_s": time.perf_counter() - began})
    return result


def measure_script(args: argparse.Namespace, layout: str) -> dict[str, float | str]:
    """Run `script` in new processes and show their progress. Return its figures, or under `failed` the exit code."""
    numbers = {"--steps": args.steps, "--warmup": args.warmup, "--micro": args.micro}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(LAYOUTS[layout]["processes"]), "-m", "benchmarks.accelerate_overhead", args.workload]
    command += ["--script", layout, *(str(word) for pair in numbers.items() for word in pair)]
    command += ["--batch", str(args.batch)] if args.batch else []
    done = subprocess.run([*command, "--set", *args.set], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": f"failed with {done.returncode}: {done.stdout[-3000:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def script(args: argparse.Namespace) -> None:
    """The loop of Accelerate's guide. Its last line prints its figures."""
    from megalith.accelerate import Accelerator, MegatronLMPlugin

    how, tree = (
        LAYOUTS[args.script],
        run_tree(args.workload, args.script, {}, "", steps=args.steps, batch=args.batch),
    )
    parallel, batch = how["parallel"], tree["train"]["global_batch_size"]
    config = model_run(args.workload, [each for each in args.set if each.startswith(("model.", "data."))])
    degrees = {FIELDS[name]: value for name, value in parallel.items()}
    replicas = how["processes"] // (degrees.get("tp_degree", 1) * degrees.get("pp_degree", 1))
    length = config.data.seq_length
    plugin = MegatronLMPlugin(
        **degrees, num_micro_batches=batch // replicas // args.micro, gradient_clipping=1.0, seq_length=length
    )
    bf16 = tree["train"]["precision"] == "bf16"
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", megatron_lm_plugin=plugin)
    model = build_hugging_face(config.model, "meta")  # its weights are then made on the ranks
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95))
    tokens = torch.randint(0, config.model.vocab_size, (args.steps * batch, length))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(rows, batch_size=args.micro)
    )
    model.train()
    times: list[float] = []
    for batch in loader:
        tell(args, times)
        if len(times) in (args.warmup, args.steps - 1) and torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = (times[-1] - times[args.warmup]) / (args.steps - 1 - args.warmup)
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    if int(os.environ["RANK"]) == 0:
        print(
            json.dumps({"step_time_ms": 1e3 * mean, "max_memory_gb": memory, "loss": loss.item()}), flush=True
        )


def tell(args: argparse.Namespace, times: Sequence[float]) -> None:
    """Print the progress on the first process. Kernels of the previous step may still run."""
    if int(os.environ["RANK"]) == 0:
        since = f", {time.perf_counter() - times[0]:.1f} s after the first began" if times else ""
        print(f"  step {len(times) + 1} of {args.steps} begins{since}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
