"""The faults that a run must survive, and the pytest plugin that checks that tests cover all of them.

Tests are marked with the fault's number, `@pytest.mark.fault(13)`. At the end of a session of the whole suite, every
fault must have such tests, and all of them must have run and passed; a skipped test covers nothing. A partial session
checks only the faults of the tests that it selected. Workers of pytest-xdist send their marks to the main process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CRITERIA = {
    1: "a random rank killed at random moments: final weights bitwise those of an uninterrupted run",
    2: "a rank killed in every phase of a save: the newest whole step loads, and there is always one",
    3: "launcher, store host or background saver killed: no orphans, a bounded error",
    4: "a rank stopped, or one that leaves out a collective: noticed in time, rank and collective named",
    5: "a save or an evaluation longer than the collectives' time-out ends no run",
    6: "a shard flipped, truncated, deleted or swapped: a checksum names the file, the step before is used",
    7: "a disk that refuses in the midst of a save: training goes on or ends cleanly, the old step is whole",
    8: "weights that change behind a background save: the snapshot is what it was",
    9: "save, exit and load against going straight on: bitwise equal",
    10: "resharded from 8 to 4, 6, 1 and 8 ranks: tensors and moments bitwise, losses within tolerance",
    11: "20 random restarts with changes of the world's size: each sample once, in the same order",
    12: "going on at an epoch's end, at step 0 and at the last step",
    13: "NaN on one rank: all skip together, it is counted and named, and the run ends after so many",
    14: "a loss 50 times as high: rolled back, its data left out, and logged",
    15: "a bit flipped in one replica's weights: found within so many steps, the rank named",
    16: "stop signals, and a second one in the midst of a save: a checkpoint or none, each with its exit code",
    17: "a worker lost: on with fewer, the global batch kept",
    18: "a rank twice as slow: named within so many steps",
    19: "a crash loop: backs off, stops, keeps the first traceback",
    20: "damaged data of every kind: an error with file, line and offset; no garbage read as tokens",
    21: "pickles in every path that can be loaded: nothing runs",
    22: "safetensors with a huge header, overlapping offsets, another type or shape: refused",
    23: "names that leave the folder and symbolic links in manifests and index files: refused",
    24: "YAML that builds objects, expands without end or has unknown keys: refused, the key named",
    25: "two jobs in one output folder: a lock, and a clear refusal",
    26: "many saves: disk, descriptors, threads and memory stay flat",
}


def unmet(marked: Mapping[str, set[int]], outcomes: Mapping[str, str], is_complete: bool) -> list[str]:
    """Return a line per fault that no passed test covers.

    Args:
        marked: numbers of the faults by test.
        outcomes: outcome by test.
        is_complete: the session ran the whole suite, so that every fault must be covered.
    """
    tests = defaultdict(list)
    for test, items in marked.items():
        for item in items:
            tests[item].append(test)
    problems = []
    for item in CRITERIA.keys() | tests.keys() if is_complete else tests:
        if item not in CRITERIA or not tests[item]:
            problems.append(f"fault {item}: {CRITERIA.get(item, 'is none of the list')}: no test shows it")
        for test in tests[item]:
            if (outcome := outcomes.get(test, "not run")) != "passed":
                problems.append(f"fault {item}: {test} was {outcome}, which shows nothing")
    return sorted(problems)


class FaultItems:
    """Plugin that fails a session if its tests passed but left a fault uncovered."""

    def __init__(self, config: pytest.Config, tests: Path = TESTS):
        self._config, self._tests = config, tests
        self._marked: dict[str, set[int]] = {}
        self._outcomes: dict[str, str] = {}
        self._deselected = False
        self._problems: list[str] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._deselected |= any(item.get_closest_marker("fault") for item in items)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if numbers := {number for mark in item.iter_markers("fault") for number in mark.args}:
                self._marked[item.nodeid] = numbers

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = (
                "an expected failure" if hasattr(report, "wasxfail") else report.outcome
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        if (output := getattr(node, "workeroutput", None)) is None:  # the worker has crashed
            self._deselected = True
            return
        marked, deselected = output["fault_items"]
        self._marked |= {test: set(items) for test, items in marked.items()}
        self._deselected |= deselected

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            marked = {test: sorted(items) for test, items in self._marked.items()}
            output["fault_items"] = (marked, self._deselected)
            return
        if exitstatus != pytest.ExitCode.OK or self._config.option.collectonly:
            return
        paths = [
            Path(self._config.invocation_params.dir, arg.partition("::")[0]).resolve()
            for arg in self._config.args
        ]
        is_complete = not self._deselected and any(self._tests.is_relative_to(path) for path in paths)
        self._problems = unmet(self._marked, self._outcomes, is_complete)
        if self._problems:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for problem in self._problems:
            terminalreporter.write_line(problem, red=True)
