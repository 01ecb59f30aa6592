"""`megalith report RUN [RUN…]`: curves, memory, times, experts, FP8, completions, settings and events of runs.

The page is a single file that makes no requests: style and script are inline, and its content security policy forbids
any other source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import numpy as np

import megalith
from megalith.io import replace_file
from megalith.progress import Progress
from megalith.report.page.metric_charts import (
    FP8,
    REWARDS,
    constant_metrics,
    constant_value,
    fp8_chart,
    is_policy,
    last_reward,
    lead_chart,
    metric_chart,
    step_tokens,
)
from megalith.report.page.run_tables import (
    completions_section,
    each_run,
    events_section,
    expert_load,
    measured_step,
    memory_parts,
    pipeline_timeline,
    settings_table,
    starts_section,
)
from megalith.report.page.svg_charts import COLOURS, table, text
from megalith.report.run_files import RunFiles, metric_points, open_runs, to_float
from megalith.tables import format_si

MAX_CHARTS = 60  # of metrics without a title below

# Section → (key of metrics.jsonl, title) of its charts.
CHARTS = {
    "Training": (
        ("lr", "learning rate"),
        ("grad_norm", "gradient norm, before clipping"),
        ("params_norm", "norm of the weights"),
        ("max_attention_logit", "largest attention logit"),
        ("output_z_loss", "z-loss of the logits"),
        ("num_zeros", "gradient elements that are 0"),
        ("loss_scale", "loss scale"),
        ("global_batch_size", "sequences per step"),
    ),
    "Speed and memory": (
        ("tokens_per_second_per_device", "tokens/s/device"),
        ("mfu", "MFU"),
        ("tflops_per_device", "TFLOP/s/device"),
        ("step_time_ms", "milliseconds per step"),
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
    tokens = [step_tokens(run) for run in runs]
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


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _sections(runs: Sequence[RunFiles]) -> Iterator[tuple[str, str]]:
    """Yield (heading, HTML) of each section. The HTML is empty if there is nothing to show."""
    yield "Summary", _summary(runs)
    titled = {key for charts in CHARTS.values() for key, _ in charts}
    order = sorted(CHARTS, key=lambda heading: heading != REWARDS) if any(map(is_policy, runs)) else CHARTS
    for heading in order:
        charts = CHARTS[heading]
        constant = [(key, title) for key, title in charts if constant_value(runs, key) == 0]
        lead = {key: lead_chart(runs, key) for key in LEADS.get(heading, ())}
        drawn = [
            metric_chart(runs, key, title)
            for key, title in charts
            if (key, title) not in constant and key not in lead
        ]
        drawn = [*lead.values(), *drawn]
        extra = constant_metrics(runs, constant)
        extra += expert_load(runs) if heading == "Experts" else ""
        extra += completions_section(runs) if heading == REWARDS else ""
        yield heading, _grid(drawn) + extra
    yield "FP8", _grid(fp8_chart(runs, metric, title) for metric, title in FP8.items())
    others = dict.fromkeys(key for run in runs for record in run.steps[-1:] for key in record)
    others = [key for key in others if key not in titled | WITHOUT_CHART and not key.startswith(tuple(FP8))]
    constant = [key for key in others if constant_value(runs, key) is not None]
    drawn = _grid(metric_chart(runs, key, key) for key in others[:MAX_CHARTS] if key not in constant)
    yield "Further figures", drawn + constant_metrics(runs, [(key, key) for key in constant[:MAX_CHARTS]])
    yield "Memory by part", each_run(runs, memory_parts)
    yield "A step by rank", each_run(runs, measured_step)
    yield "Pipeline", each_run(runs, pipeline_timeline)
    yield "Settings", settings_table(runs)
    yield "Machine and starts", each_run(runs, starts_section)
    yield "Events", each_run(runs, events_section)


def _grid(drawn: Iterable[str]) -> str:
    charts = "".join(drawn)
    return f'<div class="charts">{charts}</div>' if charts else ""


def _summary(runs: Sequence[RunFiles]) -> str:
    has_rewards = any(map(is_policy, runs))
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
        *[last_reward(run)] * has_rewards,
        f"{losses[-1][1]:.4f}" if len(losses) else "–",
        f"{checks[-1][1]:.4f}, least {checks[:, 1].min():.4f}" if len(checks) else "–",
        format_si(speed.mean()) if len(speed) else "–",
        mean("mfu", ".1%"),
        f"{memory.max():.1f} GB" if len(memory) else "–",
        str(len(run.starts) or "–"),
        f"{run.curve('skipped')[:, 1].sum():.0f}",
        f"{run.curve('nan_iterations')[:, 1].sum():.0f}",
    )
