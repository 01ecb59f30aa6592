"""The report's page: every section of what runs wrote, nothing of it acting, quick and complete for long runs."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from default_cases import by_default
from report_runs import EVIL, run_folder, write_lines

from megalith.cli.main import main
from megalith.errors import DataError
from megalith.report import run_files
from megalith.report.charts import downsample, tick_labels
from megalith.report.page import write_report
from megalith.report.run_files import RunFiles, metric_points

VOID = {"meta", "link", "br", "img", "input"}
SECTIONS = [
    "Summary", "Rewards and completions", "Training", "Speed and memory", "Experts", "FP8", "Further figures",
    "Memory by part", "A step by rank", "Pipeline", "Settings", "Machine and starts", "Events",
]  # fmt: skip


class Page(HTMLParser):
    """Reads a page: its tags, and those that are left open or closed without having been opened."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.wrong, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text.append(data)

    def of(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [run_folder(folder / "a"), run_folder(folder / "b", start=7.0, evil=EVIL)]
    return Page(write_report(list(map(str, runs)), folder / "out" / "report.html").read_text())


def test_every_section_stands_on_the_page_with_its_figures(page):
    assert not page.wrong and not page.open
    ids = [attributes["id"] for attributes in page.of("section")]
    assert ids == [name.lower().replace(" ", "-") for name in SECTIONS]
    charts = [attributes["aria-label"] for attributes in page.of("svg")]
    for title in (
        "policy loss",
        "learning rate",
        "gradient norm, before clipping",
        "tokens/s/device",
        "MFU",
        "mean reward",
    ):
        assert title in charts
    for name in ("a", "b"):  # in the charts of the loss and of the mean reward
        assert "".join(page.text).count(f"{name}, validation") == 2
    words = " ".join(page.text)
    for shown in ("loss_spike", "stored checkpoints: steps 20", "updates skipped: 1", "train.seed"):
        assert shown in words


def test_nothing_that_a_run_names_acts_on_the_page(page):
    allowed = {"script": 1, "img": 0, "iframe": 0, "link": 1}
    assert {tag: len(page.of(tag)) for tag in allowed} == allowed
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on")]
    addresses = [attributes.get("href") or attributes.get("src") for _, attributes in page.tags]
    assert all(one.startswith(("#", "data:,")) for one in addresses if one)
    assert "\x1b" not in "".join(page.text) and "\\x1b" in "".join(page.text)


def test_the_curves_are_the_figures_that_were_logged(page):
    plot = next(a for a in page.of("div") if a.get("class") == "plot" and a["data-x"] == "1.0 60.0")
    low, high = map(float, plot["data-y"].split())
    dots = [a for a in page.of("path") if a.get("class") == "dots c0" and "validation" in a["data-name"]]
    x, y = map(float, re.fullmatch(r"M(\S+) (\S+)h0", dots[0]["d"]).groups())
    assert x == 1000 and high - (high - low) * y / 1000 == pytest.approx(0.5, abs=1e-3)  # of the reward


def test_ten_megabytes_of_metrics_are_a_small_page_in_seconds_with_every_spike(tmp_path):
    run = tmp_path / "long"
    line = {
        "lr": 1e-4,
        "grad_norm": 1.0,
        "step_time_ms": 5.0,
        "tokens_per_second_per_device": 9e3,
        "mfu": 0.4,
    }
    records = [
        {"step": n, "loss": 90.0 if n == 31_337 else 3.0, **line, "grad_norm": 77.0 if n == 4_242 else 1.0}
        for n in range(1, 80_001)
    ]
    write_lines(run / "metrics.jsonl", records)
    assert (run / "metrics.jsonl").stat().st_size > 9e6
    begun = time.process_time()
    page = write_report([str(run)], tmp_path / "long.html")
    assert time.process_time() - begun < 10
    assert page.stat().st_size < 1e6
    known = [(float(record["step"]), record["grad_norm"]) for record in records]
    few = downsample(np.array(known), 1000)
    assert len(few) <= 1004 and (4242.0, 77.0) in few and few == sorted(few) and few[-1] == known[-1]


def test_a_page_looks_at_each_figure_of_a_long_run_once(tmp_path, monkeypatch):
    figures, checked = [f"figure_{n}" for n in range(20)], []
    records = [{"step": n} | dict.fromkeys(figures, float(n % 7)) for n in range(1, 2001)]
    write_lines(tmp_path / "metrics.jsonl", records)
    column = run_files._column
    monkeypatch.setattr(run_files, "_column", lambda rows, key: checked.append(key) or column(rows, key))
    run = RunFiles.open("long", tmp_path)
    for name in figures:
        np.testing.assert_array_equal(run.curve(name), metric_points(records, name))
    checked.clear()
    write_report([str(tmp_path)], tmp_path / "long.html")
    assert all(checked.count(name) == 1 for name in figures)


OWN_FILES = ("experts.jsonl", "events.jsonl", "starts.jsonl", "completions.jsonl", "measured_step.json",
             "pipeline.json", "config.yaml")  # fmt: skip
DAMAGED = ("", "{}", "[]", "null", '{"step": 1, "tokens": [1], "ranks": 3, "stages": {"a": []}}',
           '{"step": 1, "tokens": {"0": ["x", 1e999]}, "ranks": [[1], {"peak": "x"}], "stages": [1, {"bytes": 2}]}',
           '{"hosts": 3, "versions": [1], "summary": 4, "rewards": 5, "layout": 6, "prompt": {}}', "{" * 100_000,
           "[" * 100_000, '{"ranks": [[["forward", 0, 0, 1.0, 1.0]]]}',
           '{"ranks": [[["forward", 0, 0, 1.0, 1%s]]]}' % ("0" * 400))  # fmt: skip


@pytest.mark.parametrize(
    "name", by_default(OWN_FILES, "experts.jsonl", "measured_step.json", "pipeline.json")
)
def test_a_damaged_file_costs_its_own_section_alone(tmp_path, name):
    run = run_folder(tmp_path / "run")
    for content in DAMAGED:
        (run / name).write_text(content)
        page = Page(write_report([str(run)], tmp_path / "r.html").read_text())
        assert not page.wrong and {"id": "training"} in page.of("section")


def test_figures_that_are_none_are_left_out(tmp_path):
    records = [{"step": n, "loss": value, "lr": value} for n, value in
               enumerate([1.0, "x", None, True, [1], {"a": 1}, 10**400, -1e300, 2.0], start=1)]  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", [*records, {"step": 10**400, "loss": 1.0}])
    page = Page(write_report([str(tmp_path)], tmp_path / "r.html").read_text())
    assert {a["data-y"] for a in page.of("div") if "data-y" in a} == {"0.95 2.05"}


@pytest.mark.parametrize("losses", [[0.1] * 199, [1e17], [0.0, 5e-324], [-5e-324]])
def test_figures_that_differ_by_rounding_alone_have_an_axis(tmp_path, losses):
    records = [{"step": n, "loss": loss, "lr": loss} for n, loss in enumerate(losses, start=1)]
    write_lines(tmp_path / "metrics.jsonl", [*records, {"step": 10**400, "nan_iterations": 1}])
    page = Page(write_report([str(tmp_path)], tmp_path / "r.html").read_text())
    for low, high in (map(float, a["data-y"].split()) for a in page.of("div") if "data-y" in a):
        assert low < losses[0] < high


def test_the_command_writes_into_the_first_run_and_names_a_folder_without_metrics(tmp_path, capsys):
    run = run_folder(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    for command in ("report", "plot"):
        assert main([command, str(run), "--output", "memory://bucket/x"]) == 2
        assert "pass a local file" in capsys.readouterr().err
    assert not (Path("memory:")).exists()
    with pytest.raises(DataError, match=r"nothing to show in .*none"):
        write_report([str(tmp_path / "none")], tmp_path / "x.html")


def test_a_run_in_a_store_is_read_there(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    run = run_folder(tmp_path / "run")
    fsspec.filesystem("memory").put(str(run), "/bucket/run", recursive=True)
    ours = RunFiles.open("run", "memory://bucket/run")
    here = RunFiles.open("run", run)
    assert ours.steps == here.steps and ours.events == here.events and ours.settings == here.settings
    assert json.dumps(ours.measured_ranks) == json.dumps(here.measured_ranks) and ours.timeline


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ((0.0, 50.0, 100.0, 150.0), ["0", "50", "100", "150"]),
        ((0.0, 5000.0, 10000.0), ["0", "5k", "10k"]),
        ((1e5, 1.2e6), ["100k", "1.2M"]),
        ((2e-5, 4e-5), ["2e-5", "4e-5"]),
        ((1.001, 1.002), ["1.001", "1.002"]),
        ((1.0000002, 1.00000025, 1.0000003), ["1.0000002", "+5e-8", "+1e-7"]),
        ((-0.04, 0.0), ["-0.04", "0"]),
        ((), []),
    ],
)
def test_ticks_are_told_apart_in_few_digits(ticks, labels):
    assert tick_labels(ticks) == labels


def test_the_page_of_a_policy_leads_with_its_reward(page):
    headings = [attributes["id"] for attributes in page.of("section")]
    assert headings[:2] == ["summary", "rewards-and-completions"]
    assert page.of("svg")[0]["aria-label"] == "mean reward" and "reward" in page.text


def test_long_labels_of_an_axis_get_room(tmp_path):
    """The drift of a policy is near 1, so its labels have many digits."""
    records = [{"step": n, "loss": 1.0, "mismatch": 1 + n * 1e-7} for n in range(1, 21)]
    write_lines(tmp_path / "metrics.jsonl", records)
    page = Page(write_report([str(tmp_path)], tmp_path / "report.html").read_text())
    plots = [attributes for attributes in page.of("div") if attributes.get("class") == "plot"]
    room = [int(re.search(r"--labels:(\d+)", plot["style"])[1]) for plot in plots]
    assert max(room) >= len("1.0000005")


def test_runs_carry_their_tokens_by_step(tmp_path):
    for name, batch in (("a", 8), ("b", 32)):
        records = [{"step": n, "loss": 3.0 - n, "consumed_samples": batch * n} for n in (1, 2)]
        write_lines(tmp_path / name / "metrics.jsonl", records)
        (tmp_path / name / "config.yaml").write_text("data: {seq_length: 64}\n")
    runs = [str(tmp_path / name) for name in "ab"]
    page = Page(write_report(runs, tmp_path / "report.html").read_text())
    tokens = [button["data-tokens"] for button in page.of("button") if "data-toggle" in button]
    assert tokens == ["0 0 1 512 2 1024", "0 0 1 2048 2 4096"]
    assert [one for one in page.of("input") if "data-align" in one]


def test_policies_have_a_chart_of_their_own_level_figures_a_sentence_and_prompts_an_answer_each(tmp_path):
    policy, other = run_folder(tmp_path / "policy"), tmp_path / "other"
    answers = [{"step": 60, "prompt": "1+1", "completion": f"answer{n}"} for n in range(16)]
    write_lines(policy / "completions.jsonl", [*answers, {"step": 60, "prompt": "2+2", "completion": "four"}])
    records = [{"step": n, "loss": 8.0 - n, "moe_dropped": 0.0, "level": 3} for n in (1, 2, 3)]
    write_lines(other / "metrics.jsonl", records)
    page = Page(write_report([str(policy), str(other)], tmp_path / "report.html").read_text())
    charts = [attributes["aria-label"] for attributes in page.of("svg")]
    assert charts[0] == "mean reward" and charts.index("policy loss") == charts.index("loss") + 1
    assert not {"level", "share of choices dropped"} & set(charts)
    assert {"At every step: level 3.", "At every step: share of choices dropped 0."} <= set(page.text)
    assert {"answer15", "four"} <= set(page.text) and "answer14" not in page.text
