"""Optimizers compared: state per parameter, time of an update, and loss after a short training on mock data.

    megalith bench optimizers                                    a Transformer of 0.5M parameters, 100 steps
    megalith bench optimizers --factors 0.3 1 3                  also at other learning rates
    megalith bench optimizers --steps 50 --only muon lion model.hidden_size=256
    torchrun --nproc-per-node 4 -m megalith.bench.optimizer_speed --steps 8 --only adamw muon -- \
        model.preset=llama3-8b data.seq_length=8192 train.global_batch_size=32 train.micro_batch_size=1 \
        train.precision=bf16 runtime.compile=true parallel.data_parallel_sharding_strategy=optim_grads_params

Every optimizer trains the same model on the same samples with a short warm-up and a constant rate from the table RATES.
The time is the median time of an update over all steps, without forward and backward passes; its share of the step's
time is printed too. The loss of schedule-free AdamW is computed with its averaged weights. The table is in
docs/optimizers.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megalith.bench.text_model import TEXT_MODEL, with_defaults
from megalith.bench.timing import synchronize
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.loader import Loader
from megalith.data.mock_datasets import MockDataset
from megalith.launch.launcher import this_process
from megalith.optim.moments import Moment
from megalith.optim.schedule import build_schedule
from megalith.parallel.mesh import Mesh
from megalith.training.build import resolve_config
from megalith.training.custom_loop import Optimizer, init_mesh, parallelize

RATES = {
    "adamw": 3e-3,
    "adam": 3e-3,
    "sgd": 0.3,
    "muon": 3e-3,
    "normuon": 3e-3,
    "adamuon": 3e-4,
    "soap": 3e-3,
    "lion": 5e-4,
    "ademamix": 3e-3,
    "adafactor": 1e-1,
    "schedule_free_adamw": 1e-2,
}
"""Learning rates by name; `normuon` and `adamuon` are Muon with this `muon_moment2_method`."""
MUON_METHODS = ("normuon", "adamuon")

DEFAULTS = {
    **TEXT_MODEL,
    "model.num_layers": 2,
    "model.hidden_size": 128,
    "model.num_attention_heads": 4,
    "data.seq_length": 64,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 8,
    "optim.lr_decay_style": "constant",
    "optim.weight_decay": 0.1,
}
SHAPE = [path for path in DEFAULTS if path.startswith("model.") and not path.endswith("dropout")]
"""Defaults that a preset replaces."""
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
    share: float
    """Fraction of the step's time that the update takes."""
    loss: float
    """Mean loss on held-out samples after training."""


def main(arguments: list[str]) -> int:
    """Train with each optimizer, and print a table of losses and times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--factors",
        type=float,
        nargs="+",
        default=[1.0],
        help="multiply the learning rates by each of these factors",
    )
    parser.add_argument("--only", nargs="+", choices=RATES, default=list(RATES), metavar="NAME")
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    base = RunConfig.load(None, args.settings)
    shape = SHAPE if base.model.preset is not None else ()
    defaults = {path: value for path, value in DEFAULTS.items() if path not in shape}
    base = resolve_config(with_defaults(base, defaults), None)
    has_experts = base.model.num_experts is not None
    mesh, device = init_mesh(base.parallel, base.runtime.device, has_experts=has_experts)
    is_first = this_process().is_first
    if is_first:
        print("| optimizer | lr | bytes of state per parameter | update, ms | share, % | loss |")
        print("|---|---|---|---|---|---|")
    for name in args.only:
        for factor in args.factors:
            row = measure(base, mesh, device, name, args.steps, factor * RATES[name])
            cells = [row.name, f"{row.lr:g}", f"{row.state_bytes:.2f}", f"{row.milliseconds:.1f}"]
            cells += [f"{100 * row.share:.1f}", f"{row.loss:.3f}"]
            if is_first:
                print(f"| {' | '.join(cells)} |", flush=True)
    return 0


def measure(config: RunConfig, mesh: Mesh, device: torch.device, name: str, steps: int, lr: float) -> Row:
    """Train with the optimizer `name` of RATES for some steps and return its results."""
    settings = {
        "optim.optimizer": "muon" if name in MUON_METHODS else name,
        "optim.lr": lr,
        "optim.muon_moment2_method": name if name in MUON_METHODS else "none",
        "optim.lr_warmup_iters": max(steps // 10, 1),
        "train.train_iters": steps,
    }
    config = config.with_settings(settings)
    optimizer = Optimizer(parallelize(config, mesh, device), config.optim, config.train.precision)
    schedule, batch = build_schedule(config.optim, config.train), config.train.global_batch_size
    count = batch // (config.train.micro_batch_size * mesh.dp.size)
    loader, times, steps_ms = _batches(config, mesh, steps, seed=0), [], []
    for step in range(steps):
        micro_batches = [next(loader) for _ in range(count)]
        synchronize(device)
        begin = time.perf_counter()
        optimizer.model.backward(micro_batches, loss_scale=optimizer.loss_scale.scale)
        synchronize(device)
        start = time.perf_counter()
        optimizer.step(schedule.learning_rate(step, step * batch))
        synchronize(device)
        end = time.perf_counter()
        times.append(1e3 * (end - start))
        steps_ms.append(1e3 * (end - begin))
    with optimizer.averaged_weights():
        held_out = _batches(config, mesh, HELD_OUT, seed=1)
        sums = [optimizer.model.evaluate([next(held_out) for _ in range(count)]) for _ in range(HELD_OUT)]
    loss = sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)
    parameters = sum(parameter.numel() for _, parameter in optimizer.model.parameters.named)
    return Row(
        name,
        lr,
        _state_bytes(optimizer.optimizer) / parameters,
        statistics.median(times),
        statistics.median(times) / statistics.median(steps_ms),
        loss.item(),
    )


def _batches(config: RunConfig, mesh: Mesh, count: int, seed: int) -> Iterator[Batch]:
    size, length = config.train.global_batch_size, config.data.seq_length
    dataset = MockDataset(config.model.vocab_size, length, count * size, seed)
    return iter(
        Loader(
            dataset,
            micro_batch_size=config.train.micro_batch_size,
            batch_sizes=[size] * count,
            vocab_size=config.model.vocab_size,
            data_parallel_rank=mesh.dp.rank,
            data_parallel_size=mesh.dp.size,
        )
    )


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, (torch.Tensor, Moment)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
