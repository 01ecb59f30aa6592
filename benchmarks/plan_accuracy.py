"""docs/plan_accuracy.md, the plan beside every row that was measured or published, and the tables of docs/tradeoffs.md.

`python -m benchmarks.plan_accuracy` writes both (`make accuracy`), in a minute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from unittest.mock import patch

from benchmarks.measured_rows import FIT, MIRRORED, OLD, ROWS, TRADEOFFS, TWO_GPUS, Row
from benchmarks.published_rows import (
    H100_ROWS,
    IN_2021,
    SC21,
    MegatronCore,
    OldAttention,
    Published,
    sc21_row,
)
from megalith.config.rules.auto_settings import Machine, resolve_auto
from megalith.planner import passes, step_time
from megalith.planner.candidates import NO_GEMM, PARALLEL, SHARDS
from megalith.planner.counts import MetaModel, flops_per_token
from megalith.planner.layout import build_layout
from megalith.planner.plan_result import PlannedLayout
from megalith.planner.rates import rates_of
from megalith.planner.search import plan, planned

DOCS = Path(__file__).parents[1] / "docs"
ON_80_GB = {PARALLEL + name: value for name, value in (NO_GEMM | SHARDS).items()}  # no GEMM recomputed


def expected(row: Row) -> tuple[float, step_time.StepTime]:
    """GB of the first stage's devices, and a step of a measured row."""
    config, _ = resolve_auto(row.config(), Machine(row.processes, True, True, ranks=row.processes))
    memory = build_layout(config, row.processes).stages[0].memory.total / 1e9
    meta = MetaModel(config.model, config.lora)
    return memory, step_time.step_time(config, meta, row.processes, rates_of(), 8)


def told(row: Published) -> float:
    """What the plan says of a published row, in its unit."""
    speed = planned(row.config(), row.gpus, rates_of(row.device)).speed
    return speed.tflops_per_device if row.unit == "TFLOP/s" else speed.tokens_per_second_per_device


@contextmanager
def as_megatron_core() -> Iterator[None]:
    with (
        patch.object(step_time, "Passes", MegatronCore),
        patch.object(passes, "SUMMING", 0),
    ):
        yield


def sc21(in_2021: bool = False, rows: Sequence[tuple] = SC21) -> dict[str, float]:
    """Name → TFLOP/s a GPU as the paper counts them: attention's matrix whole, the layers' recomputed forward pass too.
    `in_2021`: with what there was then, and not as Megalith makes a step."""
    result = {}
    for row in (sc21_row(*each) for each in rows):
        config = row.config().with_settings(IN_2021 if in_2021 else {})
        with patch.object(step_time, "Passes", OldAttention if in_2021 else passes.Passes):
            seconds = planned(config, row.gpus, rates_of(row.device)).time.seconds
        each = flops_per_token(config.model, config.data.seq_length)
        tokens = config.train.global_batch_size * config.data.seq_length
        flops = tokens * (4 / 3 * (each.full - each.head) + each.head)
        result[row.name] = flops / seconds / row.gpus / 1e12
    return result


def feasible(row: Published) -> PlannedLayout:
    """A published layout as it stands, or where that takes too much, with no GEMM recomputed and tokens gathered
    again."""
    whole = planned(row.config(), row.gpus, rates_of(row.device))
    return (
        whole if whole.fits else planned(row.config().with_settings(ON_80_GB), row.gpus, rates_of(row.device))
    )


def off(result: float, figure: float) -> str:
    return f"{result / figure - 1:+.1%}".replace("-", "−").replace("%", " %")


def measured_line(row: Row) -> str:
    """A row of the page."""
    memory, time = expected(row)
    ms = 1e3 * time.seconds
    has_time = row.ms is not None
    use = {
        FIT: "fitted on",
        OLD: "memory alone; an older version",
        MIRRORED: "memory alone; one rank, mirrored",
    }.get(row.use, "")
    cells = [f"`{row.model['preset']}`", row.name, str(row.processes)]
    cells += (
        [f"{row.gigabytes:g}", f"{memory:.1f}", off(memory, row.gigabytes)] if row.gigabytes else ["", "", ""]
    )
    cells += [f"{row.ms:,}", f"{ms:,.1f}", off(ms, row.ms)] if has_time else ["", "", ""]
    return f"| {' | '.join([*cells, use])} |"


def published_line(row: Published) -> str:
    result, layout = told(row), feasible(row)
    best = plan(row.config(), row.gpus, rates=rates_of(row.device), top=1).best[0]
    gain = off(layout.time.seconds, best.time.seconds)
    cells = [
        row.name,
        str(row.gpus),
        f"{row.figure:,} {row.unit}",
        f"{result:,.0f}",
        off(result, row.figure),
        "",
    ]
    if row.by_megatron_core:
        with as_megatron_core():
            cells[-1] = f"{told(row):,.0f}, {off(told(row), row.figure)}"
    room = f"{'fits' if layout.fits else '**no**'}, {layout.bytes / 1e9:.0f} GB"
    return f"| {' | '.join([*cells, room, f'{gain} ({best.name})'])} |"


def outside() -> str:
    """A sentence with the published rows that are further off than the bound, as Megalith makes a step."""
    far = [
        (row.name, off(told(row), row.figure)) for row in H100_ROWS if abs(told(row) / row.figure - 1) > 0.2
    ]
    names = " and ".join(f"{name} ({figure})" for name, figure in far)
    said = (
        f"**Outside of 20 % as Megalith makes a step: {names}.** It is that much slower there, by its "
        "software ([why](plan.md#how-accurate-it-is)); nothing was fitted to any row of this table."
    )
    return fill(said, 120, break_on_hyphens=False)


def sc21_lines() -> list[str]:
    now, then = sc21(), sc21(in_2021=True)
    order = sorted(then, key=then.__getitem__)
    lines = []
    for name, *_, figure in SC21:
        place = order.index(name) + 1
        cells = [
            name,
            str(figure),
            f"{then[name]:.0f}",
            off(then[name], figure),
            str(place),
            f"{now[name]:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


PAGE = """# The plan beside what was measured and published

By `make accuracy`; [planning a job](plan.md) says what the model is. Bounds that the tests hold it to: memory within
5 % of every row, time within 10 % of rows that nothing was fitted on, 20 % of the published ones as the software that
was measured makes a step.

## Measured on H200

Every run of [RESULTS](../benchmarks/RESULTS.md) with a memory or a time of this version's kernels, but rollouts,
generation and samples of varying lengths. Expected is what `megalith plan show` says of the run's settings.

| model | run | GPUs | GB | expected | off | ms a step | expected | off | |
|---|---|---|---|---|---|---|---|---|---|
{measured}

## Published on H100

Expected by the H200's measured rates and the ratio of the datasheets. Bridge's runs are Megatron-Core's, which hides
and leaves out what Megalith does not: they are held to as it makes a step, Meta's as Megalith does. "Feasible" is the
published layout as it stands, or, where that takes too much, with `layernorm` and `mlp_act` recomputed and tokens
gathered again, which repeat no GEMM. The last column is how much longer it takes than the best that the plan finds, by
the same model.

{outside}

| run | GPUs | published | expected of Megalith | off | of Megatron-Core | feasible | beside the plan's best |
|---|---|---|---|---|---|---|---|
{published}

## Ten models on A100, 2021

TFLOP/s a GPU as the paper counts them (Narayanan et al., 2021, table 1): attention's matrix whole, the recomputed
forward pass too. Micro-batches and chunks are those of the authors' scripts. Expected is a step as it was made then:
attention by GEMMs with its scores in memory, whole layers recomputed, tensor parallelism without sequence parallelism,
nothing hidden. The last column is the same layout as Megalith makes a step.

| model | published | expected | off | place among the ten | Megalith |
|---|---|---|---|---|---|
{sc21}
"""


TABLE = re.compile("(?<=<!-- benchmarks.plan_accuracy writes this -->\n).*?(?=<!-- to here -->\n)", re.DOTALL)


def tradeoffs(rows: list[Row]) -> str:
    """A table of docs/tradeoffs.md, beside the first row; what was mirrored beside the first that was."""
    lines = []
    for row in rows:
        base = next(each for each in rows if (each.use == MIRRORED) == (row.use == MIRRORED))
        memory, time = expected(row)
        known = row.ms is not None and row.gigabytes is not None
        cells = [row.name, *([f"{row.gigabytes:g}", f"{row.ms:,g}"] if known else ["", ""])]
        changes = (
            [off(row.gigabytes, base.gigabytes), off(row.ms, base.ms)]
            if known and row is not base
            else ["", ""]
        )
        lines.append(f"| {' | '.join([*cells, *changes, f'{memory:.1f}', f'{1e3 * time.seconds:,.0f}'])} |")
    heading = "| | GB | ms per step | Memory | Time | GB (planner) | ms (planner) |"
    return "\n".join([heading, "|---|---|---|---|---|---|---|", *lines, ""])


def page() -> str:
    return PAGE.format(
        measured="\n".join(measured_line(row) for row in ROWS if row.ms or row.gigabytes),
        published="\n".join(map(published_line, H100_ROWS)),
        outside=outside(),
        sc21="\n".join(sc21_lines()),
    )


if __name__ == "__main__":
    (DOCS / "plan_accuracy.md").write_text(page(), encoding="utf-8")
    tables, file = iter((TRADEOFFS, TWO_GPUS)), DOCS / "tradeoffs.md"
    text = TABLE.sub(lambda _: tradeoffs(next(tables)), file.read_text(encoding="utf-8"))
    file.write_text(text, encoding="utf-8")
