"""Timelines as text, image and file, and `megalith pipeline show`."""

import argparse
import json
import subprocess
import sys

import pytest

from megalith.cli.pipeline_command import add_pipeline_show, run_pipeline_show
from megalith.errors import ConfigError, DataError
from megalith.parallel.pipeline.schedules import build_schedule
from megalith.parallel.pipeline.simulate import Durations, simulate
from megalith.parallel.pipeline.timeline import TIMELINE_FILE, read_timeline, write_timeline
from megalith.report.pipeline_drawing import draw_png, draw_text


def show(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_pipeline_show(parser)
    parsed = parser.parse_args(arguments)
    return run_pipeline_show(parsed)


def test_a_small_1f1b_is_drawn_unit_by_unit():
    text = draw_text(simulate(build_schedule("1f1b", 2, 3)), width=19)
    assert text.splitlines() == [
        "rank 0 01··aa2bb·cc",
        "rank 1 ·0aa1bb2cc··",
    ]


def test_weights_are_capitals():
    text = draw_text(simulate(build_schedule("zero_bubble", 2, 2)), width=14)
    assert text.splitlines() == ["rank 0 01·aAbB", "rank 1 ·0a1bAB"]


def test_each_chunk_has_a_row_that_is_blank_while_the_rank_is_elsewhere():
    rows = draw_text(simulate(build_schedule("interleaved", 2, 2, 2)), width=24).splitlines()
    assert rows == [
        "rank 0.0 01  ··  ·  aabb",
        "rank 0.1   01··aa·bb",
        "rank 1.0 ·01      aabb··",
        "rank 1.1 ·  0aa1bb    ··",
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 8), (8, 24), (8, 200)])
def test_text_fits_its_width(stages, micro_batches):
    timeline = simulate(build_schedule("1f1b", stages, micro_batches), Durations(1, 1, 1, p2p=0.1))
    rows = draw_text(timeline).splitlines()
    assert len(rows) == stages
    assert max(map(len, rows)) <= 120


def test_a_measured_timeline_goes_through_its_file_unchanged(tmp_path):
    timeline = simulate(build_schedule("zero_bubble", 2, 3), Durations(1.5, 1.25, 1.0, 0.5))
    write_timeline(tmp_path, timeline)
    assert read_timeline(tmp_path) == timeline


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no .*pipeline.json, which a run with a pipeline writes"),
        ("not json", "is not a timeline that a run wrote"),
        (json.dumps({"ranks": [[["sideways", 0, 0, 0.0, 1.0]]]}), "'sideways' is not a valid Kind"),
        (json.dumps({"ranks": [[["forward", 0, 0, 1.0, 0.0]]]}), "rank 0 has the action .* and start <= end"),
        (json.dumps({"ranks": [[]]}), "has a rank without actions"),
    ],
)
def test_a_missing_or_damaged_timeline_is_a_sentence(tmp_path, content, message):
    if content is not None:
        (tmp_path / TIMELINE_FILE).write_text(content)
    with pytest.raises(DataError, match=message):
        read_timeline(tmp_path)


def test_png_of_schedule_and_measured_run_beside_it(tmp_path, capsys):
    write_timeline(tmp_path, simulate(build_schedule("1f1b", 2, 4), Durations(9.0, 8.0, 8.5, 0.7)))
    png = tmp_path / "pictures" / "pipeline.png"
    arguments = ["--stages", "2", "--micro-batches", "4", "--png", str(png), "--measured", str(tmp_path)]
    assert show(*arguments) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "1f1b, 2 stages, 4 micro-batches: bubble 20.0%" in output
    assert "measured, " in output and " ms, bubble " in output


def test_png_of_many_ranks_and_chunks(tmp_path):
    timeline = simulate(build_schedule("interleaved", 4, 8, 2))
    assert draw_png(tmp_path / "a.png", [("interleaved", timeline)]).stat().st_size > 10_000


def test_show_chooses_interleaved_for_several_chunks_and_warns_of_few_micro_batches(capsys):
    assert show("--stages", "2", "--micro-batches", "4", "--virtual", "2") == 0
    assert "interleaved, 2 stages, 4 micro-batches, 2 chunks a rank" in capsys.readouterr().out
    assert show("--stages", "4", "--micro-batches", "2", "--durations", "1,1.2,0.8", "--p2p", "0.1") == 0
    assert "warning: 2 micro-batches per step are fewer than the 4" in capsys.readouterr().out


@pytest.mark.parametrize("durations", ["1,1", "1,x,1", "0,1,1", "1,1,inf"])
def test_impossible_durations_are_refused(durations):
    with pytest.raises(ConfigError, match="--durations must be three comma-separated numbers above 0"):
        show("--stages", "2", "--micro-batches", "4", "--durations", durations)


def test_showing_a_schedule_does_not_load_torch():
    code = (
        "import argparse, sys\n"
        "from megalith.cli.pipeline_command import add_pipeline_show as add, run_pipeline_show as run\n"
        "p = argparse.ArgumentParser(); add(p); assert 'megalith.report.pipeline_drawing' not in sys.modules\n"
        "a = p.parse_args(['--stages', '2', '--micro-batches', '2']); run(a); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
