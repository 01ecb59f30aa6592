"""Every `megalith bench` entry and every `python -m benchmarks.*` runs in small on a CPU.

The cases fork the programs that they start, which is safe only in a process without threads. So each file of cases
runs in a process of its own that is forked from one without threads.
"""

import os
from pathlib import Path

import forked
import pytest


@pytest.mark.parametrize("file", ["benchmark_cases.py", "benchmark_module_cases.py"])
def test_benchmarks_run_in_small(file):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = ["-m", "pytest", Path(__file__).parent / file, "-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = forked.run(words, environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
