"""Check of µP: how activations and the best learning rate change with the width.

    megalith bench mup                                  coordinate check: widths 64 to 1,024, with and without µP
    megalith bench mup --depths 2 4 8 16                the same over depths (CompleteP)
    megalith bench mup --rates 1e-3 2e-3 4e-3 --plot mup.png      loss over learning rates and widths

The coordinate check (Yang et al. 2022, appendix D.1) trains on one batch for a few steps and prints the root mean
square of each module's output and of the labels' logits. The output matrix starts at 0, as its authors recommend:
random initial values alone would make logits shrink with the width. The exit code is 1 if, with µP, one of these root
mean squares varies by more than the factor `--bound` over widths, or grows by more than that over depths. Over depths
they may shrink, because the random part of a branch does.

Losses are means over the last tenth of the steps, on the bytes of Python's standard library.

The base model has the first width or depth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megalith.bench.corpus_text import TextBytes
from megalith.bench.text_model import TEXT_MODEL, with_defaults
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.loader import Loader
from megalith.data.mock_datasets import MockDataset
from megalith.hardware import pick_device
from megalith.optim.schedule import build_schedule
from megalith.training.build import build_run_mesh, resolve_config
from megalith.training.custom_loop import Optimizer, parallelize

HEAD_DIM = 32
STANDARD, MUP = "standard", "µP"
DEFAULTS: dict[str, Any] = {
    **TEXT_MODEL,
    "model.num_layers": 2,
    "model.untie_embeddings_and_output_weights": True,
    "data.seq_length": 64,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 8,
    "optim.lr_decay_style": "constant",
}


def main(arguments: list[str]) -> int:
    """Print the tables of the check. Return 1 if, with µP, sizes vary with the width by more than the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--depths", type=int, nargs="+", help="numbers of layers, at the first width")
    parser.add_argument("--rates", type=float, nargs="+", help="compare the losses at these learning rates")
    parser.add_argument("--steps", type=int, help="default: 5, or 100 with --rates")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the coordinate check")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--bound", type=float, default=1.1)
    parser.add_argument("--only", choices=(STANDARD, MUP), help="run only this parametrization")
    parser.add_argument("--plot", type=Path, help="PNG file for the losses")
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    sizes = [(args.widths[0], depth) for depth in args.depths or ()] or [
        (width, None) for width in args.widths
    ]
    kinds = [args.only] if args.only else [STANDARD, MUP]
    if args.rates:
        losses = {kind: _sweep(args, kind, sizes) for kind in kinds}
        if args.plot:
            plot(losses, args.plot)
        return 0
    worst = {kind: _check(args, kind, sizes) for kind in kinds}
    return int(worst.get(MUP, 1.0) > args.bound)


def run_config(settings: Sequence[str], kind: str, width: int, depth: int | None, base: tuple) -> RunConfig:
    """Return the configuration of a model of this width and depth. `base` is the size of µP's base model."""
    chosen = dict(DEFAULTS)
    chosen |= {"model.hidden_size": width, "model.ffn_hidden_size": 4 * width}
    chosen |= {"model.num_attention_heads": max(width // HEAD_DIM, 1)}
    chosen |= {"model.init_method_std": (2 * base[0]) ** -0.5}
    if depth:
        chosen["model.num_layers"] = depth
    if kind == MUP:
        chosen |= {"model.use_mup": True, "model.mup_base_hidden_size": base[0]}
        chosen |= {"model.mup_base_head_dim": float(min(base[0], HEAD_DIM))}
        if depth:
            chosen["model.mup_base_num_layers"] = base[1]
    else:
        chosen["model.init_method_std"] = (2 * width) ** -0.5
    return with_defaults(RunConfig.load(None, settings), chosen)


def activation_sizes(config: RunConfig, steps: int, lr: float) -> dict[str, float]:
    """Train on one batch and return the root mean square of each module's output and of the labels' logits."""
    config = config.with_settings({"train.train_iters": steps, "optim.lr": lr})
    size = config.train.global_batch_size
    dataset = MockDataset(config.model.vocab_size, config.data.seq_length, size, config.train.seed)
    optimizer, (batch,) = build(config), _batches(config, dataset)
    model = optimizer.model
    with torch.no_grad():
        model.chunks[0].output_layer.weight.zero_()
    for _ in range(steps):
        model.backward([batch])
        optimizer.step()
    outputs: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: outputs.update({name: output}))
        for name, module in _measured(model.chunks[0])
    ]
    logits = model.eval()(batch.input_ids)
    for handle in handles:
        handle.remove()
    outputs["logits of the labels"] = logits.gather(-1, batch.labels[..., None].to(logits.device))
    return {name: output.float().square().mean().sqrt().item() for name, output in outputs.items()}


def trained_loss(config: RunConfig, steps: int, lr: float) -> float:
    """Train for some steps and return the mean loss of the last tenth of them."""
    settings = {"train.train_iters": steps, "optim.lr": lr, "optim.lr_warmup_iters": max(steps // 10, 1)}
    config = config.with_settings({**settings, "optim.lr_decay_style": "linear"})
    optimizer, schedule = build(config), build_schedule(config.optim, config.train)
    losses, size = [], config.train.global_batch_size
    dataset = TextBytes(config.data.seq_length, steps * size, config.train.seed)
    for step, batch in enumerate(_batches(config, dataset)):
        losses.append(optimizer.model.backward([batch]))
        optimizer.step(schedule.learning_rate(step, step * size))
    last = losses[-max(steps // 10, 1) :]
    return (sum(last) / len(last)).item()


def build(config: RunConfig) -> Optimizer:
    """Return model and optimizer of a configuration."""
    config = resolve_config(config, None)
    device = pick_device(config.runtime.device, 0)
    mesh = build_run_mesh(config, 1, device.type)
    return Optimizer(parallelize(config, mesh, device), config.optim, config.train.precision)


def plot(losses: Mapping[str, Mapping[str, Mapping[float, float]]], file: Path) -> None:
    """Draw the losses over the learning rates, one panel per parametrization and one line per size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(losses), 3.6), layout="constrained")
    panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    for axes, (kind, lines) in zip(panels, losses.items(), strict=True):
        for label, points in lines.items():
            axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=label)
        axes.set(title=kind, xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def _check(args: argparse.Namespace, kind: str, sizes: Sequence[tuple[int, int | None]]) -> float:
    columns = []
    for width, depth in sizes:
        runs = [
            activation_sizes(
                run_config([*args.settings, f"train.seed={seed}"], kind, width, depth, sizes[0]),
                args.steps or 5,
                args.lr,
            )
            for seed in range(args.seeds)
        ]
        means = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
        columns.append(_comparable(means, depth) if depth else means)
    rows = list(columns[0])
    labels = [str(depth or width) for width, depth in sizes]
    heading = [f"{kind}: {'layers' if args.depths else 'width'}", *map(str, labels)]
    heading.append("max / first" if args.depths else "max / min")
    print(f"\n| {' | '.join(heading)} |")
    print("|" + "---|" * (len(labels) + 2))
    worst = 1.0
    for name in rows:
        values = [column[name] for column in columns]
        ratio = max(values) / (values[0] if args.depths else min(values))
        worst = max(worst, ratio)
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} | {ratio:.2f} |", flush=True)
    return worst


def _sweep(
    args: argparse.Namespace, kind: str, sizes: Sequence[tuple[int, int | None]]
) -> dict[str, dict[float, float]]:
    print(f"\n| {kind} | {' | '.join(f'{rate:g}' for rate in args.rates)} | best |")
    print("|" + "---|" * (len(args.rates) + 2))
    lines = {}
    for width, depth in sizes:
        label = f"{depth} layers" if depth else f"width {width}"
        losses = {}
        for rate in args.rates:
            runs = [
                trained_loss(
                    run_config([*args.settings, f"train.seed={seed}"], kind, width, depth, sizes[0]),
                    args.steps or 100,
                    rate,
                )
                for seed in range(args.seeds)
            ]
            losses[rate] = sum(runs) / len(runs)
        best = min(losses, key=lambda rate: losses[rate])
        print(f"| {label} | {' | '.join(f'{loss:.3f}' for loss in losses.values())} | {best:g} |", flush=True)
        lines[label] = losses
    return lines


def _comparable(sizes: Mapping[str, float], depth: int) -> dict[str, float]:
    """Return the sizes that models of every depth have in common, including that of the last layer."""
    rows = {name: size for name, size in sizes.items() if not name.startswith("layers.")}
    return {**rows, "last layer": sizes[f"layers.{depth - 1}"]}


def _measured(model: nn.Module) -> list[tuple[str, nn.Module]]:
    ends = ("self_attention", "mlp")
    return [
        (name, module)
        for name, module in model.named_modules()
        if name in ("embedding", "final_layernorm")
        or name.endswith(ends)
        or name.rpartition(".")[0] == "layers"
    ]


def _batches(config: RunConfig, dataset: Sequence[np.ndarray]) -> list[Batch]:
    size = config.train.global_batch_size
    sizes = [size] * (len(dataset) // size)
    vocab_size = config.model.vocab_size
    return list(Loader(dataset, micro_batch_size=size, batch_sizes=sizes, vocab_size=vocab_size))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
