"""Recorded durations of tests: they order the files of a session and mark long tests.

`pytest --store-durations` writes durations.json: seconds per test function, all cases together that `make test` runs.
Run it on the whole suite after larger changes. `python tests/durations.py` prints the sums of folders and files.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
LONG = 4.0  # seconds from which a test is marked as long
STORED = 0.5  # seconds; shorter tests are not stored


def function_of(nodeid: str) -> str:
    """Return a test's id without its parameters, relative to the folder of tests."""
    return nodeid.partition("[")[0].removeprefix("tests/")


class Durations:
    """Plugin that orders, marks and records tests by duration.

    Args:
        config: pytest's configuration.
        file: JSON file of seconds by test function. null: not measured yet; counts as LONG.
    """

    def __init__(self, config: pytest.Config, file: Path = FILE):
        self._stores = config.getoption("store_durations", False) and not hasattr(config, "workerinput")
        self._file = file
        self._stored = json.loads(file.read_text("utf-8")) if file.exists() else {}
        self._measured: dict[str, float] = defaultdict(float)

    def seconds(self, function: str) -> float:
        """Return the recorded seconds of a test function, 0 if unknown."""
        seconds = self._stored.get(function, 0.0)
        return LONG if seconds is None else seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the files that take longest first, and mark nine of ten cases of long tests."""
        functions = {item: function_of(item.nodeid) for item in items if not item.get_closest_marker("full")}
        files = Counter()
        for function in dict.fromkeys(functions.values()):  # in one order: all workers must get the same sums
            files[function.partition("::")[0]] += self.seconds(function)
        items.sort(key=lambda item: -files[function_of(item.nodeid).partition("::")[0]])
        cases = Counter()
        for item, function in functions.items():
            if self.seconds(function) >= LONG:
                cases[function] += 1
                if cases[function] % 10:
                    item.add_marker("long")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._measured[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        if not self._stores:
            return
        merged = self._stored | {name: round(seconds, 1) for name, seconds in self._measured.items()}
        kept = {
            name: seconds
            for name, seconds in sorted(merged.items())
            if (seconds is None or seconds >= STORED)
            and (self._file.parent / name.partition("::")[0]).exists()
        }
        self._file.write_text(json.dumps(kept, indent=0) + "\n", "utf-8")


def main() -> None:
    """Print the recorded seconds of each folder and of its files, the longest first."""
    folders, files = Counter(), Counter()
    for function, seconds in json.loads(FILE.read_text("utf-8")).items():
        file = function.partition("::")[0]
        files[file] += seconds or 0.0
        folders[str(Path(file).parent)] += seconds or 0.0
    print(f"{sum(folders.values()):7.0f} s of tests that take {STORED} s or more, over all workers")
    for folder, total in folders.most_common():
        print(f"{total:7.0f} {folder}")
        for file, seconds in files.most_common():
            if str(Path(file).parent) == folder and seconds >= LONG:
                print(f"{seconds:15.0f} {Path(file).name}")


if __name__ == "__main__":
    main()
