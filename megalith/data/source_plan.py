"""Samples, tokens and epochs of each source of the training data over a run."""

from __future__ import annotations

import itertools
from typing import Any

from megalith.data.blended_dataset import BlendedDataset
from megalith.data.dataset import SampleDataset
from megalith.data.own_dataset import MapDataset, StreamDataset
from megalith.data.streams.text_stream import TextStream
from megalith.data.text_data import source_name
from megalith.tables import counted


def source_plan(train: SampleDataset, num_samples: int, seq_length: int) -> dict[str, Any]:
    """Return the plan of the training data.

    Args:
        train: the training dataset of a run.
        num_samples: samples of the run.
        seq_length: tokens per sample.

    Returns:
        `samples` and `tokens` of the run; `sources`, a list with `source`, `samples`, `tokens`, `epochs` (fractional;
        None if unknown), `weight` and `last_weight` (the shares of the first and the last sample) and `capped` (True
        if a cap on epochs lowers the weight); and for weights that change, `phases`, a list with `first_sample`,
        `end_sample` and `tokens` by source.
    """
    is_blend = isinstance(train, BlendedDataset)
    parts = train.datasets if is_blend else [train]
    counts = train.sample_counts(0, num_samples) if is_blend else [num_samples]
    names = [_name(part, number) for number, part in enumerate(parts)]
    sources = []
    for number, (part, name, count) in enumerate(zip(parts, names, counts)):
        per_epoch = getattr(part, "samples_per_epoch", None)
        source = {"source": name, "samples": count, "tokens": count * seq_length}
        source["epochs"] = None if per_epoch is None else count / per_epoch
        source["weight"], source["last_weight"], source["capped"] = 1.0, 1.0, False
        if is_blend:
            weights, uncapped = train.weights, train.mixture.uncapped
            source["weight"] = float(weights.first[0, number])
            source["last_weight"] = float(weights.at(max(num_samples - 1, 0))[number])
            source["capped"] = weights is not uncapped and bool(
                weights.totals(num_samples)[number] < uncapped.totals(num_samples)[number]
            )
        sources.append(source)
    plan = {"samples": num_samples, "tokens": num_samples * seq_length, "sources": sources}
    if is_blend and not train.weights.is_constant:
        plan["phases"] = _phases(train, names, num_samples, seq_length)
    return plan


def source_notes(plan: dict[str, Any]) -> list[str]:
    """Return notes on sources that the run reads several times, or from which it reads less than their blend weights
    imply.
    """
    notes, sources = [], plan["sources"]
    if len(sources) < 2:
        return notes
    repeated = [
        f"{source['source']} {source['epochs']:.2f} epochs"
        for source in sources
        if source["epochs"] is not None and source["epochs"] > 1
    ]
    if repeated:
        notes.append(f"upsampled sources, read more than once in this run: {', '.join(repeated)}")
    if capped := [source["source"] for source in sources if source["capped"]]:
        notes.append(f"the maximum number of epochs lowers the weights of: {', '.join(capped)}")
    return notes


def plan_text(plan: dict[str, Any], steps: int) -> str:
    """Format a plan: a line per source and, if weights change during the run, the tokens per phase."""
    lines = [
        f"{counted(steps, 'step')}, {counted(plan['samples'], 'sample')}, {counted(plan['tokens'], 'token')}",
        "",
    ]
    table = [("source", "weight", "samples", "tokens", "epochs")]
    for source in plan["sources"]:
        weight = f"{100 * source['weight']:.1f} %"
        if source["last_weight"] != source["weight"]:
            weight += f" to {100 * source['last_weight']:.1f} %"
        epochs = "-" if source["epochs"] is None else f"{source['epochs']:.2f}"
        if source.get("estimated") and source["epochs"] is not None:
            epochs = f"about {epochs}"
        name = source["source"] + (" (capped)" if source["capped"] else "")
        table.append((name, weight, f"{source['samples']:,}", f"{source['tokens']:,}", epochs))
    lines += _columns(table)
    if "phases" in plan:
        names = [source["source"] for source in plan["sources"]]
        phases = [("samples", *(f"tokens of {name}" for name in names))]
        for phase in plan["phases"]:
            span = f"{phase['first_sample']:,}-{phase['end_sample'] - 1:,}"
            phases.append((span, *(f"{phase['tokens'][name]:,}" for name in names)))
        lines += ["", *_columns(phases)]
    return "\n".join(lines)


def _phases(
    train: BlendedDataset, names: list[str], num_samples: int, seq_length: int
) -> list[dict[str, Any]]:
    bounds = [*(int(start) for start in train.weights.starts if start < num_samples), num_samples]
    phases = []
    for first, end in itertools.pairwise(bounds):
        tokens = [count * seq_length for count in train.sample_counts(first, end)]
        phases.append({"first_sample": first, "end_sample": end, "tokens": dict(zip(names, tokens))})
    return phases


def _name(part: SampleDataset, number: int) -> str:
    if isinstance(part, TextStream):
        return part.name
    if isinstance(part, MapDataset | StreamDataset):
        return part.source
    indexed = getattr(part, "indexed", None)
    return f"source {number}" if indexed is None else source_name(indexed.prefix)


def _columns(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths))
        )
        for row in table
    ]
