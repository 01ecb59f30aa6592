"""In a pipe the console prints Megatron's lines exactly; on a terminal a live line and readable permanent ones."""

import contextlib
import io
import math
import os
import pty
import re
from datetime import datetime, timedelta

import pytest
from rich.console import Console

from megalith.config import LogConfig
from megalith.report.console import EtaEstimator, LiveConsole, LogConsole, open_console
from megalith.report.metrics import StepMetrics
from megalith.tables import format_si

NOW = datetime(2025, 9, 7, 23, 58, 47, 123456)
MEGATRON_LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +\d+/ *\d+ \| consumed samples: +\d+ \| "
    r"elapsed time per iteration \(ms\): [\d.]+ \| throughput per GPU \(TFLOP/s/GPU\): [\d.]+ \| "
    r"learning rate: \d\.\d{6}E[+-]\d\d \| global batch size: +\d+ \| lm loss: \d\.\d{6}E[+-]\d\d \| "
    r"loss scale: [\d.]+ \| grad norm: [\d.]+ \| number of skipped iterations: +\d+ \| "
    r"number of nan iterations: +\d+ \|$"
)


def _step(step, **changes):
    fields = dict(
        step=step,
        loss=6.159759,
        grad_norm=1.095,
        lr=5.999998e-05,
        global_batch_size=32,
        consumed_samples=32 * step,
        step_time_ms=438.3,
        tokens_per_second_per_device=74760.0,
        tflops_per_device=367.54,
        mfu=0.371,
        max_memory_gb=64.8,
        loss_scale=131072.0,
    )
    return StepMetrics(**{**fields, **changes})


def _log(steps, total=500000, interval=1):
    stream = io.StringIO()
    with LogConsole(total, interval, stream, clock=lambda: NOW) as console:
        for step in steps:
            console.log_step(step)
    return stream.getvalue()


def test_a_task_with_lines_of_its_own_has_one_line_per_step():
    stream = io.StringIO()
    with LogConsole(2, 1, stream, clock=lambda: NOW, eta=True, loss_name="policy loss") as console:
        for step in (1, 2):
            console.log_step(_step(step), {"rewards_mean": 0.5}, line=f"step {step} | reward 0.5000")
        console.log_evaluation(2, 1.5, {})
    first, second, *evaluation = stream.getvalue().splitlines()
    assert first.startswith(
        "step 1 | reward 0.5000 | policy loss 6.1598e+00 | grad norm 1.095 | lr 6.00e-05 | ETA "
    )
    assert second.startswith("step 2 | ") and "policy loss value: 1.500000E+00" in evaluation[1]
    assert "lm loss" not in stream.getvalue()


def test_log_line_is_megatrons_character_for_character():
    assert _log([_step(609)]) == (
        " [2025-09-07 23:58:47.123456] iteration      609/  500000 | consumed samples:        19488 | "
        "elapsed time per iteration (ms): 438.3 | throughput per GPU (TFLOP/s/GPU): 367.5 | "
        "learning rate: 5.999998E-05 | global batch size:    32 | lm loss: 6.159759E+00 | "
        "loss scale: 131072.0 | grad norm: 1.095 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n"
    )


def test_log_line_holds_the_means_and_counts_of_its_interval():
    steps = [
        _step(1, loss=4.0, step_time_ms=100.0, tflops_per_device=10.0),
        _step(2, loss=2.0, step_time_ms=300.0, tflops_per_device=30.0, skipped=1),
        _step(3, loss=math.nan, step_time_ms=200.0, tflops_per_device=20.0, nan_iterations=1),
    ]
    line = _log(steps, interval=3)
    assert MEGATRON_LINE.match(line.rstrip("\n"))
    assert "elapsed time per iteration (ms): 200.0 |" in line
    assert "(TFLOP/s/GPU): 23.3 |" in line  # work over time, not a mean of rates
    assert "lm loss: 4.000000E+00" in line  # of the steps that were not skipped
    assert "skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_a_skipped_steps_loss_counts_where_there_is_no_other():
    assert "lm loss: 2.000000E+00" in _log([_step(1, loss=2.0, skipped=1)])


def test_further_losses_come_after_the_lm_loss_as_in_megatron():
    stream = io.StringIO()
    with LogConsole(2, 2, stream, clock=lambda: NOW) as console:
        for step, loss in ((1, 1.0), (2, 2.0)):
            console.log_step(_step(step), {}, {"load_balancing_loss": loss, "mtp_1 loss": 3.5})
    expected = " | lm loss: 6.159759E+00 | load_balancing_loss: 1.500000E+00 | mtp_1 loss: 3.500000E+00 | loss scale: "
    assert expected in stream.getvalue()


def test_lines_come_at_the_interval_and_at_the_last_step():
    lines = _log([_step(step) for step in range(1, 13)], total=12, interval=5).splitlines()
    assert [int(re.search(r"iteration +(\d+)/", line).group(1)) for line in lines] == [5, 10, 12]


def test_lost_loss_is_printed_as_nan_and_never_left_out():
    assert "lm loss: NAN | " in _log([_step(1, loss=math.nan, nan_iterations=1)])


def test_unknown_figures_are_left_out_of_the_line():
    line = _log([_step(1, tflops_per_device=None, grad_norm=None, loss_scale=None)])
    assert "throughput" not in line and "grad norm" not in line
    assert "loss scale: 1.0 |" in line


def test_evaluation_lines_are_megatrons():
    stream = io.StringIO()
    LogConsole(500, 10, stream).log_evaluation(100, 6.159759)
    line = " validation loss at iteration 100 | lm loss value: 6.159759E+00 | lm loss PPL: 4.733140E+02 | "
    rule = "-" * (len(line) + 1)
    assert stream.getvalue() == f"{rule}\n{line}\n{rule}\n"


def _live(report, total=500, interval=10, width=100):
    stream = io.StringIO()
    rich_console = Console(file=stream, force_terminal=True, width=width)
    with LiveConsole(total, interval, rich_console, refresh_seconds=0) as console:
        report(console)
    return stream.getvalue()


def _plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_terminal_shows_a_live_line_for_each_step():
    text = _plain(_live(lambda console: [console.log_step(_step(step)) for step in range(1, 4)]))
    assert re.search(r"step 3/500 +━+ ETA 0:03:38  loss 6\.1598  lr 6\.00e-05  74\.8k tok/s", text)


def test_a_line_of_grpo_leads_with_the_reward_and_fits_a_hundred_columns():
    metrics = {"rewards_mean": 0.90624, "entropy": 0.0749, "completion_length": 6.7922}
    step = _step(10, loss=0.0197, max_memory_gb=None, mfu=None)
    lines = _plain(_live(lambda console: console.log_step(step, metrics))).splitlines()
    kept = [line.strip() for line in lines if line.startswith(" 10/500")]
    assert kept == [
        "10/500  reward 0.9062  entropy 0.0749  length 6.7922  loss 0.0197  grad 1.09  74.8k tok/s  438 ms"
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_live_line_never_wraps_and_keeps_step_and_eta(width):
    text = _plain(_live(lambda console: console.log_step(_step(499, loss=10.2918)), width=width))
    states = re.split(r"[\r\n]", text)
    assert all(len(state) <= width for state in states)
    assert any("step 499/500" in state and "ETA 0:00:0" in state for state in states)


@pytest.mark.parametrize(
    ("width", "lines"), [(40, ["saved runs/a/checkpoints/step_00000012 in", "0.3 s"]), (20, None)]
)
def test_a_terminals_lines_break_between_words_and_leave_a_path_whole(width, lines):
    note = "saved runs/a/checkpoints/step_00000012 in 0.3 s"
    text = _plain(_live(lambda console: console.note(note), width=width + 1))
    assert "\n".join(lines or [note]) in re.sub(r"[ \r]*\n", "\n", text)


def test_terminal_keeps_one_line_an_interval_and_one_an_evaluation():
    def report(console):
        for step in range(1, 21):
            console.log_step(_step(step, skipped=int(step == 12), loss_scale=None))
        console.log_evaluation(20, 2.0)
        console.note("saved runs/[a]/checkpoints/step_00000020")

    kept = [
        line for line in _plain(_live(report, width=120)).splitlines() if "step " not in line and line.strip()
    ]
    first = (
        " 10/500  loss 6.1598  grad 1.09  lr 6.00e-05  74.8k tok/s  438 ms  368 TFLOP/s  MFU 37.1%  64.8 GB"
    )
    assert [line.strip("\r") for line in kept][:3] == [
        first,
        first.replace(" 10/", " 20/") + "  1 skipped",
        " 20/500  validation loss 2.0000  perplexity 7.39",
    ]
    assert "saved runs/[a]/checkpoints/step_00000020" in _plain(_live(report))
    assert len(first) <= 100


def test_an_evaluation_has_a_bar_on_a_terminal_and_a_line_in_a_pipe():
    def report(console):
        for done in range(6):
            console.show_evaluation_progress(20, done, 5)
            bars.append(len(console._progress.tasks) if live else None)

    bars, live = [], True
    assert re.search(r"evaluating 3/5 ━", _plain(_live(report))) and bars == [2] * 5 + [1]
    stream, live = io.StringIO(), False
    report(LogConsole(500, 10, stream))
    assert stream.getvalue() == " evaluating after iteration 20 on 5 global batches\n"


def test_terminal_shows_a_lost_loss():
    text = _plain(
        _live(lambda console: console.log_step(_step(10, loss=math.nan, nan_iterations=1)), width=120)
    )
    assert "loss NaN" in text and "1 NaN" in text


def test_terminal_is_given_back_after_an_error():
    def report(console):
        console.log_step(_step(1))
        raise KeyError("in the loop")

    stream = io.StringIO()
    with (
        pytest.raises(KeyError, match="in the loop"),
        LiveConsole(500, 10, Console(file=stream, force_terminal=True)) as console,
    ):
        report(console)
    assert (
        "\x1b[?25l" in stream.getvalue() and stream.getvalue().rindex("\x1b[?25h") > 0
    )  # the cursor is back


def test_the_time_left_is_that_of_the_steps_and_of_what_comes_between(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("megalith.report.console.time.monotonic", lambda: now[0])
    left = EtaEstimator(100)
    for step in range(1, 21):
        now[0] = 50.0 + 2 * step + (100 if step >= 11 else 0)  # a save of 100 s after ten steps
        left.add(_step(step, step_time_ms=2000.0))
        if step in (1, 10):
            assert str(left) == str(timedelta(seconds=2 * (100 - step)))
    assert str(left) == str(timedelta(seconds=round(80 * (2 + 100 / 19))))


def test_kind_of_console_follows_the_stream():
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as reader, os.fdopen(write_end, "w") as pipe:
        with open_console(10, LogConfig(log_interval=1), pipe) as console:
            console.log_step(_step(1))
        pipe.close()
        line, eta = reader.read().rstrip("\n").split(" ETA: ")
        assert MEGATRON_LINE.match(line) and eta == "0:00:04 |"
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal:
        with open_console(10, LogConfig(log_interval=1), terminal) as console:
            console.log_step(_step(1))
        assert isinstance(console, LiveConsole)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal that was closed ends
        while part := os.read(parent, 65536):
            shown += part
    os.close(parent)
    assert "loss 6.1598" in _plain(shown.decode())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9.5, "9.5"),
        (999, "999"),
        (999.9, "1.00k"),
        (81234, "81.2k"),
        (124439808, "124M"),
        (8.03e9, "8.03B"),
    ],
)
def test_numbers_are_shortened_to_three_digits(value, text):
    assert format_si(value) == text
