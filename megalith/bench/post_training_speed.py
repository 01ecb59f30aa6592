"""Cost of post-training methods compared with their parts: `megalith bench posttrain llama3.2-1b`.

    distill   a step, compared with an SFT step plus the teacher's forward pass (target 1.15)
    kto       a step, compared with an SFT step plus its three forward passes, and tokens/s compared with SFT's
    orpo      tokens/s compared with SFT's
    reward    scoring completions with a reward model of `rl.reward_models`, compared with its forward pass (target 1.1)

All models have the same shape and random weights, and all rows are full. A round runs one step of each method, so other
programs on the machine slow all methods equally. Figures are medians over the rounds after the warm-up. Times are wall
times on a GPU, and CPU times of the process on a CPU. Everything runs in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from megalith.bench.bench_options import add_result_options, append_result, workload_parser
from megalith.bench.peers import build_hugging_face, model_run
from megalith.bench.training_speed import environment
from megalith.bench.workloads import WORKLOADS
from megalith.config import RunConfig
from megalith.parity.job import start
from megalith.rl.distill import DistillationTask
from megalith.rl.dpo import PreferenceTask
from megalith.rl.kto import KtoTask
from megalith.rl.rewards.model_rewards import RewardModel
from megalith.rl.rewards.scored_text import ScoredText
from megalith.rl.rollouts.prompts import Prompt
from megalith.training.run_state import Run, Task

SEED = 1234
TASKS: dict[str, type[Task] | None] = {
    "sft": None, "distill": DistillationTask, "kto": KtoTask, "orpo": PreferenceTask
}  # fmt: skip
SECTIONS: dict[str, dict[str, Any]] = {
    "sft": {"sft": {"enabled": True, "packing": False}},
    "distill": {"sft": {"enabled": True, "packing": False}, "distill": {"kd_ratio": 1.0}},
    "kto": {"kto": {"enabled": True}},
    "orpo": {"dpo": {"enabled": True, "loss_type": "orpo"}},
}
METHODS = (*TASKS, "reward")


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS[1:], default=METHODS[1:])
    parser.add_argument("--batch", type=int, default=8, help="rows per step, an even number")
    parser.add_argument("--micro", type=int, default=2, help="rows per micro-batch, an even number")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    add_result_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        acts, tokens = build_acts(args, Path(folder), stack)
        times: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(args.rounds):
            for name, act in acts.items():
                times[name].append(timed(act))
    seconds = {name: statistics.median(values[args.warmup :]) for name, values in times.items()}
    result = {"workload": args.workload, "batch": args.batch, "micro": args.micro, "set": args.set}
    result |= {"seconds": seconds, "sft_tokens_per_second": tokens / seconds["sft"]} | ratios(seconds)
    print(json.dumps(result | environment()), flush=True)
    append_result(args.results, result | environment())


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Return the ratios of the measured methods, computed from the seconds of steps and forward passes."""
    sft, forward = seconds["sft"], seconds["forward"]
    figures = {}
    if "distill" in seconds:
        figures["distill_over_sft_and_forward"] = seconds["distill"] / (sft + forward)
    if "kto" in seconds:
        figures["kto_over_sft_and_forwards"] = seconds["kto"] / (sft + 3 * forward)
        figures["kto_tokens_per_second_over_sft"] = sft / seconds["kto"]
    if "orpo" in seconds:
        figures["orpo_tokens_per_second_over_sft"] = sft / seconds["orpo"]
    if "reward" in seconds:
        figures["reward_over_forward"] = seconds["reward"] / seconds["reward_forward"]
    return figures


def build_acts(
    args: argparse.Namespace, folder: Path, stack: ExitStack
) -> tuple[dict[str, Callable[[], Any]], int]:
    """Return the functions to time, by name, and the tokens per step."""
    config = model_run(args.workload, [each for each in args.set if each.startswith(("model.", "data."))])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = build_hugging_face(config.model, device)
    base.save_pretrained(folder / "base")
    del base
    length = config.data.seq_length
    write_records(folder, args.batch * args.rounds, length, config.model.vocab_size)
    runs = {
        name: start(run_config(args, folder, name, length), TASKS[name] and TASKS[name]())
        for name in ("sft", *(name for name in args.methods if name in TASKS))
    }
    acts: dict[str, Callable[[], Any]] = {}
    for name, run in runs.items():
        batches = stack.enter_context(run.data.train_loader(0, 0, run.device))
        acts[name] = lambda run=run, batches=batches: run.train_step(batches).loss.item()
    sft = runs["sft"]
    with sft.data.train_loader(0, 0, sft.device) as batches:
        step = [next(batches) for _ in range(args.batch // args.micro)]
    acts["forward"] = lambda: [x.sum().item() for x in sft.model.all_logprobs(step)]
    if "reward" in args.methods:
        acts |= reward_acts(args, folder, sft, length, config.model.vocab_size)
    return acts, args.batch * length


def run_config(args: argparse.Namespace, folder: Path, method: str, length: int) -> RunConfig:
    """Return the configuration of a method's run."""
    pairs = 2 if method == "orpo" else 1
    tree = {
        "model": {"init_from": str(folder / "base"), "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "data": {"train_data_path": str(folder / f"{method}.jsonl"), "seq_length": length, "num_workers": 0,
                 "tokenizer_type": "NullTokenizer"},
        "optim": {"lr": 1e-5},
        "train": {"train_iters": args.rounds, "global_batch_size": args.batch // pairs, "micro_batch_size":
                  args.micro // pairs, "output_dir": str(folder / method),
                  "precision": WORKLOADS[args.workload]["precision"]},
    }  # fmt: skip
    sections = SECTIONS[method]
    if method == "distill":
        sections = sections | {"distill": sections["distill"] | {"teacher": str(folder / "base")}}
    settings = [each.partition("=") for each in args.set if not each.startswith(("model.", "data."))]
    config = RunConfig.from_tree(tree | sections)
    return config.with_settings({name: json.loads(value) for name, _, value in settings})


def write_records(folder: Path, count: int, length: int, vocab: int) -> None:
    """Write the records of all methods. Prompts take a quarter of the row, and answers the rest."""
    rng, prompt = np.random.default_rng(SEED), length // 4
    ids = rng.integers(1, vocab, size=(count, length)).tolist()
    start_of = [one[:prompt] for one in ids]
    rows = {
        "sft": [{"input_ids": one, "labels": [-100] * prompt + one[prompt:]} for one in ids],
        "kto": [
            {"prompt_ids": first, "completion_ids": one[prompt:], "label": number % 2 == 0}
            for number, (first, one) in enumerate(zip(start_of, ids))
        ],
        "orpo": [
            {"prompt_ids": start_of[k], "chosen_ids": ids[k][prompt:], "rejected_ids": ids[k + 1][prompt:]}
            for k in range(0, count - 1, 2)
        ],
    }
    rows["distill"] = rows["sft"]
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def reward_acts(
    args: argparse.Namespace, folder: Path, sft: Run, length: int, vocab: int
) -> dict[str, Callable[[], Any]]:
    """Return the functions to time: GRPO's scoring with a reward model, and the reward model's forward pass."""
    path = str(folder / "reward")
    transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "base", num_labels=1, pad_token_id=0
    ).save_pretrained(path)
    model, prompt = RewardModel(sft, path), length // 4
    ids = np.random.default_rng(SEED).integers(1, vocab, size=(args.batch, length)).tolist()
    texts = [
        ScoredText(Prompt(str(k), "", one[:prompt]), one[prompt:], "", True) for k, one in enumerate(ids)
    ]
    model.scores(texts)
    rows = [
        model._batch(ids[at : at + args.micro], args.micro, length) for at in range(0, args.batch, args.micro)
    ]
    return {
        "reward": lambda: model.scores(texts),
        "reward_forward": lambda: [x.sum().item() for x in model._model.all_logprobs(rows)],
    }


def timed(act: Callable[[], Any]) -> float:
    """Return the seconds of a call: wall time on a GPU, the process's CPU time otherwise."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        act()
        torch.cuda.synchronize()
        return time.perf_counter() - begin
    begin = time.process_time()
    act()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
