"""Speed of dynamic context parallelism: `megalith bench dynamic-context llama3.2-1b --layout cp=4 dp=2,cp=2`.

Runs `megalith sft` on packed samples whose lengths are lognormal with a fixed seed: once per layout, with the samples
of each step balanced over the data-parallel ranks, and once with parallel.dynamic_context_parallel in the last layout.
A step has the same samples in all runs. Prints the time of each step, the speed compared with the fastest layout (the
median of the ratios of the steps after the warm-up), the ratio that the cost model expects, and the largest difference
of the losses. `--simulate` prints the expectation only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalith.bench.bench_options import add_result_options, append_result, workload_parser
from megalith.bench.training_speed import check_devices, run_training
from megalith.bench.workloads import WORKLOADS, layout_of, run_tree
from megalith.config import RunConfig
from megalith.data.balance import assign
from megalith.data.best_fit import best_fit_decreasing
from megalith.data.dynamic_context import PassCosts, RankLimits, schedule_step
from megalith.planner.pass_costs import pass_costs

SEED = 1234
STEP_TIME = "step_time_ms"


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument(
        "--layout",
        nargs="+",
        default=["cp=4", "dp=2,cp=2"],
        help="layouts with the same number of processes (default: %(default)s)",
    )
    parser.add_argument("--seq-length", type=int, default=32768, help="longest sample (default: %(default)s)")
    parser.add_argument("--median", type=float, default=2000, help="median length (default: %(default)s)")
    parser.add_argument(
        "--sigma", type=float, default=1.2, help="standard deviation of log(length) (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=8, help="rows per step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="number of steps (default: %(default)s)")
    parser.add_argument(
        "--warmup",
        type=int,
        default=4,
        help="warm-up steps, excluded from the figures (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, help="parallel.max_seqlen_per_dp_cp_rank (default: the last layout's)"
    )
    parser.add_argument("--simulate", action="store_true", help="only print the cost model's prediction")
    add_result_options(parser)
    args = parser.parse_args()
    processes = {layout_of(layout)["processes"] for layout in args.layout}
    if len(processes) > 1:
        parser.error(f"the layouts have {sorted(processes)} processes; use layouts with the same number")
    lengths = sample_lengths(args)
    costs, expected = pass_costs(RunConfig.from_tree(_tree(args, args.layout[-1], "", ""))), {}
    for layout in args.layout:
        expected[layout] = static_cost(lengths, args, layout_of(layout), costs)
    expected["dynamic"] = dynamic_cost(lengths, args, processes.pop(), costs)
    show_expected(expected)
    if args.simulate:
        return
    check_devices(layout_of(args.layout[-1])["processes"])
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.jsonl"
        write_samples(samples, lengths, WORKLOADS[args.workload]["model"].get("vocab_size", 32000))
        for name in (*args.layout, "dynamic"):
            runs[name] = run(args, name, samples)
            figures = " ".join(f"{step[STEP_TIME]:.0f}" for step in runs[name])
            print(f"{name}: ms per step {figures}", flush=True)
    result = compare(runs, args.warmup)
    print(
        f"dynamic / fastest static ({result['fastest']}): {result['ratio']:.3f} × the speed, median of "
        f"{result['steps']} steps (target 1.3), {result['total_ratio']:.3f} × in total; losses differ by at most "
        f"{result['loss_difference']:.1e}"
    )
    append_result(args.results, result)


def sample_lengths(args: argparse.Namespace) -> np.ndarray:
    """Draw `count` sample lengths, int64, which together fill all rows of the run."""
    rng = np.random.default_rng(SEED)
    mean = rng.lognormal(np.log(args.median), args.sigma, 100_000).clip(2, args.seq_length).mean()
    count = int(1.02 * (args.steps + 1) * args.batch * args.seq_length / mean)
    lengths = rng.lognormal(np.log(args.median), args.sigma, count)
    return lengths.astype(np.int64).clip(2, args.seq_length)


def write_samples(path: Path, lengths: np.ndarray, vocab: int) -> None:
    rng = np.random.default_rng(SEED)
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            file.write(json.dumps({"input_ids": rng.integers(vocab, size=length).tolist()}) + "\n")


def run(args: argparse.Namespace, name: str, samples: Path) -> list[dict[str, Any]]:
    """Train in the layout `name`, or with dynamic context parallelism (`dynamic`). Return each step's metrics."""
    layout = args.layout[-1] if name == "dynamic" else name
    options = [f"--{setting}" for setting in args.set]
    with tempfile.TemporaryDirectory() as folder:
        tree = _tree(args, layout, str(samples), folder, is_dynamic=name == "dynamic")
        steps, printed = run_training(tree, Path(folder), layout_of(layout)["processes"], options, "sft")
    if steps is None:
        raise SystemExit(f"{name} {printed}")
    for line in printed.splitlines():
        if "balance_batches" in line or "dynamic_context_parallel" in line:
            print(line, flush=True)
    return steps


def _tree(
    args: argparse.Namespace, layout: str, samples: str, folder: str, is_dynamic: bool = False
) -> dict[str, Any]:
    """Return the run file of a layout."""
    tree = run_tree(args.workload, layout, {}, folder, steps=args.steps, batch=args.batch)
    replicas = layout_of(layout)["processes"] // _static_ranks(layout_of(layout))
    data = {"train_data_path": samples, "seq_length": args.seq_length}
    data["balance_batches"] = not is_dynamic and replicas > 1
    model = {**tree["model"], "max_position_embeddings": args.seq_length}
    parallel = dict(tree["parallel"])
    if is_dynamic:
        parallel |= {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": args.max_tokens}
    return {
        **tree,
        "model": model,
        "parallel": parallel,
        "data": {**tree["data"], **data},
        "sft": {"enabled": True},
        "log": {**tree["log"], "log_interval": 1},
        "train": {**tree["train"], "micro_batch_size": 1},
    }


def _static_ranks(layout: dict[str, Any]) -> int:
    """Return the number of ranks that share a row in a static layout."""
    parallel = layout["parallel"]
    return parallel.get("context_parallel_size", 1) * parallel.get("tensor_model_parallel_size", 1)


def static_cost(
    lengths: np.ndarray, args: argparse.Namespace, layout: dict[str, Any], costs: PassCosts
) -> float:
    """Return the expected cost of all steps in a static layout whose ranks have balanced rows."""
    context, length = layout["parallel"].get("context_parallel_size", 1), args.seq_length
    tensor = layout["parallel"].get("tensor_model_parallel_size", 1)
    replicas, total = layout["processes"] // (context * tensor), 0.0
    for rows in _batches(lengths, args):
        work = np.array(
            [costs.work(lengths[row]).sum() + costs.per_token * (length - lengths[row].sum()) for row in rows]
        )
        exchanged = costs.per_exchanged_token * length if context > 1 else 0
        slowest = (work + exchanged)[assign(work, 1, replicas)].sum(2).max(1) / context
        total += float(slowest.sum()) + costs.overhead * len(slowest)
    return total


def dynamic_cost(lengths: np.ndarray, args: argparse.Namespace, processes: int, costs: PassCosts) -> float:
    """Return the expected cost of all steps with dynamic context parallelism."""
    parallel = layout_of(args.layout[-1])["parallel"]
    room = args.max_tokens or args.seq_length // parallel.get("context_parallel_size", 1)
    ranks = processes // parallel.get("tensor_model_parallel_size", 1)
    limits, total = RankLimits(ranks, room), 0.0
    for rows in _batches(lengths, args):
        sequences = [sequence for row in rows for sequence in row]
        total += schedule_step(lengths[sequences], limits, costs).cost
    return total


def _batches(lengths: np.ndarray, args: argparse.Namespace) -> Sequence[Sequence[Sequence[int]]]:
    rows = best_fit_decreasing(lengths, args.seq_length, SEED)
    return [rows[step * args.batch : (step + 1) * args.batch] for step in range(args.steps)]


def show_expected(expected: dict[str, float]) -> None:
    dynamic = expected["dynamic"]
    ratios = ", ".join(
        f"{cost / dynamic:.3f} × {name}" for name, cost in expected.items() if name != "dynamic"
    )
    print(f"expected by the cost model: the speed of dynamic is {ratios}", flush=True)


def compare(runs: dict[str, list[dict[str, Any]]], warmup: int) -> dict[str, Any]:
    """Return the speed of the dynamic run relative to the fastest layout, and the largest difference of losses."""
    times = {name: np.array([step[STEP_TIME] for step in steps[warmup:]]) for name, steps in runs.items()}
    fastest = min((name for name in times if name != "dynamic"), key=lambda name: np.median(times[name]))
    losses = {name: np.array([step["loss"] for step in steps]) for name, steps in runs.items()}
    difference = max(
        float(np.abs(each / losses["dynamic"] - 1).max())
        for name, each in losses.items()
        if name != "dynamic"
    )
    return {
        "fastest": fastest,
        "ratio": float(np.median(times[fastest] / times["dynamic"])),
        "total_ratio": float(times[fastest].sum() / times["dynamic"].sum()),
        "steps": len(runs["dynamic"]) - warmup,
        "loss_difference": difference,
        "ms": {name: [step[STEP_TIME] for step in steps] for name, steps in runs.items()},
    }


if __name__ == "__main__":
    main()
