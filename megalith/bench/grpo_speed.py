"""GRPO steps by phase, and the training phase compared with pre-training at the same packed length.

    megalith bench grpo llama3.2-1b --nproc 2
    megalith bench grpo tiny --nproc 2 --prompts 4 --generations 4 --prompt 16 --tokens 48 --packed 96 --micro 1

A step samples `--prompts` × `--generations` completions and trains on them. Random weights never emit an end token, so
lengths are forced: prompt and completion together have `--tokens` tokens, or with `--spread` the lengths of completions
are spread evenly from a quarter of the maximum to all of it. Pre-training is `megalith train` on the same number of
synthetic rows of `--packed` tokens. Prints medians over the steps after the first two as a line of JSON. The reward is
1 if the first token is odd.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

import megalith
from megalith.bench.bench_options import append_result
from megalith.bench.generation_speed import SHAPES
from megalith.bench.training_speed import environment, run_logged
from megalith.config import RunConfig
from megalith.generation.engine import Engine

WARMUP = 2  # steps excluded from the figures
RUN = "run"  # first argument of the processes that run a part


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of prompt and completion together")
    parser.add_argument(
        "--spread",
        action="store_true",
        help="draw completion lengths from a quarter of the maximum to the maximum",
    )
    parser.add_argument("--packed", type=int, default=4096, help="tokens per row in the trainer")
    parser.add_argument("--micro", type=int, default=4, help="rows per micro-batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value")
    parser.add_argument("--part", choices=("grpo", "train"), nargs="+", default=["grpo", "train"])
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"shape": args.shape, "nproc": args.nproc, "set": args.set}
    result |= {name: getattr(args, name) for name in ("prompts", "generations", "tokens", "packed", "micro")}
    result["lengths"] = "a quarter to all of the room" if args.spread else "all of the room"
    for part in args.part:
        result[part] = run_part(args, part)
    grpo, train = result.get("grpo", {}), result.get("train", {})
    if "training_tokens_per_second" in grpo and "tokens_per_second" in train:
        result["training_share"] = grpo["training_tokens_per_second"] / train["tokens_per_second"]
    print(json.dumps(result | environment()), flush=True)
    append_result(args.results, result | environment())


def run(part: str, run_file: str, longest: str, spread: str) -> None:
    """Run this process's rank of `part`, which is grpo or train."""
    config = RunConfig.load(run_file)
    if part == "train":
        megalith.train(config)
        return
    generate, max_length = Engine.generate, int(longest)

    def generate_forced(engine, prompts, sampling, *, num_generations=1, **options):
        count = len(prompts) * num_generations
        lengths = [max_length] * count
        if int(spread):
            lengths = [max(1, max_length * (count + 3 * i) // (4 * count)) for i in range(count)]
            random.Random(0).shuffle(lengths)
        if num_generations > 1:  # not the canary's single completion
            sampling = dataclasses.replace(sampling, forced_lengths=lengths)
        return generate(engine, prompts, sampling, num_generations=num_generations, **options)

    Engine.generate = generate_forced
    megalith.grpo(config, reward_funcs=odd)


def odd(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(ids[0] % 2) for ids in completion_ids]


def run_part(args: argparse.Namespace, part: str) -> dict[str, Any]:
    """Run grpo or train in new processes. Returns its figures, or under `failed` the end of its output."""
    with tempfile.TemporaryDirectory() as folder:
        tree, output = run_tree(args, part, Path(folder)), Path(folder) / "run"
        for setting in args.set:
            name, _, value = setting.partition("=")
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = yaml.safe_load(value)
        (Path(folder) / "run.yaml").write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(args.nproc), "-m", "megalith.bench.grpo_speed", RUN, part, f"{folder}/run.yaml"]
        command += [str(args.tokens - args.prompt), str(int(args.spread))]
        returncode, printed = run_logged(command, Path(folder) / "printed.txt")
        if returncode or not (output / "metrics.jsonl").exists():
            return {"failed": f"failed with {returncode}: {printed[-3000:]}"}
        steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps[WARMUP:])

    memory = steps[-1].get("max_memory_gb")
    if part == "train":
        return {"tokens_per_second": median("tokens_per_second_per_device"), "max_memory_gb": memory}
    phases = {name: median(name) for name in steps[-1] if name.startswith("time_")}
    seconds = [sum(step[name] for name in phases) for step in steps[WARMUP:]]
    tokens = [  # of prompts and completions, on each rank
        step["tokens_per_second_per_device"] * all_ / step["time_training"]
        for step, all_ in zip(steps[WARMUP:], seconds)
    ]
    names = ("completion_length", "drift_canary", "sync_gb_per_second", "memory_engine_gb",
             "tokens_per_second_per_device")  # fmt: skip
    largest = {
        name: max(step[name] for step in steps if name in step) for name in ("mismatch", "drift_largest")
    }
    return (
        {
            "step_s": statistics.median(seconds),
            **phases,
            "training_tokens_per_second": statistics.median(tokens),
        }
        | {name: steps[-1].get(name) for name in names}
        | largest
        | {"steps": len(steps), "max_memory_gb": memory, "steps_s": [round(s, 2) for s in seconds]}
    )


def run_tree(args: argparse.Namespace, part: str, folder: Path) -> dict[str, Any]:
    """Return the run file for a part: GRPO on random prompts, or pre-training on as many rows."""
    model = dict(SHAPES[args.shape]) | ({"vocab_size": 128256} if "llama" in args.shape else {})
    count = args.prompts * args.generations
    rows = -(-count // (args.packed // (args.tokens - 1)))
    rng, prompts = random.Random(0), folder / "prompts.jsonl"
    vocab = model.get("vocab_size", 151_000)
    texts = [
        " ".join(str(rng.randrange(vocab - 1)) for _ in range(args.prompt)) for _ in range(args.prompts * 8)
    ]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    together = args.micro * args.nproc
    sizes = {"grpo": count, "train": -(-rows // together) * together}
    tree: dict[str, Any] = {
        "model": model,
        "data": {"seq_length": args.packed, "tokenizer_type": "NullTokenizer"},
        "optim": {"lr": 1e-6, "lr_decay_style": "constant"},
        "checkpoint": {"save_at_end": False},
        "train": {
            "micro_batch_size": args.micro,
            "global_batch_size": sizes[part],
            "precision": args.precision,
            "train_iters": args.steps,
            "eval_iters": 0,
            "output_dir": str(folder / "run"),
        },
    }
    if part == "train":
        tree["data"]["mock"] = True
        return tree
    tree["rl"] = {
        "prompts": str(prompts),
        "reward_funcs": "odd",  # replaced by the function
        "num_generations": args.generations,
        "max_completion_length": args.tokens - args.prompt,
        "max_prompt_length": args.prompt,
        "packing": True,
    }
    return tree


if __name__ == "__main__":
    run(*sys.argv[2:]) if sys.argv[1:2] == [RUN] else main()
