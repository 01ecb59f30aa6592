"""`megalith watch` shows how far runs are from what they write, and ends with them."""

import io

import pytest
from report_runs import EVIL, run_folder, write_lines
from rich.console import Console

from megalith.cli.main import main
from megalith.report.text_curve import sparkline
from megalith.report.watch import watch


def shown(folders, width=160, **more) -> str:
    stream = io.StringIO()
    watch(list(map(str, folders)), Console(file=stream, width=width, force_terminal=False), 1.0, **more)
    return stream.getvalue()


def test_a_row_has_the_newest_figures_and_the_time_left_by_the_last_steps(tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "config.yaml").write_text("train: {train_iters: 3660}")
    row = next(line for line in shown([run], once=True).splitlines() if "3,660" in line)
    for figure in (
        "60/3,660",
        "2.3983",
        "1.0000",
        "2.5000",
        "1.00e-03",
        "5.00k",
        "40.0%",
        "3.0",
        "0:00:40",
        "ago",
    ):
        assert figure in row
    assert "far above" in shown([run], once=True)
    narrow = shown([run], width=40, once=True)
    assert (
        all(figure in narrow for figure in ("run ", "60/3,660", "2.3983", "0:00:40"))
        and "wrote" not in narrow
    )
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    assert "reward" not in shown([run], once=True)


def test_it_ends_when_every_run_has_made_its_last_step(tmp_path):
    run = run_folder(tmp_path / "run", steps=59)
    (run / "config.yaml").write_text("train: {train_iters: 60}")
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        write_lines(run / "metrics.jsonl", [{"step": 60, "loss": 1.0}])

    assert "60/60" in shown([run], sleep=sleep) and waits == [1.0]


@pytest.mark.parametrize(
    "config", ["", "train: {train_iters: x}", "train: {train_iters: 99999999999999999999}", "[" * 9999]
)
def test_a_strangers_run_and_one_that_has_not_begun_are_rows(tmp_path, config):
    run = run_folder(tmp_path / "run", evil=EVIL)
    (run / "config.yaml").write_text(config)
    write_lines(run / "evaluations.jsonl", [{"step": 1, "validation_loss": "x"}])
    text = shown([run, tmp_path / "none"], once=True)
    assert "not yet" in text and "\x1b" not in text and "\\x1b" in text


def test_the_command_looks_once_where_there_is_no_terminal(tmp_path, capsys):
    assert main(["watch", str(run_folder(tmp_path / "run"))]) == 0
    assert "2.3983" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["nan", "0", "1e30"])
def test_an_interval_that_no_clock_has_is_refused(tmp_path, capsys, interval):
    assert main(["watch", str(run_folder(tmp_path / "run")), "--interval", interval]) == 2
    assert "must be between 0.1 and 86,400 seconds" in capsys.readouterr().err


def test_a_sparkline_falls_with_its_values():
    assert sparkline([8, 6, 4, 1], 4) == "█▆▄▁" and sparkline([]) == "" and sparkline([2, 2], 2) == "▁▁"
