"""Compare loss curves of optimized paths with the plain path: `python -m benchmarks.curves --layout tp2+sp pp2`.

A small GPT-2 with dropout trains on real text, with one seed and the same samples, once per path:

    plain       bf16 on one GPU, not compiled, without recomputation
    fp32        the plain path in fp32: shows the effect of bf16 rounding
    split       the plain path with half the micro-batch size: the same sums in another order
    compiled    compiled layers, on a CPU too
    recomputing, recomputing-layers, recomputing-modules    compiled, with an activation_memory_budget of 0.5; with
                layers, or norms and activation functions, recomputed inside their graphs
    fp16, and each `--layout` of `megalith bench`, compiled on a GPU
    recomputed  the plain path with every layer recomputed in the backward pass
    bf16-gradients  on two GPUs with FSDP2: gradients sent in bf16 and added in fp32
    moments-bf16, moments-fp8   the plain path with Adam's moments in fewer bytes
    looped, unfused     with `--experts`: the plain path with one GEMM per expert instead of a grouped GEMM; without
                the fused kernels for the experts' rows
    fp8-delayed, …  compiled, with matmuls in FP8; these paths, plain, fp32 and split run with several seeds

Training amplifies the smallest difference, so correct paths drift apart too. The spread measures how far: it is the
larger of the mean differences of `fp32` and `split` from `plain`. A path passes if its losses differ from those of the
plain path by at most twice the spread in the mean, and by at most four times the spread in any window of ten steps. The
exit code is 1 if a path fails.

FP8 rounds sixteen times as coarsely as bf16, so correct FP8 differs by more than the spread, and a single seed shows
only noise. FP8 paths are therefore averaged over seeds of weights, samples and dropout. The shift is a run's mean
signed difference from plain in the second half of its steps. A path passes if |mean shift| + 2 · standard error over
the seeds is at most 0.25 % of the loss, the difference that DeepSeek-V3 reports for its recipe. If it fails because of
the noise, use more seeds or steps. `--seeds` applies this criterion to every path. Large models with experts need it,
because routing can move even `split` by more than four times the spread.

Runs start at the same time, `--at-once` of them on each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from megalith.bench.corpus_text import build_dataset
from megalith.bench.workloads import LAYOUTS

IN_THE_MEAN, IN_A_WINDOW = 2.0, 4.0  # times the spread
WINDOW = 10  # steps
SHIFT = 0.0025  # of the loss: that of a path judged over seeds
FIRST_SEED, SEEDS, SEED = 1234, 4, "-seed"
VOCAB_SIZE = 32_000
YARDSTICKS = ("fp32", "split")
PLAIN, COMPILED = {"runtime": {"compile": False}}, {"runtime": {"compile": True}}
PATHS: dict[str, dict[str, Any]] = {  # settings, beside the workload's own
    "plain": PLAIN,
    "fp32": {**PLAIN, "train": {"precision": "fp32"}},
    "split": {**PLAIN, "micro": 0.5},
    "compiled": COMPILED,
    "recomputing": {"runtime": {"compile": True, "activation_memory_budget": 0.5}},
    "recomputing-layers": {**COMPILED, "parallel": {"recompute_granularity": "full"}},
    "recomputing-modules": {
        **COMPILED,
        "parallel": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp_act"]},
    },
    "recomputed": {**PLAIN, "parallel": {"recompute_granularity": "full", "recompute_method": "uniform"}},
    "bf16-gradients": {
        **PLAIN,
        "processes": 2,
        "micro": 0.5,
        "parallel": {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "reduce_scatter_with_fp32_accumulation": True,
        },
    },
    "moments-bf16": {**PLAIN, "optim": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}},
    "moments-fp8": {**PLAIN, "optim": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}},
    "looped": {**PLAIN, "model": {"moe_grouped_gemm": False}},
    "unfused": {**PLAIN, "model": {"moe_permute_fusion": False}},
    "fp8-delayed": {"train": {"fp8_format": "hybrid"}},
    "fp8-tensorwise": {"train": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}},
    "fp8-blockwise": {"train": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}},
    "fp16": {"train": {"precision": "fp16"}, "optim": {"loss_scale": 4096.0}},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=[])
    parser.add_argument(
        "--paths",
        nargs="+",
        choices=PATHS,
        default=["compiled", "recomputing", "fp16"],
        help="(plain, fp32 and split always run)",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--experts", type=int, help="of every layer of every run, two for each token")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of weights, samples and dropout")
    parser.add_argument(
        "--seeds", type=int, help="of every path, 2 at least; else 4 of fp8 paths, one of others"
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs on a GPU")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="of the layouts")
    args = parser.parse_args()
    if {"looped", "unfused"} & {*args.paths} and not args.experts:
        parser.error("--paths looped and unfused are of experts; give --experts too")
    if args.seeds is not None and args.seeds < 2:
        parser.error(
            f"--seeds is {args.seeds}, and what is judged over seeds takes 2 at least; leave it out for one"
        )
    with tempfile.TemporaryDirectory() as folder:
        prefix, tokens = build_dataset(Path(folder), vocab_size=args.vocab_size)
        print(
            f"{args.layers} layers of width {args.width}, {args.steps} steps on {tokens:,} tokens", flush=True
        )
        runs = {name: PATHS[name] for name in PATHS if name in ("plain", *YARDSTICKS, *args.paths)}
        runs |= {name: {**LAYOUTS[name], "set": args.set} for name in args.layout}
        told = [name for name in (*args.paths, *args.layout) if name not in ("plain", *YARDSTICKS)]
        seeded = [name for name in told if args.seeds or is_fp8(name)]
        for number in range(1, (args.seeds or SEEDS) if seeded else 1):
            paths = ("plain", *YARDSTICKS, *seeded)
            runs |= {of_seed(name, number): runs[name] | {"seed": number} for name in paths}
        gpus = Gpus(args.at_once)
        with ThreadPoolExecutor(max(1, gpus.count * args.at_once)) as side_by_side:
            losses = side_by_side.map(
                lambda name: run(args, runs[name], prefix, Path(folder) / name, gpus), runs
            )
            curves = dict(zip(runs, losses, strict=True))
    sys.exit(1 if judge(curves, seeded) else 0)


class Gpus:
    """Free places for runs, `at_once` on each GPU."""

    def __init__(self, at_once: int):
        self.count, seen = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
        self._free = at_once * (seen.split(",") if seen else [str(number) for number in range(self.count)])
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[dict[str, str]]:
        """Yield the environment of a process on `count` GPUs. Without GPUs, it is that of this process."""
        if not self.count:
            yield dict(os.environ)
            return
        with self._changed:
            self._changed.wait_for(lambda: len(set(self._free)) >= min(count, self.count))
            mine = sorted(set(self._free), key=self._free.count, reverse=True)[:count]
            for gpu in mine:
                self._free.remove(gpu)
        try:
            yield {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(mine)}
        finally:
            with self._changed:
                self._free += mine
                self._changed.notify_all()


def run(args: argparse.Namespace, how: dict[str, Any], prefix: str, folder: Path, gpus: Gpus) -> list[float]:
    """Return the losses of a path's run, in order. End the program if the run fails."""
    folder.mkdir()
    run_file, output = folder / "run.yaml", folder / "run"
    run_file.write_text(yaml.safe_dump(run_tree(args, how, prefix, output)))
    command = [sys.executable, "-m", "megalith", "train", str(run_file)]
    command += ["--nproc", str(how.get("processes", 1)), *(f"--{each}" for each in how.get("set", []))]
    with gpus.taken(how.get("processes", 1)) as environment:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{folder.name} failed with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    losses = [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    shown = losses[:: max(1, len(losses) // 8)]
    print(f"{folder.name:16} {' '.join(f'{loss:.4f}' for loss in shown)}", flush=True)
    return losses


def run_tree(args: argparse.Namespace, how: dict[str, Any], prefix: str, output: Path) -> dict[str, Any]:
    """Return the run file of a path."""
    model = {
        "num_layers": args.layers,
        "hidden_size": args.width,
        "num_attention_heads": max(1, args.width // 64),
        "num_experts": args.experts,
        "swiglu": args.experts is not None,
        "vocab_size": args.vocab_size,
        "attention_dropout": 0.0,  # within the fused kernel it depends on the layout
        **how.get("model", {}),
    }
    train = {
        "micro_batch_size": max(1, int(how.get("micro", 1.0) * args.batch)),
        "global_batch_size": args.batch,
        "precision": "bf16",
        "train_iters": args.steps,
        "seed": args.seed + how.get("seed", 0),
        "eval_iters": 0,
        "output_dir": str(output),
    }
    return {
        "model": model,
        "parallel": how.get("parallel", {}),
        "data": {"data_path": [prefix], "seq_length": args.seq_length},
        "optim": {"lr": 6e-4, "lr_warmup_iters": args.steps // 10, **how.get("optim", {})},
        "checkpoint": {"save_at_end": False},
        "runtime": how.get("runtime", {}),
        "train": {**train, **how.get("train", {})},
    }


def judge(curves: dict[str, list[float]], seeded: Collection[str]) -> list[str]:
    """Print the distance of each path from the plain one. Return the names of those that are too far. `seeded`: judged
    over seeds."""
    plain = curves["plain"]
    spread = max(mean_distance(curves[name], plain) for name in YARDSTICKS)
    bounds = IN_THE_MEAN * spread, IN_A_WINDOW * spread
    print(f"\nspread {spread:.1e}; bounds: mean {bounds[0]:.1e}, mean of {WINDOW} steps {bounds[1]:.1e}")
    print(f"{'difference from plain':23} {'mean':>9} {'window':>9} {'largest':>9} {'at the end':>11}")
    apart = []
    for name, losses in curves.items():
        if name == "plain" or SEED in name:
            continue
        mean, window = mean_distance(losses, plain), worst_window(losses, plain)
        largest = max(abs(a - b) for a, b in zip(losses, plain))
        end = statistics.mean(losses[-WINDOW:]) - statistics.mean(plain[-WINDOW:])
        fits = name in YARDSTICKS or (mean <= bounds[0] and window <= bounds[1])
        verdict = "the yardstick" if name in YARDSTICKS else "one run" if fits else "APART"
        verdict = "see below" if name in seeded else verdict
        print(f"{name:23} {mean:9.1e} {window:9.1e} {largest:9.1e} {end:+11.1e}  {verdict}")
        apart += [] if fits or name in seeded else [name]
    return apart + (judge_seeds(curves, seeded) if seeded else [])


def judge_seeds(curves: dict[str, list[float]], seeded: Collection[str]) -> list[str]:
    """Print the differences of the yardsticks and of `seeded` over the seeds. Return those that are too far."""
    names = [*YARDSTICKS, *seeded]
    pairs = {
        name: list(zip(seeds_of(name, curves), seeds_of("plain", curves), strict=True)) for name in names
    }
    means = {name: statistics.mean(mean_distance(*pair) for pair in result) for name, result in pairs.items()}
    yardstick = max(means[name] for name in YARDSTICKS)
    level = statistics.mean(statistics.mean(second_half(plain)) for plain in seeds_of("plain", curves))
    print(f"\nover {len(pairs['fp32'])} seeds; bound of the shift {SHIFT * level:.1e}")
    print(f"{'difference from plain':23} {'mean':>9} {'× yardstick':>12} {'shift ± its standard error':>28}")
    apart = []
    for name, result in pairs.items():
        shifts = [
            statistics.mean(second_half(losses)) - statistics.mean(second_half(plain))
            for losses, plain in result
        ]
        mean, error = statistics.mean(shifts), statistics.stdev(shifts) / len(shifts) ** 0.5
        fits = abs(mean) + 2 * error <= SHIFT * level
        verdict = "the yardstick" if name in YARDSTICKS else "within" if fits else "APART"
        print(
            f"{name:23} {means[name]:9.1e} {means[name] / yardstick:12.1f} {mean:+15.1e} ± {error:.1e}       {verdict}"
        )
        apart += [] if fits or name in YARDSTICKS else [name]
    return apart


def seeds_of(name: str, curves: dict[str, list[float]]) -> list[list[float]]:
    """Return a path's curves, one per seed."""
    return [curves[each] for each in curves if each == name or each.startswith(name + SEED)]


def second_half(losses: Sequence[float]) -> Sequence[float]:
    return losses[len(losses) // 2 :]


def of_seed(name: str, number: int) -> str:
    """Return the name of a path's run with a further seed."""
    return f"{name}{SEED}{number}" if number else name


def is_fp8(name: str) -> bool:
    return name.startswith("fp8")


def mean_distance(losses: Sequence[float], others: Sequence[float]) -> float:
    return statistics.mean(abs(a - b) for a, b in zip(losses, others, strict=True))


def worst_window(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest mean distance over consecutive steps."""
    starts = range(max(1, len(losses) - WINDOW + 1))
    return max(mean_distance(losses[i : i + WINDOW], others[i : i + WINDOW]) for i in starts)


if __name__ == "__main__":
    main()
