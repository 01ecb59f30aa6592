"""Charts of metrics over steps, tokens and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megalith.report.charts import downsample, loss_limits, smoothed
from megalith.report.page.svg_charts import (
    Curve,
    Mark,
    chart,
    text,
)
from megalith.report.run_files import RunFiles, metric_points, to_float

MAX_POINTS = 1000  # of a curve
MAX_TOKEN_POINTS = 200  # of the map from steps to tokens
REWARDS = "Rewards and completions"  # leads the page of a policy
FP8 = {
    "fp8_overflow": "FP8: largest share of overflow of a linear",
    "fp8_underflow": "FP8: largest share of underflow of a linear",
    "fp8_amax": "FP8: largest amax of a linear",
}
OPERAND_STYLES = {"input": "line", "weight": "dashed", "gradient": "dots"}


def step_tokens(run: RunFiles) -> str:
    """Return an HTML attribute with pairs of a step and the tokens trained on up to it, `step tokens step tokens …`.

    Tokens are samples times `data.seq_length`, for at most MAX_TOKEN_POINTS steps. Returns "" if they are unknown, as
    in RL runs, whose completions vary in length.
    """
    length, samples = run.settings.get("data.seq_length", ""), run.curve("consumed_samples")
    if not length.isdecimal() or len(length) > 9 or not len(samples) or is_policy(run):
        return ""
    points = downsample(samples, MAX_TOKEN_POINTS)
    values = " ".join(f"{step:g} {count * int(length):.10g}" for step, count in points)
    return f' data-tokens="0 0 {values}"'


def is_policy(run: RunFiles) -> bool:
    """Return True if the run was trained with rewards."""
    return len(metric_points(run.steps[-1:], "rewards_mean")) > 0


def constant_value(runs: Sequence[RunFiles], key: str) -> float | None:
    """Return the value of a metric that is equal in all steps, or None if it varies or has fewer than two values."""
    values = np.concatenate([run.curve(key)[:, 1] for run in runs])
    return values[0] if len(values) > 1 and (values == values[0]).all() else None


def constant_metrics(runs: Sequence[RunFiles], charts: Sequence[tuple[str, str]]) -> str:
    """Return a sentence that replaces the charts of constant metrics."""
    values = ", ".join(f"{title} {constant_value(runs, key):g}" for key, title in charts)
    return f"<p>At every step: {text(values, 5000)}.</p>" if values else ""


def last_reward(run: RunFiles) -> str:
    """Return the mean reward over the last tenth of the steps."""
    rewards = run.curve("rewards_mean")[:, 1]
    return f"{rewards[-max(1, len(rewards) // 10) :].mean():.4f}" if len(rewards) else "–"


def policy_runs(runs: Sequence[RunFiles]) -> list[int]:
    """Return the indices of the runs with rewards."""
    return [n for n, run in enumerate(runs) if is_policy(run)]


def lead_chart(runs: Sequence[RunFiles], key: str) -> str:
    """Return the full-width chart of a section: the loss, or the mean reward."""
    return _losses(runs) if key == "loss" else _smoothed("mean reward", key, runs, policy_runs(runs))


def _losses(runs: Sequence[RunFiles]) -> str:
    """Return the loss charts. GRPO runs, whose loss is about 0, have their own chart if there are other runs too."""
    policies = policy_runs(runs)
    others = [n for n in range(len(runs)) if n not in policies]
    if not policies:
        return _smoothed("loss", "loss", runs, others)
    policy_loss = _smoothed("policy loss", "loss", runs, policies)
    return (_smoothed("loss", "loss", runs, others) if others else "") + policy_loss


def _smoothed(title: str, key: str, runs: Sequence[RunFiles], which: Sequence[int]) -> str:
    """Return a wide chart of a metric with its values at each step, smoothed values, evaluations and the events of
    these runs.
    """
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


def metric_chart(runs: Sequence[RunFiles], key: str, title: str) -> str:
    """Return the chart of a metric over steps."""
    curves = [Curve(run.name, downsample(run.curve(key), MAX_POINTS), n) for n, run in enumerate(runs)]
    for n, run in enumerate(runs):
        validation = downsample(metric_points(run.evaluations, f"validation_{key}"), MAX_POINTS)
        curves.append(Curve(f"{run.name}, validation", validation, n, "dots"))
    values = {y for curve in curves for _, y in curve.points}
    if key == "global_batch_size" and len(values) < 2:
        return ""
    return chart(title, [curve for curve in curves if curve.points])


def fp8_chart(runs: Sequence[RunFiles], metric: str, title: str) -> str:
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
