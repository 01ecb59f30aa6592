"""Optimizers compared: state per parameter, time of an update, and loss after a short training on mock data.

    megalith bench optimizers                                    a Transformer of 0.5M parameters, 100 steps
    megalith bench optimizers --factors 0.3 1 3                  also at other learning rates
    megalith bench optimizers --steps 50 --only muon lion model.hidden_size=256

Every optimizer trains the same model on the same samples with a short warm-up and a constant rate from the table RATES.
The time is that of the update without the passes, the median of all steps. Schedule-free AdamW's loss is that of its
averaged weights. The table is in docs/optimizers.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megalith.bench.timing import synchronize
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.loader import Loader
from megalith.data.mock_datasets import MockDataset
from megalith.hardware import pick_device
from megalith.optim.moments import Moment
from megalith.optim.schedule import build_schedule
from megalith.parallel.mesh import build_mesh
from megalith.training.build import resolve_config
from megalith.training.custom_loop import Optimizer, parallelize

RATES = {
    "adamw": 3e-3,
    "adam": 3e-3,
    "sgd": 0.3,
    "muon": 3e-3,
    "normuon": 3e-3,
    "lion": 5e-4,
    "ademamix": 3e-3,
    "adafactor": 1e-1,
    "schedule_free_adamw": 1e-2,
}
"""Learning rates by name; `normuon` is Muon with `muon_moment2_method: normuon`."""

DEFAULTS = {
    "model.num_layers": 2,
    "model.hidden_size": 128,
    "model.num_attention_heads": 4,
    "model.vocab_size": 257,
    "model.position_embedding_type": "rope",
    "model.swiglu": True,
    "model.normalization": "RMSNorm",
    "model.add_bias_linear": False,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "data.seq_length": 64,
    "data.mock": True,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 8,
    "optim.lr_decay_style": "constant",
    "optim.weight_decay": 0.1,
    "optim.adam_beta2": 0.95,
    "runtime.compile": False,
}
HELD_OUT = 8  # batches


@dataclass(frozen=True)
class Row:
    """Results of one optimizer."""

    name: str
    lr: float
    state_bytes: float
    """Bytes of state per parameter."""
    milliseconds: float
    """Median time of an update."""
    loss: float
    """Mean loss on held-out samples after training."""


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[1.0], help="factors on the learning rates"
    )
    parser.add_argument("--only", nargs="+", choices=RATES, default=list(RATES), metavar="NAME")
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    base = RunConfig.load(None, args.settings)
    unset = {path: value for path, value in DEFAULTS.items() if not is_set(base, path)}
    print("| optimizer | lr | bytes of state per parameter | update, ms | loss |\n|---|---|---|---|---|")
    for name in args.only:
        for factor in args.factors:
            row = measure(base.with_settings(unset), name, args.steps, factor * RATES[name])
            print(
                f"| {row.name} | {row.lr:g} | {row.state_bytes:.2f} | {row.milliseconds:.1f} | {row.loss:.3f} |",
                flush=True,
            )
    return 0


def measure(config: RunConfig, name: str, steps: int, lr: float) -> Row:
    """Train with the optimizer `name` of RATES for some steps and return its results."""
    settings = {
        "optim.optimizer": "muon" if name == "normuon" else name,
        "optim.lr": lr,
        "optim.muon_moment2_method": "normuon" if name == "normuon" else "none",
        "optim.lr_warmup_iters": max(steps // 10, 1),
        "train.train_iters": steps,
    }
    config = resolve_config(config.with_settings(settings), None)
    device = pick_device(config.runtime.device, 0)
    mesh = build_mesh(config.parallel, 1, device.type, has_experts=config.model.num_experts is not None)
    optimizer = Optimizer(parallelize(config, mesh, device), config.optim, config.train.precision)
    schedule, batch = build_schedule(config.optim, config.train), config.train.global_batch_size
    times = []
    for step, micro_batch in enumerate(_batches(config, steps, seed=0)):
        optimizer.model.backward([micro_batch], loss_scale=optimizer.loss_scale.scale)
        synchronize(device)
        start = time.perf_counter()
        optimizer.step(schedule.learning_rate(step, step * batch))
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    with optimizer.averaged_weights():
        sums = [optimizer.model.evaluate([each]) for each in _batches(config, HELD_OUT, seed=1)]
    loss = sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)
    parameters = sum(parameter.numel() for _, parameter in optimizer.model.parameters.named)
    return Row(
        name,
        lr,
        _state_bytes(optimizer.optimizer) / parameters,
        statistics.median(times),
        loss.item(),
    )


def _batches(config: RunConfig, count: int, seed: int) -> Iterator[Batch]:
    size, length = config.train.global_batch_size, config.data.seq_length
    dataset = MockDataset(config.model.vocab_size, length, count * size, seed)
    return iter(
        Loader(dataset, micro_batch_size=size, batch_sizes=[size] * count, vocab_size=config.model.vocab_size)
    )


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, (torch.Tensor, Moment)))


def is_set(config: RunConfig, path: str) -> bool:
    """Return True if the configuration sets `path`, section.key, itself."""
    section, _, key = path.partition(".")
    return key in getattr(config, section).model_fields_set


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
