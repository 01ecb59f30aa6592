"""Every `megalith bench` entry and every `python -m benchmarks.*` runs in small on a CPU.

The cases fork the programs that they start, which is safe only in a process without threads. So each file of cases
runs in a process of its own that is forked from one without threads.
"""

import os
from pathlib import Path

import forked
import pytest
from default_cases import in_full


@pytest.mark.parametrize(
    ("file", "marks"),
    [
        ("benchmark_cases.py", "not full"),
        ("benchmark_module_cases.py", "not full"),
        in_full("benchmark_cases.py", "full"),
    ],
)
def test_benchmarks_run_in_small(file, marks):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = [
        "-m",
        "pytest",
        Path(__file__).parent / file,
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
