"""Training speed of a workload in a layout: `python -m benchmarks.train gpt2-large --layout tp2+sp`.

Each layout is a run of `megalith train` on synthetic tokens, without evaluation, in processes of its own, one a GPU.
Figures are medians over the steps after the warm-up; memory is the most that rank 0 had allocated. `--losses` prints
the losses of some steps too, to lay layouts beside each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

# The notes' GPT-2-large has 16 heads of 80.
_LARGE = dict(preset="gpt2-large", num_attention_heads=16)
_NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)
_LLAMA = dict(preset="llama3-8b", vocab_size=128256)

# fmt: off
WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt2":               dict(model=dict(preset="gpt2", **_NO_DROPOUT), seq_length=1024, precision="bf16", batch=64),
    "gpt2-large":         dict(model=dict(_LARGE, **_NO_DROPOUT), seq_length=1024, precision="bf16", batch=32),
    "gpt2-large-dropout": dict(model=_LARGE, seq_length=1024, precision="fp16", batch=32),
    "llama3-8b":          dict(model=_LLAMA, seq_length=8192, precision="bf16", batch=2),
}
LAYOUTS: dict[str, dict[str, Any]] = {  # processes, micro-batch as a share of the global batch, settings
    "one":         dict(processes=1, micro=1.0, parallel={}),
    "dp2":         dict(processes=2, micro=0.5, parallel={}),
    "dp2-optim":   dict(processes=2, micro=0.5, parallel=dict(data_parallel_sharding_strategy="optim")),
    "dp2-full":    dict(processes=2, micro=0.5, parallel=dict(data_parallel_sharding_strategy="optim_grads_params")),
    "tp2":         dict(processes=2, micro=1.0, parallel=dict(tensor_model_parallel_size=2)),
    "tp2+sp":      dict(processes=2, micro=1.0, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "cp2":         dict(processes=2, micro=1.0, parallel=dict(context_parallel_size=2)),
    "cp2-gather":  dict(processes=2, micro=1.0, parallel=dict(context_parallel_size=2, cp_comm_type="all_gather")),
    "cp2-a2a":     dict(processes=2, micro=1.0, parallel=dict(context_parallel_size=2, cp_comm_type="a2a")),
    "pp2":         dict(processes=2, micro=0.125, parallel=dict(pipeline_model_parallel_size=2)),
    "pp2-16":      dict(processes=2, micro=0.0625, parallel=dict(pipeline_model_parallel_size=2,
                        decoder_first_pipeline_num_layers=19)),
    "pp2-v2":      dict(processes=2, micro=0.0625, parallel=dict(pipeline_model_parallel_size=2,
                        virtual_pipeline_model_parallel_size=2)),
    "tp2-pp2-dp2": dict(processes=8, micro=0.125, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True,
                        pipeline_model_parallel_size=2)),
    "tp2-cp2-dp2": dict(processes=8, micro=0.5, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True,
                        context_parallel_size=2)),
    "dp8-optim":   dict(processes=8, micro=0.0625, parallel=dict(data_parallel_sharding_strategy="optim")),
    "dp8-full":    dict(processes=8, micro=0.0625, parallel=dict(data_parallel_sharding_strategy="optim_grads_params")),
}
# fmt: on
FIGURES = ("step_time_ms", "tokens_per_second_per_device", "tflops_per_device", "mfu", "max_memory_gb")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["one"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument(
        "--batch", type=int, help="sequences a step (default: the workload's for each process)"
    )
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("overrides", nargs="*", help="further settings, section.key=value, after a --")
    args = parser.parse_args()
    for layout in args.layout:
        print(f"{args.workload} {layout} | {measure(args, layout)}", flush=True)


def measure(args: argparse.Namespace, layout: str) -> str:
    """The figures of one run, or the end of what it printed when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder) / "run.yaml"
        run_file.write_text(yaml.safe_dump(run_tree(args, layout, folder)))
        command = [sys.executable, "-m", "megalith.cli", "train", str(run_file)]
        command += ["--nproc", str(LAYOUTS[layout]["processes"]), *(f"--{o}" for o in args.overrides)]
        done = subprocess.run(command, capture_output=True, text=True)
        metrics = Path(folder) / "run" / "metrics.jsonl"
        if done.returncode or not metrics.exists():
            return f"failed with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = steps[args.warmup :]
    known = [key for key in FIGURES if measured[0][key] is not None]
    text = " | ".join(f"{key} {statistics.median(step[key] for step in measured):.4g}" for key in known)
    if args.losses:
        shown = steps[:: max(1, len(steps) // 6)]
        text += " | losses " + " ".join(f"{step['step']}:{step['loss']:.4f}" for step in shown)
    if "measured in step" in done.stdout:
        text += "\n" + done.stdout[done.stdout.index("measured in step") :].split("\n\n")[0]
    return text


def run_tree(args: argparse.Namespace, layout: str, folder: str) -> dict[str, Any]:
    """The run file of a workload in a layout."""
    workload, how = WORKLOADS[args.workload], LAYOUTS[layout]
    batch = args.batch or workload["batch"] * how["processes"]
    return {
        "model": workload["model"],
        "parallel": how["parallel"],
        "data": {"mock": True, "seq_length": workload["seq_length"]},
        "optim": {"lr": 1e-4, "lr_decay_style": "constant"},
        "checkpoint": {"save_optim": False},
        "train": {
            "micro_batch_size": max(1, int(how["micro"] * batch) // (2 if layout.endswith("-dp2") else 1)),
            "global_batch_size": batch,
            "precision": workload["precision"],
            "train_iters": args.steps,
            "eval_iters": 0,
            "output_dir": f"{folder}/run",
        },
    }


if __name__ == "__main__":
    main()
