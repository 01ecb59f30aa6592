"""Memory, times, settings, starts and events of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megalith.report.page.svg_charts import (
    Html,
    heat_map,
    preformatted,
    stacked_bars,
    table,
    text,
    timeline,
)
from megalith.report.page.transcripts import completions_html
from megalith.report.pipeline_drawing import LEGEND
from megalith.report.run_files import RunFiles, to_float
from megalith.tables import format_bytes

MAX_ROWS = 200  # of a table
MAX_RANKS = 64
STEP_PARTS = ("compute", "communication", "bubble", "idle")


def each_run(runs: Sequence[RunFiles], draw: Callable[[RunFiles], str]) -> str:
    """Return `draw` of each run, under the run's name if there are several."""
    shown = [(run.name, content) for run in runs if (content := draw(run))]
    if len(runs) == 1:
        return "".join(content for _, content in shown)
    return "".join(f"<h3>{text(name)}</h3>{content}" for name, content in shown)


def expert_load(runs: Sequence[RunFiles]) -> str:
    """Return heat maps of the tokens of each expert, relative to the mean."""
    return each_run(runs, _load_of)


def _load_of(run: RunFiles) -> str:
    rows = [(f"layer {layer}", loads) for layer, loads in run.expert_load]
    title = f"tokens of each expert / mean, step {(run.experts or {}).get('step')} (right: the busiest)"
    return heat_map(title, rows[:MAX_ROWS])


def memory_parts(run: RunFiles) -> str:
    """Return the expected memory of each stage by use, and the measured peak of each rank."""
    stages = run.starts[-1].get("stages") if run.starts else None
    expected = []
    for stage in stages[:MAX_RANKS] if isinstance(stages, list) else ():
        if isinstance(stage, dict):
            parts = _sizes(stage.get("bytes"))
            expected.append((f"stage {stage.get('stage')}", parts, format_bytes(sum(parts.values()))))
    peaks = [to_float(record.get("peak")) or 0.0 for record in run.measured_ranks[:MAX_RANKS]]
    measured = [(f"rank {rank}", {"peak": peak}, format_bytes(peak)) for rank, peak in enumerate(peaks)]
    return stacked_bars("expected on a device of each pipeline stage, by use", expected) + stacked_bars(
        "peak of each rank at a measured step (on a CPU: of the process, including libraries)", measured
    )


def _sizes(content: Any) -> dict[str, float]:
    """Return the entries of a JSON object whose values are numbers of at least 0."""
    items = content.items() if isinstance(content, dict) else ()
    return {str(name): value for name, each in items if (value := to_float(each)) is not None and value >= 0}


def measured_step(run: RunFiles) -> str:
    rows = []
    for rank, record in enumerate(run.measured_ranks[:MAX_RANKS]):
        times = _sizes({name: record.get(name) for name in STEP_PARTS})
        rows.append((f"rank {rank}", times, f"{sum(times.values()):.1f} ms"))
    return stacked_bars("where the time of a measured step went", rows)


def pipeline_timeline(run: RunFiles) -> str:
    """Return the timeline of the pipeline's passes, or "" if there is none."""
    if run.timeline is None or not run.timeline.total:
        return ""
    kinds = list(LEGEND)
    rows = [
        [
            (
                kinds.index(span.action.kind),
                span.start,
                span.end,
                f"{LEGEND[span.action.kind]}, micro-batch {span.action.micro_batch}, chunk {span.action.chunk}: "
                f"{span.end - span.start:.2f} ms",
            )
            for span in spans_of_rank
        ]
        for spans_of_rank in run.timeline.spans[:MAX_RANKS]
    ]
    title = (
        f"a measured step, {run.timeline.total:.1f} ms; the gaps are its bubble, {run.timeline.bubble:.1%}"
    )
    return timeline(title, rows, list(LEGEND.values()))


def completions_section(runs: Sequence[RunFiles]) -> str:
    """Return the logged completions of each run."""
    return each_run(runs, completions_html)


def settings_table(runs: Sequence[RunFiles]) -> str:
    """Return a table of the settings that differ between the runs, and one of all settings."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [(key, *(run.settings.get(key, "") for run in runs)) for key in keys]
    if not rows:
        return ""
    headings = ("setting", *(run.name for run in runs))
    differ = [row for row in rows if len(set(row[1:])) > 1]
    shown = table(headings, differ) if differ else "<p>Every setting is the same.</p>"
    everything = f"<details><summary>all settings</summary>{table(headings, rows)}</details>"
    return (shown if len(runs) > 1 else "") + everything


def starts_section(run: RunFiles) -> str:
    """Return the machine, versions and layout of each start, or "" if no start is recorded."""
    if not run.starts:
        return ""
    rows = [
        (
            start.get("time"),
            start.get("step"),
            _pairs(start.get("layout")),
            _hosts(start),
            _pairs(start.get("versions")),
        )
        for start in run.starts[-MAX_ROWS:]
    ]
    summary = run.starts[-1].get("summary")
    items = summary.items() if isinstance(summary, dict) else ()
    facts = table(
        ("of the last start", ""), [(name, Html(preformatted(value, 2000))) for name, value in items]
    )
    return table(("started", "after step", "layout", "ranks and hosts", "versions"), rows) + facts


def _pairs(content: Any) -> str:
    return (
        ", ".join(f"{name} {value}" for name, value in content.items()) if isinstance(content, dict) else ""
    )


def _hosts(start: dict[str, Any]) -> str:
    hosts = start.get("hosts")
    named = ", ".join(map(str, hosts[:8])) if isinstance(hosts, list) else ""
    return f"{start.get('ranks')} on {named}"


def events_section(run: RunFiles) -> str:
    """Return the latest events."""
    rows = [(e.get("time"), e.get("step"), e.get("event"), e.get("text")) for e in run.events[-MAX_ROWS:]]
    skipped = [f"{step:.0f}" for step in run.nonzero_steps("skipped")]
    facts = []
    if run.saved_steps:
        facts.append(f"stored checkpoints: steps {', '.join(map(str, run.saved_steps[-40:]))}")
    if skipped:
        more = f" and {len(skipped) - 40} before" if len(skipped) > 40 else ""
        facts.append(f"updates skipped: {len(skipped)}, steps {', '.join(skipped[-40:])}{more}")
    paragraphs = "".join(f"<p>{text(fact, 1000)}</p>" for fact in facts)
    return paragraphs + (table(("time", "step", "event", "what"), rows) if rows else "")
