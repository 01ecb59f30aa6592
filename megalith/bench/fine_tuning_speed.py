"""Speed of fine-tuning compared with pre-training: `megalith bench finetune llama3.2-1b`.

Measures one model in pre-training on full sequences, SFT on packed rows of that length, GRPO's training phase on packed
rollouts from a file, and SFT with one padded sample per row. Sample lengths are lognormal (median 350, σ 0.9, at most
4,096) with a fixed seed. Tokens/s exclude padding, so the ratio of packed to padded tokens/s is also the ratio of
samples/s. The speed of padding each batch of eight to its longest sample is computed from pre-training's tokens/s, not
measured.

`--runs lora` trains adapters (rank 16 on every linear) over random weights from a Hugging Face folder that is written
first, and `--runs qlora` trains them over the same weights in NF4 (lora.quantize_base; `--quantize-base` chooses
another); `--peer peft peft-liger` does the same with PEFT, on the same GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalith.bench.bench_options import add_result_options, workload_parser
from megalith.bench.peers import build_hugging_face, model_run
from megalith.bench.training_speed import PEERS, measure, measure_peer, show
from megalith.bench.workloads import WORKLOADS
from megalith.rl.rollouts.rollouts import PromptGroup, RatedCompletion, Rollouts, save_rollouts

MEDIAN, SIGMA, LONGEST, SEED = 350, 0.9, 4096, 1234
GROUP, PROMPT = 8, 64  # completions, tokens
PADDED_TOGETHER = 8  # samples
RUNS = ("pretrain", "packed", "grpo", "padded", "lora", "qlora")
DEFAULT_RUNS = RUNS[:4]
RATE = "tokens_per_second_per_device"


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=DEFAULT_RUNS)
    parser.add_argument("--quantize-base", default="nf4", help="lora.quantize_base of qlora (default: nf4)")
    parser.add_argument("--batch", type=int, help="rows per step (default: the workload's)")
    parser.add_argument("--micro", type=int, default=2, help="rows per micro-batch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--peer", choices=PEERS, nargs="+", default=[])
    add_result_options(parser)
    args = parser.parse_args()
    args.kernels, args.losses, args.layout = False, False, ["one"]
    args.set.append(f"train.micro_batch_size={args.micro}")
    config = model_run(args.workload, [each for each in args.set if each.startswith(("model.", "data."))])
    length, vocab = config.data.seq_length, config.model.vocab_size
    rows, result = args.batch or WORKLOADS[args.workload]["batch"], {}
    with tempfile.TemporaryDirectory() as folder:
        for run in args.runs:
            result[run] = RUN[run](args, Path(folder), rows, length, vocab)
            show(args, run, result[run])
    for peer in args.peer:
        result[peer] = measure_peer(args, peer)
        show(args, peer, result[peer])
    print_ratios({run: figures for run, figures in result.items() if RATE in figures}, length)


def lengths(count: int, longest: int) -> np.ndarray:
    """Return the number of tokens of each sample, int64 [count]."""
    samples = np.random.default_rng(SEED).lognormal(np.log(MEDIAN), SIGMA, count)
    return samples.astype(np.int64).clip(2, min(LONGEST, longest))


def pretrain(args: argparse.Namespace, folder: Path, rows: int, length: int, vocab: int) -> dict[str, Any]:
    return measure(args, "one", {"mock": True})


def sft(
    args: argparse.Namespace, folder: Path, rows: int, length: int, vocab: int, packing: bool
) -> dict[str, Any]:
    path, rng = folder / "samples.jsonl", np.random.default_rng(SEED)
    per_row = 2 * length // int(lengths(10_000, length).mean()) if packing else 1
    with path.open("w", encoding="utf-8") as file:
        for count in lengths(args.steps * rows * per_row, length):
            file.write(json.dumps({"input_ids": rng.integers(vocab, size=count).tolist()}) + "\n")
    data = {"train_data_path": str(path), "seq_length": length}
    return measure(args, "one", data, "sft", {"sft": {"packing": packing}})


def grpo(args: argparse.Namespace, folder: Path, rows: int, length: int, vocab: int) -> dict[str, Any]:
    """Measure only the optimizer steps of GRPO, one per rollout batch. The completions fill the rows."""
    path, rng = folder / "rollouts.jsonl.zst", np.random.default_rng(SEED)
    batch = int(rows * length / lengths(10_000, length).mean()) // GROUP * GROUP or GROUP
    groups = []
    for group in lengths(args.steps * batch, length).reshape(-1, GROUP):
        completions = [
            RatedCompletion(
                rng.integers(vocab, size=max(1, count - PROMPT)),
                rng.integers(2, size=1).astype(float),
                -rng.random(max(1, count - PROMPT), dtype=np.float32),
            )
            for count in group
        ]
        groups.append(PromptGroup(rng.integers(vocab, size=PROMPT), completions))
    save_rollouts(path, Rollouts(groups, ["random"]))
    rl = {"rollouts": str(path), "packing": True, "vllm_importance_sampling_mode": "token_truncate"}
    sections = {"rl": rl, "train": {"global_batch_size": batch}}
    return measure(args, "one", {"seq_length": length}, "grpo", sections)


def lora(
    args: argparse.Namespace, folder: Path, rows: int, length: int, vocab: int, quantizes: bool = False
) -> dict[str, Any]:
    settings = [each for each in args.set if each.startswith("model.")]
    if WORKLOADS[args.workload]["model"].get("moe_router_force_load_balancing"):  # no published model has it
        settings.append("model.moe_router_force_load_balancing=false")
    config = model_run(args.workload, settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not (folder / "base").exists():
        base = build_hugging_face(config.model, device, torch.bfloat16)
        base.save_pretrained(folder / "base")
        del base
        torch.cuda.empty_cache()
    settings, args.set = args.set, [each for each in args.set if not each.startswith("model.")]
    try:
        model = {**dict.fromkeys(WORKLOADS[args.workload]["model"]), "init_from": str(folder / "base")}
        if "moe_router_force_load_balancing" in model:
            model["moe_router_force_load_balancing"] = False
        sections = {"model": model, "lora": {"rank": 16, "alpha": 32}}
        if quantizes:
            sections["lora"]["quantize_base"] = args.quantize_base
        return measure(args, "one", {"mock": True, "seq_length": length}, "train", sections)
    finally:
        args.set = settings


RUN = {
    "pretrain": pretrain,
    "packed": partial(sft, packing=True),
    "padded": partial(sft, packing=False),
    "grpo": grpo,
    "lora": lora,
    "qlora": partial(lora, quantizes=True),
}


def print_ratios(result: dict[str, dict[str, Any]], length: int) -> None:
    """Print the measured ratios, each with its target."""
    rate = {run: figures[RATE] for run, figures in result.items()}
    for run, target in (("packed", 0.95), ("grpo", 0.9)):
        if {run, "pretrain"} <= set(rate):
            print(f"{run} / pretrain: {rate[run] / rate['pretrain']:.3f} of tokens/s (target {target})")
    if {"packed", "padded"} <= set(rate):
        print(f"packed / padded to {length}: {rate['packed'] / rate['padded']:.2f} × samples/s (target 1.8)")
    if {"packed", "pretrain"} <= set(rate):
        batches = lengths(8000, length).reshape(-1, PADDED_TOGETHER)
        full = batches.mean() / batches.max(1).mean()
        share = rate["packed"] / (rate["pretrain"] * full)
        print(
            f"packed / padded to the longest of {PADDED_TOGETHER}, counted: {share:.2f} × samples/s (target 1.8)"
        )
    if {"lora", "qlora"} <= set(rate):
        memory = [result[run].get("max_memory_gb") for run in ("qlora", "lora")]
        print(
            f"qlora / lora: {rate['qlora'] / rate['lora']:.2f} × tokens/s (target 0.9), GB {memory} (target 0.55)"
        )
    for peer in set(rate) & {"peft", "peft-liger"}:
        if "lora" in rate:
            memory = [result[run].get("max_memory_gb") for run in ("lora", peer)]
            print(f"lora / {peer}: {rate['lora'] / rate[peer]:.2f} × tokens/s (target 1.15), GB {memory}")


if __name__ == "__main__":
    main()
