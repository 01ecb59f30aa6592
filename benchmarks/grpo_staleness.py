"""Speed and reward of GRPO with batches ahead, compared with on-policy training.

    python -m benchmarks.grpo_staleness                                     # two GPUs; 100M parameters, 100 steps a run
    python -m benchmarks.grpo_staleness --small --steps 8 --tuning 60       # two CPU processes, gloo: whether it runs
    python -m benchmarks.grpo_staleness --small --least 0.2 --ahead 0 1     # a server that takes time and no core

Each run is `megalith grpo` from the same fine-tuned policy on the sums of examples/grpo. In `split`, a server of
Megalith's engine (engine_server.py) has the second GPU and the trainer the first, and `--ahead` is the number of
batches ahead. In `colocated`, trainer and engine share both GPUs. Seconds are medians of the steps after the first
five, rewards are means of ten steps. Prints one line of JSON, and each run's on standard error when it ends. The run
with one batch ahead passes if its steps are at least 1.25 × as fast as on-policy steps in the same split, with a mean
reward of the last ten steps at most 0.05 lower.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megalith.bench.bench_options import append_result
from megalith.bench.training_speed import environment, run_logged

EXAMPLES = Path("examples/grpo")
WARMUP, BAR, LESS = 5, 1.25, 0.05
START_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the small example's model, on the CPU")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tuning", type=int, help="steps of the fine-tuning before; absent: the example's")
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2], help="batches, each a run")
    parser.add_argument(
        "--least", type=float, help="seconds that the server's generating takes at least; no colocated run"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="section.key=value",
        help="of the GRPO runs; of model.* the policy's",
    )
    parser.add_argument("--folder", type=Path, help="where the runs stay; absent: nowhere")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = {"steps": args.steps, "set": args.set, "least": args.least, "runs": {}}
        result["model"] = "arithmetic" if args.small else "arithmetic_100m"
        setup = Setup(args, (args.folder or Path(temporary)).absolute())
        setup.tune()
        runs: dict[str, Callable[[], dict[str, Any]]]
        runs = {f"split, {ahead} ahead": partial(setup.split, ahead) for ahead in args.ahead}
        if args.least is None:
            runs["colocated, on policy"] = setup.colocated
        for name, run in runs.items():
            result["runs"][name] = run()
            print(json.dumps({name: result["runs"][name]}), file=sys.stderr, flush=True)
    result |= compared(result["runs"])
    print(json.dumps(result | environment()), flush=True)
    append_result(args.results, result | environment())


class Setup:
    """The runs of one call of the benchmark, in a folder."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.folder, self.steps, self.set, self.tuning = folder, args.steps, args.set, args.tuning
        self.small, self.least = args.small, args.least or 0.0
        self.device, self.method = ("cpu", "gloo") if args.small else ("cuda", "nccl")
        folder.mkdir(parents=True, exist_ok=True)
        sizes = [] if args.small else ["--below", "100", "--count", "400000"]
        subprocess.run([sys.executable, EXAMPLES / "make_sums.py", folder / "data", *sizes], check=True)

    def tree(self, name: str, output: str, **sections: dict[str, Any]) -> dict[str, Any]:
        """An example's run file, in this folder."""
        file = EXAMPLES / f"arithmetic{'' if self.small else '_100m'}{name}.yaml"
        tree = yaml.safe_load(file.read_text())
        sections.setdefault("train", {})["output_dir"] = str(self.folder / output)
        sections["runtime"] = {"device": self.device}
        for section, values in sections.items():
            tree[section] = tree.get(section, {}) | values
        return tree

    def tune(self) -> None:
        tree = self.tree("_sft", "sft", data={"data_path": str(self.folder / "data" / "sums_sft.jsonl")})
        self.add(tree, lambda section: section == "model")
        if self.tuning:
            tree["train"]["train_iters"] = self.tuning
            tree["optim"]["lr_warmup_iters"] = min(tree["optim"]["lr_warmup_iters"], self.tuning // 2)
        self.run("sft", tree, 1, gpus="0")

    def grpo(self, output: str, nproc: int, gpus: str, **rl: Any) -> dict[str, Any]:
        """The figures of a run of GRPO."""
        rl = {"prompts": str(self.folder / "data" / "sums.jsonl"), "log_completions": False} | rl
        more = dict(model={"init_from": str(self.folder / "sft")}, checkpoint={"save_at_end": False}, rl=rl)
        more["train"] = {"train_iters": self.steps}
        more["log"] = {"log_interval": 10}
        tree = self.tree("", output, **more)
        self.add(tree, lambda section: section != "model")
        self.run("grpo", tree, nproc, gpus)
        lines = (self.folder / output / "metrics.jsonl").read_text().splitlines()
        return figures([json.loads(line) for line in lines])

    def add(self, tree: dict[str, Any], takes: Callable[[str], bool]) -> None:
        """Set in `tree` the settings of `--set` whose section `takes` accepts."""
        for setting in self.set:
            name, _, value = setting.partition("=")
            section, _, key = name.partition(".")
            if takes(section):
                tree.setdefault(section, {})[key] = yaml.safe_load(value)

    def split(self, ahead: int) -> dict[str, Any]:
        with self.server() as url:
            return self.grpo(f"split_{ahead}", 1, "0", engine="sglang", engine_url=url, max_staleness=ahead,
                             weight_sync_method=self.method)  # fmt: skip

    def colocated(self) -> dict[str, Any]:
        return self.grpo("colocated", 2, "0,1")

    def run(self, command: str, tree: dict[str, Any], nproc: int, gpus: str) -> None:
        name = Path(tree["train"]["output_dir"]).name
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree))
        words = [sys.executable, "-m"]
        if nproc > 1:
            words += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), "-m"]
        returncode, printed = run_logged(
            [*words, "megalith", command, str(file)],
            self.folder / f"{name}.txt",
            os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
        )
        if returncode:
            raise SystemExit(f"{name} ended with {returncode}: {printed[-3000:]}")

    @contextmanager
    def server(self):
        """The address of one on the second GPU, with the fine-tuned policy."""
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine_server",
            str(self.folder / "sft"),
            "--port",
            str(port),
        ]
        command += ["--device", self.device, "--tokens", "64", "--least", str(self.least)]
        with (self.folder / "server.txt").open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
            )
        try:
            self._wait_for(process, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()

    def _wait_for(self, process: subprocess.Popen, url: str) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise SystemExit(f"the server is not up: {(self.folder / 'server.txt').read_text()[-3000:]}")


def figures(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run from its lines in metrics.jsonl."""
    phases = sorted({name for step in steps for name in step if name.startswith("time_")})
    counted = steps[min(WARMUP, len(steps) - 1) :]

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    def reward(some: list[dict[str, Any]]) -> float:
        return round(statistics.fmean(step["rewards_mean"] for step in some), 4)

    result: dict[str, Any] = {"step_s": median([sum(step.get(n, 0.0) for n in phases) for step in counted])}
    result |= {name: median([step.get(name, 0.0) for step in counted]) for name in phases}
    result["rewards"] = [reward(steps[at : at + 10]) for at in range(0, len(steps), 10)]
    result["reward_at_end"] = reward(steps[-10:])
    ages = ("staleness", "staleness_max", "tokens_dropped", "queue_length")
    return result | {name: steps[-1][name] for name in (*ages, "mismatch") if name in steps[-1]}


def compared(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How much faster each is than on policy in the same split, and whether one batch ahead reaches the bar."""
    base = runs.get("split, 0 ahead")
    if base is None:
        return {}
    speed = {name: round(base["step_s"] / one["step_s"], 3) for name, one in runs.items()}
    result: dict[str, Any] = {"times_as_fast": speed}
    if "split, 1 ahead" in runs:
        rewards = [runs[name]["reward_at_end"] for name in ("split, 1 ahead", "split, 0 ahead")]
        result["reaches_the_bar"] = speed["split, 1 ahead"] >= BAR and rewards[0] >= rewards[1] - LESS
    return result


if __name__ == "__main__":
    main()
