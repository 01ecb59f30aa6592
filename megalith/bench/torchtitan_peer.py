"""torchtitan's trainer on random tokens, as a peer of `megalith bench`.

    torchrun --nproc-per-node 4 -m megalith.bench.torchtitan_peer llama3-8b --batch 2 --steps 15 --reshard never

The model, its parallelization, optimizer and step are torchtitan's (`pip install torchtitan`); only the tokenizer and
the data loader are replaced. Prints one line of JSON, as peers.py does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megalith.bench.peers import add_switches, model_run
from megalith.config import RunConfig

MODELS = {  # workload: torchtitan's model and flavor
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
}
DEGREES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=MODELS)
    parser.add_argument("--batch", type=int, required=True, help="sequences per data-parallel rank and step")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=5)
    for name in DEGREES:
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="section.key=value", help="settings of model and data"
    )
    add_switches(parser)
    args = parser.parse_args()
    run = model_run(args.workload, args.set)
    model, flavor = MODELS[args.workload]
    if not torch.cuda.is_available():
        raise SystemExit("the torchtitan peer needs GPUs")
    # Before the import in specialize: torchtitan's parser takes sys.argv when its module is loaded.
    sys.argv = ["torchtitan", *options(args, model, flavor, run)]
    specialize(model, flavor, run.model)
    times = train(args.steps)
    if os.environ["RANK"] == "0":
        time_ms = statistics.median(times[args.warmup :])
        ranks = int(os.environ["WORLD_SIZE"])
        tokens = args.batch * run.data.seq_length * (ranks // (args.tp * args.cp * args.pp))
        figures = {
            "step_time_ms": time_ms,
            "tokens_per_second_per_device": tokens / ranks / time_ms * 1e3,
            "max_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
        print(json.dumps(figures), flush=True)


def options(args: argparse.Namespace, model: str, flavor: str, run: RunConfig) -> list[str]:
    """Return torchtitan's command line."""
    replicas = int(os.environ["WORLD_SIZE"]) // (args.tp * args.cp * args.pp)
    result = ["--model.name", model, "--model.flavor", flavor, "--training.steps", str(args.steps)]
    result += ["--training.seq_len", str(run.data.seq_length)]
    result += ["--training.local_batch_size", str(args.batch // args.micro_batches)]
    result += ["--training.global_batch_size", str(args.batch * replicas)]
    result += ["--activation_checkpoint.mode", args.recompute]
    result += ["--parallelism.fsdp_reshard_after_forward", args.reshard]
    for name, word in DEGREES.items():
        result += [f"--parallelism.{word}_parallel_degree", str(getattr(args, name))]
    if run.model.moe_router_force_load_balancing:
        result.append("--debug.moe_force_load_balance")
    if args.fp8:
        result += fp8_options(args.fp8)
    return result if args.compile is False else [*result, "--compile.enable"]


def fp8_options(recipe: str) -> list[str]:
    """Return torchtitan's FP8 options as its guide gives them. The output layer stays in bf16."""
    prefix = "--quantize.linear.float8"
    result = ["--model.converters", "quantize.linear.float8", f"{prefix}.filter_fqns", "output"]
    if recipe == "rowwise":  # which torchao does not combine with FP8 all-gathers
        return [*result, f"{prefix}.recipe_name", recipe]
    return [
        *result,
        f"{prefix}.enable_fsdp_float8_all_gather",
        f"{prefix}.precompute_float8_dynamic_scale_for_fsdp",
    ]


def specialize(model: str, flavor: str, config: Any) -> None:
    """Give torchtitan's model our vocabulary and depth, PyTorch's causal attention, and random tokens."""
    if importlib.util.find_spec("datasets") is None:  # which torchtitan imports for its own loaders
        stub = types.ModuleType("datasets")
        stub.Dataset, stub.load_dataset = object, None
        stub.distributed = types.ModuleType("datasets.distributed")
        stub.distributed.split_dataset_by_node = None
        sys.modules |= {"datasets": stub, "datasets.distributed": stub.distributed}
    package = importlib.import_module(f"torchtitan.models.{model}")
    import torchtitan.train

    spec = package.get_train_spec()
    sizes = spec.model_args[flavor]
    sizes.vocab_size, sizes.n_layers = config.padded_vocab_size, config.num_layers
    if hasattr(sizes, "attn_type"):
        sizes.attn_type, sizes.attn_mask_type = "sdpa", "causal"

    def loader(dp_world_size: int, dp_rank: int, tokenizer: None, job_config: Any, **other: Any) -> Any:
        training = job_config.training
        return random_tokens(dp_rank, training.local_batch_size, training.seq_len, config.vocab_size)

    spec = replace(spec, build_tokenizer_fn=None, build_dataloader_fn=loader, build_validator_fn=None)
    torchtitan.train.train_spec_module.get_train_spec = lambda name: spec


def random_tokens(rank: int, rows: int, seq_length: int, vocab_size: int) -> Any:
    from torchtitan.components.dataloader import BaseDataLoader

    class RandomTokens(BaseDataLoader):
        def __iter__(self) -> Iterator[tuple[dict, torch.Tensor]]:
            generator = torch.Generator().manual_seed(rank)
            while True:
                ids = torch.randint(vocab_size, (rows, seq_length + 1), generator=generator)
                yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()

        def state_dict(self) -> dict:
            return {}

        def load_state_dict(self, state: dict) -> None:
            pass

    return RandomTokens()


def train(steps: int) -> Sequence[float]:
    """Run torchtitan's main. Returns the milliseconds of each step."""
    import torchtitan.train

    times: list[float] = []
    step = torchtitan.train.Trainer.train_step

    def timed(self: Any, batches: Any) -> Any:
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = step(self, batches)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
        return result

    torchtitan.train.Trainer.train_step = timed
    torchtitan.train.main(torchtitan.train.Trainer)
    return times


if __name__ == "__main__":
    main()
