"""`megalith report RUN [RUN…]`: curves, memory, times, experts, FP8, completions, settings and events of runs.

The page is a single file that makes no requests: style and script are inline, and its content security policy forbids
any other source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import megalith
from megalith.io import replace_file
from megalith.progress import Progress
from megalith.report.charts import downsample, loss_limits, smoothed
from megalith.report.page.svg_charts import (
    COLOURS,
    Curve,
    Html,
    Mark,
    chart,
    heat_map,
    preformatted,
    stacked_bars,
    table,
    text,
    timeline,
)
from megalith.report.page.transcripts import completions_html
from megalith.report.pipeline_drawing import LEGEND
from megalith.report.run_files import RunFiles, metric_points, open_runs, to_float
from megalith.tables import format_bytes, format_si

MAX_POINTS = 1000  # of a curve
MAX_CHARTS = 60  # of metrics without a title below
MAX_ROWS = 200  # of a table
MAX_TOKEN_POINTS = 200  # of the map from steps to tokens
MAX_RANKS = 64
STEP_PARTS = ("compute", "communication", "bubble", "idle")

REWARDS = "Rewards and completions"  # leads the page of a policy
# Section → (key of metrics.jsonl, title) of its charts.
CHARTS = {
    "Training": (
        ("lr", "learning rate"),
        ("grad_norm", "gradient norm, before clipping"),
        ("params_norm", "norm of the weights"),
        ("max_attention_logit", "largest attention logit"),
        ("num_zeros", "gradient elements that are 0"),
        ("loss_scale", "loss scale"),
        ("global_batch_size", "sequences a step"),
    ),
    "Speed and memory": (
        ("tokens_per_second_per_device", "tokens/s/device"),
        ("mfu", "MFU"),
        ("tflops_per_device", "TFLOP/s/device"),
        ("step_time_ms", "milliseconds a step"),
        ("max_memory_gb", "peak memory on the device, GB"),
        ("gpu_temperature", "hottest GPU, °C"),
        ("gpu_power_w", "greatest power of a GPU, W"),
        ("gpu_clock_mhz", "slowest GPU clock, MHz"),
        ("gpu_utilization", "least utilization of a GPU, %"),
        ("gpu_memory_gb", "fullest GPU, GB"),
        ("gpu_ecc_errors", "ECC errors"),
        ("gpu_alloc_retries", "allocations tried again"),
    ),
    "Experts": (
        ("moe_imbalance", "busiest expert / mean"),
        ("moe_aux_loss", "balancing loss (1: even)"),
        ("moe_z_loss", "router's z-loss"),
        ("moe_dropped", "share of choices dropped"),
    ),
    REWARDS: (
        ("rewards_mean", "mean reward"),
        ("rewards_std", "standard deviation of the rewards"),
        ("groups_without_spread", "share of groups without spread"),
        ("completion_length", "mean length of a completion, tokens"),
        ("completions_truncated", "share of completions truncated"),
        ("entropy", "entropy, nats"),
        ("kl", "KL to the reference"),
        ("clip_low", "share of tokens clipped below"),
        ("clip_high", "share of tokens clipped above"),
        ("mismatch", "drift between engine and trainer"),
    ),
}
LEADS = {REWARDS: ("rewards_mean",), "Training": ("loss",)}  # wide charts of a section, above the others
WITHOUT_CHART = {"step", "loss", "consumed_samples", "skipped", "nan_iterations"}
FP8 = {
    "fp8_overflow": "FP8: largest share of overflow of a linear",
    "fp8_underflow": "FP8: largest share of underflow of a linear",
    "fp8_amax": "FP8: largest amax of a linear",
}
OPERAND_STYLES = {"input": "line", "weight": "dashed", "gradient": "dots"}


def write_report(folders: Sequence[str], output: str | Path) -> Path:
    """Write the report of these runs as one HTML file.

    Args:
        folders: run folders, local or in a store.
        output: path of the file; missing folders are created.

    Returns:
        The path of the file.

    Raises:
        DataError: a folder has no metrics.
    """
    page = render_page(open_runs(folders))
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, page)
    return output


def render_page(runs: Sequence[RunFiles]) -> str:
    """Return the page as HTML."""
    style, script = (files(__name__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    title = ", ".join(run.name for run in runs[:4]) + (" …" if len(runs) > 4 else "")
    sections = []
    with Progress("draw", None, "sections") as progress:
        for heading, body in _sections(runs):
            sections += [(heading, body)] * bool(body)
            progress.add()
    links = "".join(f'<a href="#{_anchor(heading)}">{heading}</a>' for heading, _ in sections)
    tokens = [_tokens(run) for run in runs]
    toggles = "".join(
        f'<button type="button" class="key c{n % COLOURS}" data-toggle="{n}"{tokens[n]} aria-pressed="true">'
        f"{text(run.name)}</button>"
        for n, run in enumerate(runs)
    )
    switches = f'<div class="runs">{toggles}</div>{_controls(all(tokens))}'
    body = "".join(
        f'<section id="{_anchor(heading)}"><h2>{heading}</h2>{content}</section>'
        for heading, content in sections
    )
    written = f"megalith {megalith.__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">"
        f"<title>{text(title)}</title><style>{style}</style></head><body><header><h1>{text(title)}</h1>"
        f"<p>{written}</p><nav>{links}</nav>{switches}</header><main>{body}</main>"
        f'<div id="tip" hidden></div><script>{script}</script></body></html>\n'
    )


def _controls(has_tokens: bool) -> str:
    """Return the controls of the charts: scale, smoothing, zoom and the horizontal axis."""
    align = '<label><input type="checkbox" data-align> align by tokens</label>' if has_tokens else ""
    return (
        '<div class="controls"><label><input type="checkbox" data-log> log scale</label>'
        '<label>smoothing <input type="range" data-smoothing min="0" max="40" value="0"></label>'
        f"{align}<span>drag across a chart to zoom</span>"
        '<button type="button" data-reset hidden>reset zoom</button></div>'
    )


def _tokens(run: RunFiles) -> str:
    """Return an attribute with the tokens after some steps, `step tokens step tokens …`; "" if they are unknown.

    Tokens are samples times `data.seq_length`, so a policy's run, whose completions vary in length, has none.
    """
    length, samples = run.settings.get("data.seq_length", ""), run.curve("consumed_samples")
    if not length.isdecimal() or len(length) > 9 or not len(samples) or _is_policy(run):
        return ""
    points = downsample(samples, MAX_TOKEN_POINTS)
    values = " ".join(f"{step:g} {count * int(length):.10g}" for step, count in points)
    return f' data-tokens="0 0 {values}"'


def _is_policy(run: RunFiles) -> bool:
    """Return whether the run was trained with rewards."""
    return len(metric_points(run.steps[-1:], "rewards_mean")) > 0


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _sections(runs: Sequence[RunFiles]) -> Iterator[tuple[str, str]]:
    """Yield (heading, HTML) of each section. The HTML is empty if there is nothing to show."""
    yield "Summary", _summary(runs)
    titled = {key for charts in CHARTS.values() for key, _ in charts}
    order = sorted(CHARTS, key=lambda heading: heading != REWARDS) if any(map(_is_policy, runs)) else CHARTS
    for heading in order:
        charts = CHARTS[heading]
        constant = [(key, title) for key, title in charts if _constant(runs, key) == 0]
        lead = {key: _lead(runs, key) for key in LEADS.get(heading, ())}
        drawn = [
            _chart(runs, key, title)
            for key, title in charts
            if (key, title) not in constant and key not in lead
        ]
        drawn = [*lead.values(), *drawn]
        extra = _constants(runs, constant)
        extra += _expert_load(runs) if heading == "Experts" else ""
        extra += _completions(runs) if heading == REWARDS else ""
        yield heading, _grid(drawn) + extra
    yield "FP8", _grid(_fp8(runs, metric, title) for metric, title in FP8.items())
    others = dict.fromkeys(key for run in runs for record in run.steps[-1:] for key in record)
    others = [key for key in others if key not in titled | WITHOUT_CHART and not key.startswith(tuple(FP8))]
    constant = [key for key in others if _constant(runs, key) is not None]
    drawn = _grid(_chart(runs, key, key) for key in others[:MAX_CHARTS] if key not in constant)
    yield "Further figures", drawn + _constants(runs, [(key, key) for key in constant[:MAX_CHARTS]])
    yield "Memory by part", _each(runs, _memory)
    yield "A step by rank", _each(runs, _measured)
    yield "Pipeline", _each(runs, _timeline)
    yield "Settings", _settings(runs)
    yield "Machine and starts", _each(runs, _starts)
    yield "Events", _each(runs, _events)


def _constant(runs: Sequence[RunFiles], key: str) -> float | None:
    """Return the value of a metric that is the same in all steps; None if it varies or has fewer than two values."""
    values = np.concatenate([run.curve(key)[:, 1] for run in runs])
    return values[0] if len(values) > 1 and (values == values[0]).all() else None


def _constants(runs: Sequence[RunFiles], charts: Sequence[tuple[str, str]]) -> str:
    """Return a sentence that replaces the charts of constant metrics."""
    values = ", ".join(f"{title} {_constant(runs, key):g}" for key, title in charts)
    return f"<p>At every step: {text(values, 5000)}.</p>" if values else ""


def _grid(drawn: Iterable[str]) -> str:
    charts = "".join(drawn)
    return f'<div class="charts">{charts}</div>' if charts else ""


def _each(runs: Sequence[RunFiles], draw: Callable[[RunFiles], str]) -> str:
    """Return `draw` of each run, under the run's name if there are several."""
    shown = [(run.name, content) for run in runs if (content := draw(run))]
    if len(runs) == 1:
        return "".join(content for _, content in shown)
    return "".join(f"<h3>{text(name)}</h3>{content}" for name, content in shown)


def _summary(runs: Sequence[RunFiles]) -> str:
    has_rewards = any(map(_is_policy, runs))
    headings = (
        "run",
        "steps",
        *["reward"] * has_rewards,
        "loss",
        "validation",
        "tokens/s/device",
        "MFU",
        "memory",
        "starts",
        "skipped",
        "lost",
    )
    return table(headings, (_summary_row(run, has_rewards) for run in runs))


def _summary_row(run: RunFiles, has_rewards: bool) -> tuple[str, ...]:
    losses, checks = run.curve("loss"), metric_points(run.evaluations, "validation_loss")
    middle = to_float(run.steps[len(run.steps) // 2]["step"]) or 0.0  # the first steps compile

    def second_half(key: str) -> np.ndarray:
        steps, values = run.curve(key).T
        return values[steps >= middle]

    def mean(key: str, form: str) -> str:
        values = second_half(key)
        return format(values.mean(), form) if len(values) else "–"

    memory = run.curve("max_memory_gb")[:, 1]
    speed = second_half("tokens_per_second_per_device")
    return (
        run.name,
        str(run.steps[-1]["step"]),
        *[_reward(run)] * has_rewards,
        f"{losses[-1][1]:.4f}" if len(losses) else "–",
        f"{checks[-1][1]:.4f}, least {checks[:, 1].min():.4f}" if len(checks) else "–",
        format_si(speed.mean()) if len(speed) else "–",
        mean("mfu", ".1%"),
        f"{memory.max():.1f} GB" if len(memory) else "–",
        str(len(run.starts) or "–"),
        f"{run.curve('skipped')[:, 1].sum():.0f}",
        f"{run.curve('nan_iterations')[:, 1].sum():.0f}",
    )


def _reward(run: RunFiles) -> str:
    """Return the mean reward over the last tenth of the steps."""
    rewards = run.curve("rewards_mean")[:, 1]
    return f"{rewards[-max(1, len(rewards) // 10) :].mean():.4f}" if len(rewards) else "–"


def _policies(runs: Sequence[RunFiles]) -> list[int]:
    return [n for n, run in enumerate(runs) if _is_policy(run)]


def _lead(runs: Sequence[RunFiles], key: str) -> str:
    return _losses(runs) if key == "loss" else _smoothed("mean reward", key, runs, _policies(runs))


def _losses(runs: Sequence[RunFiles]) -> str:
    """Return the loss charts. GRPO runs, whose loss is about 0, have their own chart if there are other runs too."""
    policies = _policies(runs)
    others = [n for n in range(len(runs)) if n not in policies]
    if not policies:
        return _smoothed("loss", "loss", runs, others)
    policy_loss = _smoothed("policy loss", "loss", runs, policies)
    return (_smoothed("loss", "loss", runs, others) if others else "") + policy_loss


def _smoothed(title: str, key: str, runs: Sequence[RunFiles], which: Sequence[int]) -> str:
    """Return a wide chart of a metric at each step, smoothed and in evaluations, with the events of these runs."""
    raw = {n: runs[n].curve(key) for n in which}
    smooth = {n: smoothed(raw[n], MAX_POINTS // 2) for n in which}
    checks = {n: metric_points(runs[n].evaluations, f"validation_{key}") for n in which}
    curves = []
    for n in which:
        curves.append(Curve(f"{runs[n].name}, each step", downsample(raw[n], MAX_POINTS), n, "faint"))
        curves.append(Curve(runs[n].name, smooth[n], n))
        curves.append(Curve(f"{runs[n].name}, validation", downsample(checks[n], MAX_POINTS), n, "dots"))
    marks = [mark for n in which for mark in _marks(runs[n], n)]
    limits = None  # rewards and a policy's loss have no trend from large to small
    if title == "loss":
        limits = loss_limits(*(list(each.values()) for each in (raw, smooth, checks)))
    return chart(title, [c for c in curves if c.points], limits=limits, marks=marks, wide=True)


def _marks(run: RunFiles, colour: int) -> Iterator[Mark]:
    """Yield marks for events that have a step, bad steps, and starts after the first."""
    for event in run.events:
        if (step := to_float(event.get("step"))) is not None:
            yield Mark(step, f"{run.name}, step {step:g}: {event.get('event')}", colour)
    for step in run.nonzero_steps("nan_iterations"):
        yield Mark(step, f"{run.name}, step {step:.0f}: loss lost", colour)
    for start in run.starts[1:]:
        if (step := to_float(start.get("step"))) is not None:
            yield Mark(step, f"{run.name}, started again after step {step:g}", colour)


def _chart(runs: Sequence[RunFiles], key: str, title: str) -> str:
    curves = [Curve(run.name, downsample(run.curve(key), MAX_POINTS), n) for n, run in enumerate(runs)]
    for n, run in enumerate(runs):
        validation = downsample(metric_points(run.evaluations, f"validation_{key}"), MAX_POINTS)
        curves.append(Curve(f"{run.name}, validation", validation, n, "dots"))
    values = {y for curve in curves for _, y in curve.points}
    if key == "global_batch_size" and len(values) < 2:
        return ""
    return chart(title, [curve for curve in curves if curve.points])


def _fp8(runs: Sequence[RunFiles], metric: str, title: str) -> str:
    """Return a chart of the largest value over all linears, for each kind of operand."""
    curves = []
    for n, run in enumerate(runs):
        for kind, style in OPERAND_STYLES.items():
            pairs = [(to_float(record["step"]), _largest(record, metric, kind)) for record in run.fp8_steps]
            points = np.array([(x, y) for x, y in pairs if x is not None and y is not None])
            curves.append(Curve(f"{run.name}, {kind}", downsample(points, MAX_POINTS), n, style))
    return chart(title, [curve for curve in curves if curve.points])


def _largest(record: dict[str, Any], metric: str, kind: str) -> float | None:
    values = [
        to_float(v) for key, v in record.items() if key.startswith(f"{metric}/") and key.endswith(f".{kind}")
    ]
    return max((v for v in values if v is not None), default=None)


def _expert_load(runs: Sequence[RunFiles]) -> str:
    return _each(runs, _load_of)


def _load_of(run: RunFiles) -> str:
    rows = [(f"layer {layer}", loads) for layer, loads in run.expert_load]
    title = f"tokens of each expert / mean, step {(run.experts or {}).get('step')} (right: the busiest)"
    return heat_map(title, rows[:MAX_ROWS])


def _memory(run: RunFiles) -> str:
    """Return the expected memory of each stage by part, and the measured peak of each rank."""
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
    """Return the numbers of a JSON object that are 0 or more."""
    items = content.items() if isinstance(content, dict) else ()
    return {str(name): value for name, each in items if (value := to_float(each)) is not None and value >= 0}


def _measured(run: RunFiles) -> str:
    rows = []
    for rank, record in enumerate(run.measured_ranks[:MAX_RANKS]):
        times = _sizes({name: record.get(name) for name in STEP_PARTS})
        rows.append((f"rank {rank}", times, f"{sum(times.values()):.1f} ms"))
    return stacked_bars("where the time of a measured step went", rows)


def _timeline(run: RunFiles) -> str:
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


def _completions(runs: Sequence[RunFiles]) -> str:
    return _each(runs, completions_html)


def _settings(runs: Sequence[RunFiles]) -> str:
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


def _starts(run: RunFiles) -> str:
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


def _events(run: RunFiles) -> str:
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
