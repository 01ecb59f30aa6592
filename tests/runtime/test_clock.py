"""The clocks of a run."""

import subprocess
import sys
import time

import torch

from megalith.runtime.clock import StepClock, process_age


def test_a_process_knows_its_age():
    program = (
        "import time; time.sleep(0.3); from megalith.runtime.clock import process_age; print(process_age())"
    )
    began = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    assert 0.3 <= age <= time.monotonic() - began + 0.02  # the system counts in hundredths
    assert process_age() > 0


def test_a_step_clock_gives_each_span_once():
    clock = StepClock(torch.device("cpu"))
    for _ in range(2):
        clock.start()
        clock.stop()
    assert len(clock.milliseconds()) == 2 and clock.milliseconds() == []
