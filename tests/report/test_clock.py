"""The clocks of a run."""

import time

import forked
import pytest
import torch

from megalith.report.clock import StartupTimer, StepTimer, process_age


@pytest.mark.processes
def test_a_process_knows_its_age():
    program = "import time; time.sleep(0.3)\n"
    program += "from megalith.report.clock import process_age; print(process_age())"
    began = time.monotonic()
    age = float(forked.run(["-c", program]).stdout)
    assert 0.3 <= age <= time.monotonic() - began + 0.02  # the system counts in hundredths
    assert process_age() > 0


def test_the_parts_of_a_start_add_up_to_the_process_age(monkeypatch):
    ages = iter((2.0, 2.5, 7.5))
    monkeypatch.setattr("megalith.report.clock.process_age", lambda: next(ages))
    clock = StartupTimer()
    for part in ("imports", "data and model", "first step"):
        clock.mark(part)
    assert (
        str(clock)
        == "first step 7.5 s after the process was started: imports 2.0, data and model 0.5, first step 5.0"
    )


def test_a_system_that_tells_no_age_has_no_sentence(monkeypatch):
    monkeypatch.setattr("megalith.report.clock.process_age", lambda: None)
    clock = StartupTimer()
    clock.mark("imports")
    assert str(clock) == ""


def test_a_step_clock_gives_each_span_once():
    clock = StepTimer(torch.device("cpu"))
    for _ in range(2):
        clock.start()
        clock.stop()
    assert len(clock.milliseconds()) == 2 and clock.milliseconds() == []
