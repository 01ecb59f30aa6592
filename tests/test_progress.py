"""What a long command says of its progress: nothing at first, a live line on a terminal, plain lines elsewhere."""

import io
import re
import sys

import pytest

from megalith import progress
from megalith.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def terminal(monkeypatch, term="xterm-256color"):
    monkeypatch.setenv("TERM", term)
    stream = io.StringIO()
    stream.isatty = lambda: True
    return stream


def run(clock, stream, seconds, total=6.4e9, unit="bytes", figures=None):
    """A command that does a sixteenth of `total`, or of 1600, a second."""
    clock[0] = 0.0
    with Progress("import", total, unit, stream=stream) as shown:
        for second in range(seconds):
            clock[0] = second + 1
            shown.update((total or 1600) / 16 * (second + 1), figures)
    return stream.getvalue()


def test_what_ends_within_two_seconds_says_nothing(clock, monkeypatch):
    assert run(clock, io.StringIO(), 1) == run(clock, terminal(monkeypatch), 1) == ""


def test_off_a_terminal_it_is_a_plain_line_now_and_then(clock):
    assert run(clock, io.StringIO(), 16).splitlines() == [
        "import: 12.5 % | 0.80 of 6.40 GB | 0.40 GB/s | ETA 0:00:14",
        "import: 75.0 % | 4.80 of 6.40 GB | 0.40 GB/s | ETA 0:00:04",
        "import: 6.40 of 6.40 GB in 16.0 s, 0.40 GB/s",
    ]


@pytest.mark.parametrize(
    ("total", "unit", "line"),
    [
        (320, "layouts", "import: 12.5 % | 40 of 320 layouts | 20 layouts/s | ETA 0:00:14"),
        (64e6, "bytes", "import: 12.5 % | 8.00 of 64.00 MB | 4.00 MB/s | ETA 0:00:14"),
        (None, "rows", "import: 200 rows | 100 rows/s"),
        (0, "rows", "import: 200 rows | 100 rows/s"),
    ],
)
def test_amounts_are_said_in_their_unit(clock, total, unit, line):
    assert run(clock, io.StringIO(), 2, total, unit).splitlines()[0] == line


def test_figures_of_the_commands_own_stand_in_their_place_and_it_says_its_own_end(clock):
    text = run(clock, io.StringIO(), 4, figures="12 documents")
    assert text == "import: 12.5 % | 12 documents | ETA 0:00:14\n"


@pytest.mark.parametrize("size", ["40", "200"])
def test_a_terminal_has_one_live_line_which_goes(clock, monkeypatch, size):
    monkeypatch.setenv("COLUMNS", size)
    text = run(clock, terminal(monkeypatch), 16)
    states = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
    assert "import" in states[1] and all(len(state) <= int(size) for state in states[:-2])
    figures = ["37.5 % ", "ETA 0:00:10", "2.40 of" if size == "40" else "2.40 of 6.40 GB | 0.40 GB/s"]
    assert any(all(figure in state for figure in figures) for state in states)
    assert text.endswith("import: 6.40 of 6.40 GB in 16.0 s, 0.40 GB/s\n")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


def test_colours_go_on_request_and_a_terminal_that_redraws_nothing_gets_plain_lines(clock, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[3\d", run(clock, terminal(monkeypatch), 9))
    dumb = run(clock, terminal(monkeypatch, "dumb"), 9)
    monkeypatch.setenv("COLUMNS", "0")
    for text in (dumb, run(clock, terminal(monkeypatch), 9)):
        assert "\x1b" not in text and text.startswith("import: 12.5 % | ")


def test_standard_output_goes_where_it_is_sent(clock, monkeypatch):
    stream, out = terminal(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with Progress("hash", 10, "tensors", stream=stream) as shown:
        clock[0] = 3.0
        shown.add()
        print("a digest")
    assert out.getvalue() == "a digest\n" and "digest" not in stream.getvalue()


def test_an_error_gives_the_terminal_back_and_says_no_end(clock, monkeypatch):
    stream = terminal(monkeypatch)
    with pytest.raises(KeyError), Progress("import", 10, stream=stream) as shown:
        clock[0] = 3.0
        shown.add()
        raise KeyError
    assert "\x1b[?25h" in stream.getvalue() and " in 3.0 s" not in stream.getvalue()
