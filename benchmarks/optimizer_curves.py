"""Loss curves of optimizers on source code, each at the best rate of a small grid.

    python -m benchmarks.optimizer_curves                               one GPU: 12 layers of width 768, 1,000 steps
    python -m benchmarks.optimizer_curves --only soap --trial-steps 50  one optimizer, with a shorter sweep

The text is the bytes of the Python modules on this machine, 60 MB of them, of which a run reads 33 MB at random
positions. Every optimizer trains the same model from the same seed on the same samples: first at each rate of its grid
for `--trial-steps`, then at the rate with the lowest loss for `--steps`. Both have a warm-up of a tenth and a cosine
decay to a tenth. The losses compared are those on 2 MB of other files. A rate at an end of its grid is reported,
because a better one may lie beyond it. After each optimizer, the training losses, means of ten steps, are written to
`--out` as JSON. The JSON of an earlier run of others is kept. At the end, all are drawn next to it as SVG.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from megalith.bench.corpus_text import TextBytes
from megalith.bench.mup_check import build
from megalith.bench.text_model import TEXT_MODEL, with_defaults
from megalith.bench.timing import synchronize
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.loader import Loader
from megalith.optim.schedule import build_schedule

RATES = {
    "adamw": (1e-4, 3e-4, 1e-3),
    "muon": (1e-3, 3e-3, 1e-2),
    "soap": (3e-4, 1e-3, 3e-3),
    "lion": (3e-5, 1e-4, 3e-4),
}
"""Peak learning rates by optimizer."""
OPTIONS = {
    "lion": {"optim.weight_decay": 0.5},
    "soap": {"optim.adam_beta1": 0.95, "optim.adam_beta2": 0.95, "optim.soap_max_precond_dim": 2048},
}
"""Further settings by optimizer."""
DEFAULTS = {
    **TEXT_MODEL,
    "model.num_layers": 12,
    "model.hidden_size": 768,
    "model.num_attention_heads": 12,
    "model.untie_embeddings_and_output_weights": True,
    "data.seq_length": 1024,
    "train.global_batch_size": 32,
    "train.micro_batch_size": 32,
    "optim.lr_decay_style": "cosine",
    "optim.weight_decay": 0.1,
}
MEGABYTES, HELD_OUT_MEGABYTES = 60.0, 2.0
HELD_OUT_SAMPLES = 512
WINDOW = 10  # steps in a point of a curve
TICKS = (0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # labelled losses


def main() -> int:
    """Tune, train, write and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--trial-steps", type=int, default=150)
    parser.add_argument("--only", nargs="+", choices=RATES, default=list(RATES), metavar="NAME")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--out", type=Path, default=Path("optimizer_curves.json"))
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    config = RunConfig.load(None, args.settings)
    config = with_defaults(config, DEFAULTS).with_settings({"train.precision": args.precision})
    curves = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    print("| optimizer | lr | loss on other files | training loss | ms per step |\n|---|---|---|---|---|")
    for name in args.only:
        trials = {rate: train(config, name, rate, args.trial_steps).held_out for rate in RATES[name]}
        rate = min(trials, key=lambda each: trials[each])
        run = train(config, name, rate, args.steps)
        curves[name] = {"lr": rate, "trials": trials, **run._asdict()}
        args.out.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
        cells = [name, f"{rate:g}", f"{run.held_out:.4f}", f"{run.loss[-1]:.4f}", f"{run.ms:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        if rate in (RATES[name][0], RATES[name][-1]):
            print(f"note: {rate:g} is at an end of the grid {RATES[name]} of {name}", file=sys.stderr)
    draw(curves, args.out.with_suffix(".svg"))
    return 0


class Run(NamedTuple):
    held_out: float
    """Loss per byte on the held-out files after the last step."""
    loss: list[float]
    """Mean training loss of every WINDOW steps."""
    ms: float
    """Mean time of a step."""


def train(config: RunConfig, name: str, lr: float, steps: int) -> Run:
    """Train with an optimizer."""
    settings = {
        "optim.optimizer": name,
        "optim.lr": lr,
        "optim.min_lr": lr / 10,
        "optim.lr_warmup_iters": max(steps // 10, 1),
        "train.train_iters": steps,
        **OPTIONS.get(name, {}),
    }
    config = config.with_settings(settings)
    optimizer, size = build(config), config.train.global_batch_size
    schedule = build_schedule(config.optim, config.train)
    loader = batches(config, steps * size, MEGABYTES, held_out=False)
    count, measured = size // config.train.micro_batch_size, []
    start = time.perf_counter()
    for step in range(steps):
        micro_batches = [next(loader) for _ in range(count)]
        measured.append(optimizer.model.backward(micro_batches, loss_scale=optimizer.loss_scale.scale))
        optimizer.step(schedule.learning_rate(step, step * size))
    synchronize(optimizer.model.device)
    milliseconds = 1e3 * (time.perf_counter() - start) / steps
    means = [torch.stack(measured[at : at + WINDOW]).mean() for at in range(0, steps, WINDOW)]
    other = list(batches(config, HELD_OUT_SAMPLES, HELD_OUT_MEGABYTES, held_out=True))
    total, tokens = optimizer.model.evaluate(other)
    return Run((total / tokens).item(), torch.stack(means).tolist(), milliseconds)


def batches(config: RunConfig, samples: int, megabytes: float, held_out: bool) -> Iterator[Batch]:
    """Return micro-batches of `samples` samples of the text."""
    size = config.train.micro_batch_size
    return Loader(
        TextBytes(config.data.seq_length, samples, config.train.seed, megabytes, held_out),
        micro_batch_size=size,
        batch_sizes=[size] * (samples // size),
        vocab_size=config.model.vocab_size,
    )


def draw(curves: Mapping[str, Mapping], file: Path) -> None:
    """Draw the losses over the steps."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        steps = [WINDOW * (at + 1) for at in range(len(curve["loss"]))]
        axes.plot(steps, curve["loss"], label=f"{name}, lr {curve['lr']:g}")
    lowest = min(min(curve["loss"]) for curve in curves.values())
    axes.set(
        xlabel="step", ylabel="training loss, nats per byte", yscale="log", ylim=(0.95 * lowest, 4 * lowest)
    )
    ticks = [tick for tick in TICKS if 0.95 * lowest < tick < 4 * lowest]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend()
    with matplotlib.rc_context({"svg.hashsalt": "megalith", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    sys.exit(main())
