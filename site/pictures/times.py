"""Time, memory and bandwidth: simulated pipeline schedules, a traced step, and the planned memory of ZeRO and
traffic of each axis.

The trace (`log.profile`) is that of step.yaml on two CPU processes. step.json has the part that is drawn. `python -m
pictures TRACE STEP` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalith.config import RunConfig
from megalith.parallel.pipeline.schedules import Kind, build_schedule
from megalith.parallel.pipeline.simulate import Durations, simulate
from megalith.planner.layout import build_layout
from megalith.planner.rates import rates_of
from pictures.holdings import traffic
from pictures.svg import Picture

STEP = Path(__file__).parent / "step.json"

STAGES, MICRO_BATCHES = 4, 8
KIND_COLOURS = {
    Kind.FORWARD: ("r0", "b0"),  # by chunk
    Kind.BACKWARD: ("r1", "b1"),
    Kind.BACKWARD_INPUT: ("r1", "b1"),
    Kind.BACKWARD_WEIGHT: ("r2", "r2"),
}


def schedules() -> str:
    picture = Picture(f"Pipeline schedules of {STAGES} stages and {MICRO_BATCHES} micro-batches, simulated")
    picture.text(0, 14, f"{STAGES} stages, {MICRO_BATCHES} micro-batches, time from left to right", "h")
    picture.legend(24, ("r0", "forward"), ("r1", "backward or dgrad"), ("r2", "wgrad"), ("void", "bubble"))
    y, longest = 62.0, 0.0
    for kind, virtual in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        schedule = build_schedule(kind, STAGES, MICRO_BATCHES, virtual)
        timeline = simulate(schedule, Durations(1 / virtual, 1 / virtual, 1 / virtual))
        longest = longest or timeline.total
        words = ", two chunks per rank, the second darker" if virtual > 1 else ""
        picture.text(0, y, f"{kind}{words}: bubble {timeline.bubble:.1%}")
        unit = (480 - 46) / longest
        for rank, spans in enumerate(timeline.spans):
            top = y + 8 + rank * 19
            picture.text(0, top + 12, f"rank {rank}", "s")
            picture.box("void", 44, top, timeline.total * unit, 16)
            for span in spans:
                wide = (span.end - span.start) * unit
                colour = KIND_COLOURS[span.action.kind][span.action.chunk]
                picture.box(colour, 44 + span.start * unit, top, wide - 0.7, 16)
            named = [span for span in spans if (span.end - span.start) * unit > 8]
            middles = [44 + (span.start + span.end) / 2 * unit for span in named]
            picture.letters(middles, top + 11, [str(span.action.micro_batch) for span in named])
        y += 8 + STAGES * 19 + 24
    return picture.svg()


def shown_of(trace: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the parts of a profile's step `number` that `step` draws: names, starts and ends, in milliseconds.

    A layer's forward pass begins at its first norm. Its backward pass ends where its gradients' all-reduce begins.
    """
    events = sorted(
        (event for event in trace["traceEvents"] if event.get("ph") == "X"), key=lambda e: e["ts"]
    )
    whole = next(event for event in events if event["name"] == f"step {number}")
    first, end = whole["ts"], whole["ts"] + whole["dur"]

    def spans(name: str) -> list[tuple[float, float]]:
        found = [event for event in events if event["name"].startswith(name) and first <= event["ts"] <= end]
        return [((each["ts"] - first) / 1e3, (each["ts"] + each["dur"] - first) / 1e3) for each in found]

    backward, reduced = spans("autograd::engine::evaluate_function"), spans("gloo:all_reduce")
    begun, ended = backward[0][0], max(end for _, end in backward)
    norms = [start for start, _ in spans("aten::_fused_rms_norm") if start < begun]
    layers = len(norms) // 2  # two norms each, and the last one
    forward = norms[::2]
    done = [begun, *[start for start, _ in reduced if start > begun][:layers]]
    (optimizer,) = spans("Optimizer.step")
    computes = [
        ("batch and embedding", 0.0, forward[0]),
        *((f"F{layer}", *forward[layer : layer + 2]) for layer in range(layers)),
        ("head and loss", forward[-1], begun),
        *((f"B{layers - 1 - place}", *done[place : place + 2]) for place in range(layers)),
        ("embedding's backward", done[-1], ended),
        ("norm and clipping", ended, optimizer[0]),
        ("optimizer", *optimizer),
        ("metrics", optimizer[1], whole["dur"] / 1e3),
    ]
    rounded = [[name, round(start, 1), round(end, 1)] for name, start, end in computes]
    return {
        "milliseconds": round(whole["dur"] / 1e3, 1),
        "layers": layers,
        "computes": rounded,
        "all-reduces": [[round(start, 1), round(end, 1)] for start, end in reduced],
    }


PHASES = {"F": "r0", "B": "r1", "head and loss": "r2", "optimizer": "r3"}


def step() -> str:
    shown = json.loads(STEP.read_text(encoding="utf-8"))
    total = shown["milliseconds"]
    picture = Picture("One training step of one of two data-parallel processes, as traced")
    picture.text(0, 14, f"One step of {shown['layers']} layers on one of two ranks: {total:.0f} ms", "h")
    unit = 480 / total
    picture.text(0, 40, "the rank computes", "s")
    for name, start, end in shown["computes"]:
        colour = PHASES.get(name) or PHASES.get(name[0] if name[1:].isdigit() else "", "grey")
        wide = (end - start) * unit
        picture.box(colour, start * unit, 46, wide - 0.7, 30)
        if name[1:].isdigit() and wide > 14:
            picture.text((start + end) / 2 * unit, 65, name, "t m on")
    picture.text(0, 98, "all-reduces", "s")
    picture.box("void", 0, 104, 480, 22)
    for start, end in shown["all-reduces"]:
        picture.box("r4", start * unit, 104, max((end - start) * unit - 0.7, 0.8), 22)
    picture.legend(
        140, ("r0", "forward"), ("r2", "head, loss"), ("r1", "backward"), ("r3", "optimizer"), ("r4", "all-reduce"),
        ("grey", "the rest"),
    )  # fmt: skip
    return picture.svg()


STRATEGIES = {
    "no_shard": "no_shard",
    "optim": "optim (ZeRO-1)",
    "optim_grads": "optim_grads (ZeRO-2)",
    "optim_grads_params": "optim_grads_params (ZeRO-3)",
}
PARTS = {
    "weights": ("r0", "fp32 weights"),
    "compute_copy": ("r5", "bf16 copy"),
    "gradients": ("r1", "gradients"),
    "optimizer": ("r3", "moments"),
    "activations": ("r2", "activations"),
    "loss": ("grey", "loss"),
}
GPU = "H100"


def zero() -> str:
    gpus = 8
    picture = Picture(f"Memory of a GPU by sharding strategy: Llama-3-8B on {gpus} GPUs")
    picture.text(0, 14, f"Llama-3-8B on {gpus} GPUs, 8,192 tokens, bf16: GB on each GPU", "h")
    picture.legend(24, *PARTS.values())
    estimates = {strategy: _memory(strategy, gpus) for strategy in STRATEGIES}
    unit = 480 / max(estimate.total for estimate in estimates.values())
    y = 60
    for strategy, label in STRATEGIES.items():
        estimate = estimates[strategy]
        picture.text(0, y, f"{label}: {estimate.total / 1e9:.0f} GB")
        x = 0.0
        for part, size in asdict(estimate).items():
            wide = size * unit
            picture.box(PARTS[part][0], x, y + 6, wide - 0.7, 24)
            if wide > 20:
                picture.text(x + wide / 2, y + 22, f"{size / 1e9:.0f}", "s m on")
            x += wide
        y += 52
    memory = rates_of(GPU).wiring.memory  # GB
    for row in range(len(STRATEGIES)):
        picture.arrow((memory * 1e9 * unit, 100 + 52 * row), (memory * 1e9 * unit, 92 + 52 * row))
    picture.text(memory * 1e9 * unit + 8, y - 12, f"what an {GPU} has: {memory:.0f} GB", "s")
    return picture.svg()


def _memory(strategy: str, gpus: int):
    config = RunConfig.from_tree(
        {
            "model": dict(preset="llama3-8b"),
            "data": dict(mock=True, seq_length=8192),
            "parallel": dict(data_parallel_sharding_strategy=strategy, fsdp_unsharded_layers=0),
            "train": dict(train_iters=1, precision="bf16", micro_batch_size=1, global_batch_size=4 * gpus),
        }
    )
    return build_layout(config, gpus).stages[0].memory


AXES = [  # of 8 GPUs: label, colour, axis, settings
    ("PP 8", "r2", "pipeline", dict(pipeline_model_parallel_size=8)),
    ("CP 8, a2a", "r3", "context", dict(context_parallel_size=8, cp_comm_type="a2a")),
    ("CP 8, ring", "r3", "context", dict(context_parallel_size=8, cp_comm_type="p2p")),
    ("DP 8, no_shard", "r1", "data × context", {}),
    ("DP 8, optim", "r1", "data × context", dict(data_parallel_sharding_strategy="optim")),
    (
        "DP 8, optim_grads_params",
        "r1",
        "data × context",
        dict(data_parallel_sharding_strategy="optim_grads_params"),
    ),
    ("TP 8 with SP", "r0", "tensor", dict(tensor_model_parallel_size=8, sequence_parallel=True)),
]


def axes() -> str:
    picture = Picture("What each axis moves: GB that a GPU sends in a step of Llama-3-8B on eight GPUs")
    picture.text(0, 14, "Llama-3-8B on 8 GPUs, 8 sequences of 8,192 tokens per step:", "h")
    picture.text(0, 31, "GB that each GPU sends", "h")
    sent = [traffic(axis, settings, "llama3-8b", 8).bytes / 1e9 for _, _, axis, settings in AXES]
    unit, y = (480 - 200) / max(sent), 46.0
    for (label, colour, _, _), size in zip(AXES, sent):
        picture.text(150, y + 14, label, "s e")
        picture.box(colour, 158, y, size * unit, 20)
        picture.text(164 + size * unit, y + 14, f"{size:.1f}", "s")
        y += 27
    return picture.svg()
