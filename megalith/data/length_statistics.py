"""Statistics of the lengths of documents or samples, with a histogram as text."""

from __future__ import annotations

from typing import Any

import numpy as np

BAR = 40  # characters of the longest bar
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def length_statistics(lengths: np.ndarray) -> dict[str, Any]:
    """Return count, sum, minimum, mean, quantiles and maximum of lengths, and a histogram.

    Args:
        lengths: tokens per document or sample, int [n].

    Returns:
        The statistics by name. `histogram` is a list of bins [first, last, count] that double in width (0, 1, 2–3, 4–7,
        …), from the first to the last bin that is not empty.
    """
    if not len(lengths):
        return {"count": 0, "tokens": 0, "histogram": []}
    classes = np.where(lengths > 0, np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64) + 1, 0)
    counts = np.bincount(classes)
    histogram = [
        [0, 0, int(count)] if k == 0 else [2 ** (k - 1), 2**k - 1, int(count)]
        for k, count in enumerate(counts)
        if k >= classes.min()
    ]
    quantiles = {name: float(np.quantile(lengths, q)) for name, q in QUANTILES.items()}
    return {
        "count": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "min": int(lengths.min()),
        "mean": float(lengths.mean()),
        **quantiles,
        "max": int(lengths.max()),
        "histogram": histogram,
    }


def cut_fraction(lengths: np.ndarray, seq_length: int) -> float:
    """Return the expected fraction of documents that a sample boundary cuts, if documents are concatenated.

    A document of L tokens is cut by at least one of the boundaries, which are `seq_length` tokens apart, with
    probability min(1, (L − 1) / seq_length) over the positions of its start.
    """
    return float(np.minimum(1.0, np.maximum(lengths - 1, 0) / seq_length).mean()) if len(lengths) else 0.0


def render_lengths(statistics: dict[str, Any], noun: str) -> list[str]:
    """Return the statistics as lines of text, with a histogram."""
    if not statistics["count"]:
        return [f"no {noun}"]
    names = ("min", "mean", "median", "p90", "p99", "max")
    values = ", ".join(f"{name} {statistics[name]:,.0f}" for name in names)
    lines = [
        f"{statistics['count']:,} {noun}, {statistics['tokens']:,} tokens",
        f"tokens each: {values}",
    ]
    largest = max(count for _, _, count in statistics["histogram"])
    labels = [
        f"{first:,}" if first == last else f"{first:,}-{last:,}" for first, last, _ in statistics["histogram"]
    ]
    width = max(map(len, labels))
    for label, (_, _, count) in zip(labels, statistics["histogram"]):
        bar = "#" * max(count > 0, round(BAR * count / largest))
        lines.append(f"  {label:>{width}}  {bar:<{BAR}}  {count:,}")
    return lines
