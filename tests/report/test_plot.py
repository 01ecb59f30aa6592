"""The plots show what the run wrote: a PNG from one or several folders, and a curve drawn with text."""

import gc
import json
import math
import warnings

import matplotlib.axes
import matplotlib.image
import numpy as np
import pytest
from default_cases import by_default

from megalith.cli.main import main
from megalith.errors import DataError
from megalith.report import run_files
from megalith.report.charts import smooth
from megalith.report.metrics import MetricsWriter, StepMetrics
from megalith.report.plot import plot_run
from megalith.report.run_files import open_runs, to_float
from megalith.report.text_curve import text_curve


def _run(folder, steps=60, start=8.0):
    with MetricsWriter(folder) as writer:
        for step in range(1, steps + 1):
            loss = math.nan if step == 40 else start * math.exp(-step / 20) + 2
            writer.log_step(
                StepMetrics(
                    step=step,
                    loss=loss,
                    grad_norm=1.0 + 1 / step,
                    lr=1e-3 * step / steps,
                    global_batch_size=8,
                    consumed_samples=8 * step,
                    step_time_ms=10.0,
                    tokens_per_second_per_device=5000.0,
                    tflops_per_device=None,
                    mfu=None,
                    max_memory_gb=None,
                    nan_iterations=int(step == 40),
                )
            )
            if step % 20 == 0:
                writer.log_evaluation(step, loss if math.isfinite(loss) else 3.1)
    return folder


def _colours(png):
    pixels = matplotlib.image.imread(png)  # [height, width, RGBA]
    red, green, blue = np.moveaxis((pixels[..., :3] * 255).astype(np.int32), -1, 0)
    found = np.unique(red << 16 | green << 8 | blue)
    return {(colour >> 16, colour >> 8 & 255, colour & 255) for colour in found.tolist()}


def test_one_run_gives_a_png_with_its_curve(tmp_path):
    png = plot_run(_run(tmp_path / "run"), tmp_path / "plots" / "run.png")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (0x1F, 0x6F, 0xEB) in _colours(png)


def test_several_runs_are_drawn_over_each_other_in_their_own_colours(tmp_path):
    runs = [_run(tmp_path / "a"), _run(tmp_path / "b", start=7.0)]
    colours = _colours(plot_run(runs, tmp_path / "both.png"))
    assert (0x1F, 0x6F, 0xEB) in colours and (0xD9, 0x48, 0x0F) in colours


def _legend(runs, png, monkeypatch):
    """The lines of the legend of a plot."""
    shown = []
    legend = matplotlib.axes.Axes.legend
    monkeypatch.setattr(
        matplotlib.axes.Axes,
        "legend",
        lambda axes, *args, **kwargs: shown.append(legend(axes, *args, **kwargs)),
    )
    plot_run(runs, png)
    return [
        text.get_text()
        for text in shown[0].get_texts()
        if "validation" not in text.get_text() and "NaN" not in text.get_text()
    ]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", by_default(["_x", "$a", "a$_b$", "_$"], "_x", "a$_b$"))
def test_a_run_stands_in_the_legend_whatever_its_folder_is_called(tmp_path, monkeypatch, name):
    (shown,) = _legend(_run(tmp_path / name), tmp_path / "run.png", monkeypatch)
    assert shown.replace("\\", "").endswith(name)


def test_runs_of_one_name_are_told_apart_and_equal_ones_are_all_seen(tmp_path, monkeypatch):
    runs = [_run(tmp_path / "a" / "run"), _run(tmp_path / "b" / "run", start=7.0), _run(tmp_path / "c")]
    shown = _legend([*runs, runs[1]], tmp_path / "four.png", monkeypatch)
    assert shown == ["a/run", "b/run", "c, as a/run", "b/run (2), as b/run"]
    first, third = (0x1F, 0x6F, 0xEB), (0x2B, 0x8A, 0x3E)
    assert {first, third} <= _colours(tmp_path / "four.png")


def test_an_expert_layer_without_tokens_and_a_loss_that_is_nan_are_drawn(tmp_path):
    run = _run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, "moe_imbalance": 1.0, "moe_dropped": 0.0, "moe_aux_loss": None} for line in lines]
    lines[-1].update(loss=math.nan, grad_norm=math.inf, moe_imbalance=math.nan)  # as other writers of JSON do
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = {"step": 60, "tokens": {"0": [0, 0, 0, 0], "1": [8, 0, 0, 0]}}
    (run / "experts.jsonl").write_text(json.dumps(load) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_run(run, tmp_path / "run.png").stat().st_size > 0
    lost = [{**line, "loss": None} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lost))
    assert plot_run(run, tmp_path / "lost.png").stat().st_size > 0


def test_run_of_one_step_is_plotted(tmp_path):
    assert plot_run(_run(tmp_path / "run", steps=1), tmp_path / "run.png").stat().st_size > 0


def test_a_long_run_is_parsed_in_chunks_and_drawn_with_a_bounded_number_of_points(tmp_path, monkeypatch):
    line = {"loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second_per_device": 5.0}
    records = [{"step": n, **line, "grad_norm": 9.0 if n == 19_999 else n % 2} for n in range(1, 30_001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    parsed, drawn = [], []
    monkeypatch.setattr(json, "loads", lambda text, loads=json.loads: parsed.append(text) or loads(text))
    plot = matplotlib.axes.Axes.plot
    monkeypatch.setattr(
        matplotlib.axes.Axes,
        "plot",
        lambda axes, x, y, **style: drawn.append((x, y)) or plot(axes, x, y, **style),
    )
    plot_run(tmp_path, tmp_path / "run.png")
    assert len(parsed) < 100
    loss, smoothed, *small = [len(x) for x, _ in drawn]
    assert loss <= 12_004 and smoothed <= 3000 and len(small) == 3 and max(small) <= 4004
    x, y = drawn[3]  # the gradient norm
    assert y[x.index(19_999)] == 9.0


def test_numbers_are_converted_together_and_other_values_one_by_one(monkeypatch):
    numbers, others = (
        [1, 2.5, None, math.nan, -math.inf, 10**200, -3],
        [True, "7", [], 10**400, 4, 1e-3, None],
    )
    converted = []
    monkeypatch.setattr(run_files, "to_float", lambda value: converted.append(value) or to_float(value))
    for values, expected in ((numbers, []), (others, others), ([10**400, 1], [10**400, 1])):
        records = [{"step": step, "loss": value} for step, value in enumerate(values)]
        points = run_files.metric_points(records, "loss").tolist()
        assert converted == expected
        assert points == [
            [step, n] for step, value in enumerate(values) if (n := to_float(value)) is not None
        ]
        converted.clear()


def test_the_command_plots_without_garbage_collection(tmp_path, monkeypatch):
    enabled = []
    monkeypatch.setattr("megalith.report.plot.save_png", lambda figure, path: enabled.append(gc.isenabled()))
    assert main(["plot", str(_run(tmp_path / "run"))]) == 0
    assert enabled == [False] and gc.isenabled()


def test_folder_without_metrics_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match=r"nothing to show in .*nowhere.*metrics\.jsonl is missing or empty"):
        plot_run(tmp_path / "nowhere", tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_lost_losses_are_left_out_of_the_points(tmp_path):
    points = open_runs([_run(tmp_path / "run")])[0].curve("loss")
    assert len(points) == 59 and 40 not in dict(points)


def test_smoothing_keeps_a_slope_where_it_is_and_flattens_noise():
    line = [(step, 10.0 - step / 2) for step in range(20)]
    assert [y for _, y in smooth(line, 5)] == pytest.approx([y for _, y in line])
    noise = smooth([(step, float(step % 2)) for step in range(100)], 10)
    assert all(abs(y - 0.5) < 0.06 for _, y in noise)
    ends_low = smooth([*((step, 6.0) for step in range(59)), (59, 5.0)], 2)
    assert ends_low[-1][1] > 5.1
    assert smooth([], 5) == [] and smooth([(1, 2.0)], 5) == [(1, 2.0)]


def test_text_curve_is_this_drawing():
    assert text_curve([(1, 3.0), (2, 2.0), (3, 2.5)], width=30, height=5).splitlines() == [
        "3.00 ┤⠑⠤⡀",
        "2.75 ┤  ⠈⠢⢄",
        "2.50 ┤     ⠑⠤⡀              ⣀⠤",
        "2.25 ┤       ⠈⠒⢄      ⢀⣀⠤⠔⠊⠉",
        "2.00 ┤          ⠑⠢⣀⠤⠒⠊⠁",
        "     └────────────────────────",
        "      step 1                 3",
    ]


@pytest.mark.parametrize(("width", "height"), [(40, 5), (80, 13), (120, 30)])
def test_text_curve_fits_its_size_and_labels_both_ends(width, height):
    points = [(step, 2 + 8 * math.exp(-step / 50)) for step in range(1, 501)]
    lines = text_curve(points, width, height).splitlines()
    assert len(lines) == height + 2
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(f"{points[0][1]:.2f} ┤") and lines[height - 1].startswith("2.00 ┤")
    assert lines[-1].endswith(" 500") and "step 1 " in lines[-1]


def test_text_curve_of_a_constant_one_point_or_none():
    assert "3.00" in text_curve([(1, 3.0), (2, 3.0)], 40, 5)
    assert "step 5" in text_curve([(5, 3.0)], 40, 5)
    assert text_curve([(1, math.nan)]) == text_curve([]) == "(no points to draw)"
