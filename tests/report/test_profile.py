"""The profiler traces the steps of its window and no others, and nothing at all outside it."""

import json

import pytest
import torch

from megalith.report.profiler import StepProfiler


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _train(profiler, steps):
    weight = torch.randn(16, 16, requires_grad=True)
    with profiler:
        for step in steps:
            profiler.before_step(step)
            (weight @ weight).sum().backward()


def _traced_steps(folder):
    events = json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
    return sorted({event["name"] for event in events if str(event.get("name", "")).startswith("step ")})


def test_trace_and_table_hold_the_window_and_its_operations(tmp_path):
    reports = []
    _train(StepProfiler(tmp_path, range(2, 4), reports.append), range(1, 7))
    assert _traced_steps(tmp_path) == ["step 2", "step 3"]
    table = (tmp_path / "profile" / "top_operations.txt").read_text()
    assert "aten::mm" in table and "Self CPU" in table
    trace, top = tmp_path / "profile" / "trace.json", tmp_path / "profile" / "top_operations.txt"
    assert reports == [f"profile of steps 2 to 3: {trace}, {top}"]


def test_window_cut_short_by_the_end_is_written(tmp_path):
    _train(StepProfiler(tmp_path, range(2, 100)), range(1, 4))
    assert _traced_steps(tmp_path) == ["step 2", "step 3"]


def test_window_cut_short_by_an_error_is_written_and_the_error_goes_on(tmp_path):
    with pytest.raises(KeyError, match="lost"), StepProfiler(tmp_path, range(1, 100)) as profiler:
        profiler.before_step(1)
        raise KeyError("lost")
    assert _traced_steps(tmp_path) == ["step 1"]


def test_resume_beyond_the_window_and_an_empty_window_write_nothing(tmp_path):
    _train(StepProfiler(tmp_path, range(2, 4)), range(10, 13))
    _train(StepProfiler(tmp_path, range(0)), range(1, 3))
    assert list(tmp_path.iterdir()) == []
