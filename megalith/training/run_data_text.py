"""Formats data statistics (run_data.py) as text."""

from __future__ import annotations

from typing import Any

from megalith.data.length_statistics import render_lengths
from megalith.errors import LINES, printable
from megalith.tables import counted


def run_statistics_text(statistics: dict[str, Any]) -> str:
    """Format the statistics of each split, as returned by `RunData.statistics`."""
    lines: list[str] = []
    for split, values in statistics.items():
        lines += _chat_lines(split, values) if "rows" in values else _source_lines(split, values)
    return printable("\n".join(lines).rstrip(), LINES)


def _chat_lines(split: str, values: dict[str, Any]) -> list[str]:
    return [
        f"{split}: {counted(values['samples'], 'sample')} in {counted(values['rows'], 'row')}, "
        f"{100 * values['packing']:.1f} % of tokens",
        *(f"  {counted(count, 'sample')} {event}" for event, count in values["events"].items()),
        *_indented(render_lengths(values["lengths"], "sequences")),
        "",
    ]


def _source_lines(split: str, values: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    total = sum(source.get("tokens", 0) for source in values["sources"].values())
    if "samples" in values:
        lines += [f"{split}: {counted(values['samples'], 'sample')}"]
    for name, source in values["sources"].items():
        lines.append(f"{name}:")
        if "samples" in source:
            text = f"  {counted(source['samples'], 'sample')}, {_epochs(source)}"
            if total and "tokens" in source:
                text += f", {source['tokens']:,} tokens of the run ({100 * source['tokens'] / total:.1f} %)"
            lines.append(text)
        if source.get("stream"):
            lines += _indented(_stream_lines(source))
        if "documents" in source:
            lines += _indented(render_lengths(source["documents"], "documents"))
        elif source["dataset_samples"] is not None:
            lines.append(f"  {counted(source['dataset_samples'], 'sample')} in the dataset")
        if "packing" in source:
            lines.append(
                f"  packed into {counted(source['rows'], 'sample')} per epoch, {100 * source['packing']:.1f} % full"
            )
        if "cut_documents" in source:
            lines.append(
                f"  samples cut about {100 * source['cut_documents']:.1f} % of the documents; "
                f"{source['longer_documents']:,} are longer than a sample"
            )
        lines.append("")
    return lines


def _epochs(source: dict[str, Any]) -> str:
    if source["epochs"] is None:
        return "an unknown number of epochs"
    return f"{'about ' if source.get('stream') else ''}{source['epochs']:.2f} epochs"


def _stream_lines(source: dict[str, Any]) -> list[str]:
    """Return lines that describe a stream, and the sample of its shards that the statistics are based on."""
    text = f"a stream of {counted(source['shards'], 'shard')} in {counted(source['lanes'], 'lane')}"
    if source["bytes"] is not None:
        text += f", {source['bytes']:,} bytes"
    if source["estimated_tokens"] is not None:
        text += (
            f", about {source['estimated_documents']:,} documents and {source['estimated_tokens']:,} tokens"
        )
    lines = [text, f"a sample of documents from {source['sampled_shards']:,} of the shards:"]
    if source["empty"]:
        lines.append(f"{counted(source['empty'], 'document')} without tokens")
    if source["unusable"]:
        lines.append(
            f"{counted(source['unusable'], 'unusable document')}; the first: {source['first_unusable']}"
        )
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
