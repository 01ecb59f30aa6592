"""Training speed of a workload in a layout: `megalith bench gpt2-large --layout tp2+sp`.

Each layout is a run of `megalith train` on synthetic tokens, without evaluation, with a process per GPU. Figures are
medians over the steps after the warm-up. TFLOP/s count half of the attention matrix (causal). Memory is the peak
allocated on rank 0. The first step is timed from process start, including compilation.

`--peer` runs the same model in other libraries (peers.py) on the same GPUs: `hf` and `plain` on one, `fsdp2`, `liger`
and `torchtitan` in the processes of the last layout. The latter three take options, as in `liger:never,micro=1`:
`never` (no resharding after the forward pass), `compiled`, `eager`, `selective`, `full` (recomputation), `micro=N`.
`torchtitan` also takes `fp8` and `fp8-rowwise`, torchao's recipes. A peer that runs out of memory is tried again with
half the micro-batch. `best` tries several of these options and names the fastest: torchtitan's FP8 recipes if
train.fp8_format is set.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

import megalith
from megalith.bench import step_breakdown
from megalith.bench.bench_options import add_result_options, append_result, workload_parser
from megalith.bench.corpus_text import build_dataset
from megalith.bench.workloads import DEGREES, LAYOUTS, layout_of, run_tree
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.hardware import pick_device
from megalith.parallel.pipeline.schedules import Kind
from megalith.parallel.pipeline.timeline import TIMELINE_FILE, Timeline, read_timeline

PEERS = ("hf", "plain", "fsdp2", "liger", "torchtitan", "peft", "peft-liger")
PACKAGES = {  # that a peer imports
    **dict.fromkeys(("hf", "fsdp2"), ("transformers",)),
    "liger": ("transformers", "liger-kernel"),
    "torchtitan": ("torchtitan",),
    "peft": ("transformers", "peft"),
    "peft-liger": ("transformers", "peft", "liger-kernel"),
}
SHARDED_PEERS = "fsdp2", "liger", "torchtitan"  # run in the processes of a layout
SWITCHES = {  # of these peers, written liger:never,compiled
    "never": ("--reshard", "never"),
    "selective": ("--recompute", "selective"),
    "full": ("--recompute", "full"),
    "compiled": ("--compile",),
    "eager": ("--no-compile",),
    "fp8": ("--fp8", "tensorwise"),  # of torchtitan alone, by torchao
    "fp8-rowwise": ("--fp8", "rowwise"),
}
BEST = "liger", "liger:never", "torchtitan", "torchtitan:never", "fsdp2:never"
BEST_FP8 = "torchtitan:fp8", "torchtitan:never,fp8", "torchtitan:fp8-rowwise"
CHOSEN = "note: chosen by auto"  # start of the line that a run prints
FIGURES = ("step_time_ms", "tokens_per_second_per_device", "tflops_per_device", "mfu", "max_memory_gb")
KERNELS = 14  # rows of --kernels
TERMINATE_TIMEOUT = 20.0  # seconds
REAL_MEGABYTES = 128  # of text; its tokens take about half as much
NOT_KERNELS = (
    "step ",
    "## Call",
    "Command Buffer",
    "Memcpy",
    "megalith:",
    "nccl:",
)  # other rows of torch's table


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument(
        "--layout",
        nargs="+",
        default=["one"],
        metavar="LAYOUT",
        help=f"{', '.join(LAYOUTS)}; or degrees and settings of `parallel`: tp=2,pp=2,dp=2,sequence_parallel=true",
    )
    parser.add_argument("--steps", type=int, default=30, help="number of steps (default: %(default)s)")
    parser.add_argument(
        "--warmup",
        type=int,
        default=10,
        help="warm-up steps, excluded from the figures (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, help="sequences per step (default: the workload's, per process)")
    parser.add_argument("--losses", action="store_true", help="print the losses of some steps")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="list the slowest kernels; for experts, also break the step down",
    )
    parser.add_argument(
        "--real", type=int, nargs="?", const=REAL_MEGABYTES, metavar="MB",
        help="run each layout again on this many MB of real text (default: %(const)s), and compare the times",
    )  # fmt: skip
    parser.add_argument(
        "--peer", type=peer_name, nargs="+", default=[], metavar="PEER", help=f"{', '.join(PEERS)}, best"
    )
    add_result_options(parser, "append a line of JSON per run")
    args = parser.parse_args()
    check_devices(max(layout_of(layout)["processes"] for layout in args.layout))
    failed = False
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        real = build_real_data(Path(folder), args.real) if args.real else None
        for layout in args.layout:
            result = measure(args, layout, {"mock": True})
            show(args, layout, result)
            failed |= "failed" in result
            if real:
                on_text = measure(args, layout, real)
                show(args, f"{layout} on real text", on_text)
                compare(result, on_text)
    for peer in args.peer:
        failed |= not any("failed" not in result for result in measure_peers(args, peer))
    if failed:
        sys.exit(1)


def check_devices(processes: int) -> None:
    """Raise ConfigError if a layout needs more GPUs than there are. Without GPUs, print that the CPU is measured."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        print("no GPU found; the benchmark runs on the CPU", file=sys.stderr, flush=True)
    elif gpus < processes:
        raise ConfigError(
            f"--layout takes {processes} GPUs, but this machine has {gpus}; `megalith bench` lists the layouts by "
            "number of processes"
        )


def check_memory(config: RunConfig, processes: int) -> None:
    """Warn if a CPU run probably exceeds this machine's memory. The run's own warning only appears in its log.

    Raises:
        ConfigError: the weights and optimizer states alone exceed this machine's memory.
    """
    from megalith.planner.fit import warnings_on_cpu
    from megalith.training.build import prepare

    if pick_device(config.runtime.device).type == "cpu":
        for warning in warnings_on_cpu(prepare(config, processes).config, processes):
            print(warning, file=sys.stderr, flush=True)


def show(args: argparse.Namespace, name: str, result: dict[str, Any]) -> None:
    """Print a run's figures and append them to --results."""
    figures = " | ".join(
        f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, (int, float))
    )
    print(f"{args.workload} {name} | {figures}")
    for key in ("losses", "told", "measured", "stages", "kernels", "parts", "failed"):
        if result.get(key):
            print(result[key])
    sys.stdout.flush()
    if args.results:
        row = {"workload": args.workload, "run": name, "batch": args.batch, "set": args.set}
        append_result(args.results, row | result | environment())


def build_real_data(folder: Path, megabytes: int) -> dict[str, Any]:
    """Write a dataset of real text, and return its settings."""
    prefix, tokens = build_dataset(folder, megabytes)
    print(f"real text: {tokens:,} tokens, {2 * tokens / 1e6:.0f} MB", flush=True)
    return {"data_path": [prefix]}


def compare(mock: dict[str, Any], real: dict[str, Any]) -> None:
    """Print how much longer a step takes with real text than with synthetic tokens."""
    if "failed" not in mock and "failed" not in real:
        times = mock["step_time_ms"], real["step_time_ms"]
        print(
            f"real text {times[1]:.1f} ms, synthetic tokens {times[0]:.1f} ms: {times[1] / times[0] - 1:+.2%}"
        )


def measure(
    args: argparse.Namespace,
    layout: str,
    data: dict[str, Any],
    program: str = "train",
    sections: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run `megalith PROGRAM` on a workload.

    Args:
        data: settings of `data`.
        sections: sections of the run file that override the workload's.

    Returns:
        The figures, or under `failed` the end of the output.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = run_tree(
            args.workload, layout, data, folder, steps=args.steps, batch=args.batch, profiles=args.kernels
        )
        for name, section in (sections or {}).items():
            tree[name] = {**tree.get(name, {}), **section}
        options = [f"--{setting}" for setting in args.set]
        steps, printed = run_training(tree, Path(folder), layout_of(layout)["processes"], options, program)
        if steps is None:
            return {"failed": printed}
        output = Path(folder) / "run"
        events = output / "events.jsonl"
        records = map(json.loads, events.read_text().splitlines()) if events.exists() else ()
        warnings = [event["text"] for event in records if event["event"] == "gpu"]
        table = output / "profile" / "top_operations.txt"
        kernels = costliest_kernels(table.read_text()) if table.exists() else None
        trace = output / "profile" / "trace.json"
        parts = step_breakdown.table(step_breakdown.read_trace(trace)) if trace.exists() else ""
        stages = stage_times(read_timeline(output)) if (output / TIMELINE_FILE).exists() else None
    result = medians(steps[args.warmup : args.steps])
    if first := re.search(r"first step ([\d.]+) s after", printed):
        result["first_step_s"] = float(first[1])
    if args.losses:
        shown = steps[:: max(1, len(steps) // 6)]
        result["losses"] = "losses " + " ".join(f"{step['step']}:{step['loss']:.4f}" for step in shown)
    result["told"] = "\n".join([line for line in printed.splitlines() if line.startswith(CHOSEN)] + warnings)
    if "measured in step" in printed:
        lines = printed[printed.index("measured in step") :].splitlines()
        end = next((i for i, line in enumerate(lines) if "iteration" in line), None)
        result["measured"] = "\n".join(line for line in lines[:end] if line)
    return result | {
        "stages": stages,
        "kernels": kernels,
        "parts": parts if step_breakdown.EXPERTS in parts else None,
    }


def run_training(
    tree: dict[str, Any], folder: Path, processes: int, options: Sequence[str] = (), program: str = "train"
) -> tuple[list[dict[str, Any]] | None, str]:
    """Run `megalith PROGRAM` with the sections of a run file, and its output in FOLDER/run.

    Returns:
        The metrics of each step and the printed output; for a failed run None, and a message with the output's end.
    """
    run_file, output = folder / "run.yaml", folder / "run"
    tree["train"] = {**tree["train"], "output_dir": str(output)}
    run_file.write_text(yaml.safe_dump(tree))
    check_memory(RunConfig.load(str(run_file), list(options)), processes)
    command = [sys.executable, "-m", "megalith", program, str(run_file), "--nproc", str(processes), *options]
    returncode, printed = run_logged(command, folder / "printed.txt")
    metrics = output / "metrics.jsonl"
    if returncode or not metrics.exists():
        return None, f"failed with {returncode}: {printed[-2000:]}"
    return [json.loads(line) for line in metrics.read_text().splitlines()], printed


def medians(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median over the steps of each figure that they have."""
    return {
        key: statistics.median(step[key] for step in steps if step[key] is not None)
        for key in FIGURES
        if steps[0][key] is not None
    }


def run_logged(command: list[str], file: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command. Returns its exit status and output. If interrupted, print the output so far."""
    with file.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        process.wait()
    except BaseException:
        print(f"interrupted; output of the run so far:\n{file.read_text()[-2000:]}", flush=True)
        process.terminate()
        try:  # free its devices
            process.wait(TERMINATE_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return process.returncode, file.read_text()


def stage_times(timeline: Timeline) -> str:
    """Return as text the forward and backward time per micro-batch of each stage, in the model's order."""
    times: dict[tuple[int, int], dict[Kind, list[float]]] = {}
    for span in (span for spans in timeline.spans for span in spans):
        stage = times.setdefault((span.action.chunk, span.rank), {})
        stage.setdefault(span.action.kind, []).append(span.end - span.start)
    shown = (
        "+".join(f"{statistics.median(t):.2f}" for t in times[stage].values()) for stage in sorted(times)
    )
    return f"stages, forward+backward ms: {', '.join(shown)}; bubble {timeline.bubble:.1%} of {timeline.total:.1f} ms"


def peer_name(text: str) -> str:
    """Return `text` if it is a known peer with known switches. Raise an error otherwise."""
    name, _, switches = text.partition(":")
    unknown = [
        each for each in switches.split(",") if switches and each not in SWITCHES and each[:6] != "micro="
    ]
    if name not in (*PEERS, "best") or unknown or (switches and name not in SHARDED_PEERS):
        raise argparse.ArgumentTypeError(
            f"unknown peer {text!r}; use best, or one of {', '.join(PEERS)}; options of "
            f"{', '.join(SHARDED_PEERS)}, as in liger:never,micro=1: {', '.join(SWITCHES)}, micro=N"
        )
    return text


def measure_peers(args: argparse.Namespace, peer: str) -> list[dict[str, Any]]:
    """Measure one peer, or for `best` several. Prints and returns the figures of each."""
    results = {}
    fp8 = any(each.startswith("train.fp8_format=") for each in args.set)
    for name in (BEST_FP8 if fp8 else BEST) if peer == "best" else [peer]:
        results[name] = measure_peer(args, name)
        show(args, name, results[name])
    ran = {name: result for name, result in results.items() if "failed" not in result}
    if peer == "best" and ran:
        fastest = min(ran, key=lambda name: ran[name]["step_time_ms"])
        print(f"best peer: {fastest}, {ran[fastest]['step_time_ms']:.1f} ms")
    return list(results.values())


def measure_peer(args: argparse.Namespace, peer: str) -> dict[str, Any]:
    """Measure the same model in another library, with as many processes as the last layout has.

    The micro-batch is the same as Megalith's unless the peer's switches set it. It is halved as long as the peer runs
    out of memory.
    """
    name, _, switches = peer.partition(":")
    packages = (*PACKAGES.get(name, ()), *(("torchao",) if "fp8" in switches else ()))
    if missing := [package for package in packages if not find_spec(package.replace("-", "_"))]:
        return {
            "failed": f"the peer {name} needs {' and '.join(missing)}; run: pip install {' '.join(missing)}"
        }
    chosen = [each for each in switches.split(",") if each]
    settings = {key: value for key, _, value in (setting.partition("=") for setting in args.set)}
    layout = layout_of(args.layout[-1])
    train = run_tree(args.workload, args.layout[-1], {}, "", batch=args.batch)["train"]
    micro = int(settings.get("train.micro_batch_size", train["micro_batch_size"]))
    options = []
    for each in chosen:
        if each.startswith("micro="):
            micro = int(each.removeprefix("micro="))
        else:
            options += SWITCHES[each]
    recompute = "parallel.recompute_granularity"
    if not {"full", "selective"} & set(chosen) and "full" in (
        settings.get(recompute),
        layout["parallel"].get("recompute_granularity"),
    ):
        options += SWITCHES["full"]
    while True:
        result = _run_peer(args, name, layout, train["global_batch_size"], micro, options)
        if "out of memory" not in result.get("failed", "") or micro == 1:
            return result | {"micro_batch_size": micro}
        print(f"{peer} runs out of memory with {micro} sequences in a micro-batch", flush=True)
        micro //= 2


def _run_peer(
    args: argparse.Namespace,
    name: str,
    layout: dict[str, Any],
    batch: int,
    micro: int,
    options: Sequence[str],
) -> dict[str, Any]:
    """Run a peer in its own processes. Returns its figures, or under `failed` the last lines of its output."""
    processes, degrees = layout["processes"], {}
    if name == "torchtitan":
        degrees = {key: layout["parallel"].get(DEGREES[key], 1) for key in ("tp", "cp", "pp", "ep")}
    model_parallel_size = math.prod(degree for key, degree in degrees.items() if key != "ep")
    rows = batch // (processes // model_parallel_size)  # per data-parallel rank
    torchrun = ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"]
    module = ["megalith.bench.torchtitan_peer"] if name == "torchtitan" else ["megalith.bench.peers", name]
    command = [sys.executable, "-m", *(torchrun if processes > 1 or degrees else []), *module, args.workload]
    command += ["--steps", str(args.steps), "--warmup", str(args.warmup), "--batch", str(rows)]
    command += ["--micro-batches", str(max(1, rows // micro)), *options]
    for key, degree in degrees.items():
        command += [f"--{key}", str(degree)]
    command += ["--set", *(each for each in args.set if each.startswith(("model.", "data.seq_length")))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        text = done.stdout + done.stderr
        memory = "out of memory; " if "out of memory" in text.lower() else ""
        error = text.partition("] failed (exitcode")[0]  # where torchrun's own report begins
        return {"failed": f"failed with {done.returncode}: {memory}{error[-2000:]}"}
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def costliest_kernels(table: str) -> str:
    """Return self time, percentage and calls of the slowest kernels, from torch's table of GPU operations."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    heading, columns = (
        next(row for row in rows if row[0] == "Name"),
        ("Self CUDA", "Self CUDA %", "# of Calls"),
    )
    if "Self CUDA" not in heading:
        return ""
    on_host, columns = heading.index("Self CPU"), [heading.index(name) for name in columns]
    kernels = [
        row
        for row in rows
        if len(row) == len(heading) and row[on_host] == "0.000us" and not row[0].startswith(NOT_KERNELS)
    ]
    return "\n".join(
        "  ".join(f"{row[column]:>10}" for column in columns) + f"  {row[0]}" for row in kernels[:KERNELS]
    )


def environment() -> dict[str, Any]:
    """Return versions, device, commit and date of a measurement."""
    import torch

    folder = str(Path(megalith.__file__).parent)
    commit = subprocess.run(
        ["git", "-C", folder, "log", "-1", "--format=%h", "--", "."], capture_output=True, text=True
    )
    return {
        "launch_us": host_launch() if torch.cuda.is_available() else None,
        "megalith": megalith.__version__,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": commit.stdout.strip() or None,
        "date": datetime.now().isoformat(timespec="seconds"),
    }


@cache
def host_launch() -> float | None:
    """Return the host's microseconds per kernel launch, measured by another process so that this one uses no GPU.

    None if that process fails.
    """
    program = "from megalith.hardware import launch_microseconds; print(launch_microseconds('cuda:0'))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return round(float(result.stdout), 2) if result.returncode == 0 else None


if __name__ == "__main__":
    main()
