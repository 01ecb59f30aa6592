"""Every `megalith bench` entry and every `python -m benchmarks.*` runs in small on a CPU.

The cases fork the programs that they start, which is safe only in a process without threads. So they run in a process
of their own that is forked from one without threads.
"""

import os
from pathlib import Path

import forked
import pytest
from default_cases import in_full

FILES = [Path(__file__).parent / name for name in ("benchmark_cases.py", "benchmark_module_cases.py")]


@pytest.mark.parametrize("marks", ["not full", in_full("full")])
def test_benchmarks_run_in_small(marks):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = [
        "-m",
        "pytest",
        *FILES,
        "-m",
        marks,
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    ended = forked.run(words, environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
