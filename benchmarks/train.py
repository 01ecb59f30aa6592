"""Training speed of a workload on the GPU at hand: `python -m benchmarks.train gpt2-large`.

Random tokens, no evaluation, no checkpoint in the measured window. Medians over the steps after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import megalith
from megalith.config import RunConfig

GPT2_LARGE = dict(
    preset="gpt2-large", num_attention_heads=16, hidden_dropout=0.0, attention_dropout=0.0
)  # the notes' script has 16 heads
WORKLOADS = {
    "gpt2-large": dict(
        model=GPT2_LARGE, data=dict(seq_length=1024), train=dict(micro_batch_size=32, precision="bf16")
    ),
    "gpt2-large-fp16-dropout": dict(
        model=dict(GPT2_LARGE, hidden_dropout=0.1, attention_dropout=0.1),
        data=dict(seq_length=1024),
        train=dict(micro_batch_size=32, precision="fp16"),
    ),
    "gpt2": dict(
        model=dict(preset="gpt2", hidden_dropout=0.0, attention_dropout=0.0),
        data=dict(seq_length=1024),
        train=dict(micro_batch_size=64, precision="bf16"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    args = parser.parse_args()
    tree = WORKLOADS[args.workload]
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.from_tree(
            {
                **tree,
                "data": {**tree["data"], "mock": True},
                "optim": {"lr": 1e-4},
                "checkpoint": {"save_optim": False},
                "train": {
                    **tree["train"],
                    "global_batch_size": tree["train"]["micro_batch_size"],
                    "train_iters": args.steps,
                    "eval_iters": 0,
                    "output_dir": folder,
                },
            }
        )
        megalith.train(config)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][args.warmup :]
    median = {
        key: statistics.median(step[key] for step in steps)
        for key in ("step_time_ms", "tokens_per_second_per_device", "tflops_per_device", "mfu", "max_memory_gb")
        if steps[0][key] is not None
    }
    print(args.workload, *(f"{key} {value:.4g}" for key, value in median.items()), sep=" | ")


if __name__ == "__main__":
    main()
