"""Recorded durations order the files, mark long tests, and are stored on request."""

import json
from pathlib import Path
from types import SimpleNamespace

from durations import LONG, Durations


class Item:
    def __init__(self, nodeid: str, *marks: str):
        self.nodeid, self.marks = nodeid, [*marks]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: str) -> None:
        self.marks.append(mark)


def durations(folder: Path, stored: dict, stores: bool = False) -> Durations:
    file = folder / "durations.json"
    file.write_text(json.dumps(stored))
    config = SimpleNamespace(getoption=lambda name, default: stores)
    return Durations(config, file)


def test_the_files_that_take_longest_come_first_and_stay_together(tmp_path):
    plugin = durations(
        tmp_path, {"a.py::test_x": 1.0, "b.py::test_y": 2.0, "b.py::test_z": 0.5, "c.py::test": None}
    )
    items = [
        Item(f"tests/{name}")
        for name in ("a.py::test_x", "b.py::test_y", "b.py::test_z", "c.py::test[1]", "d.py::t")
    ]
    plugin.pytest_collection_modifyitems(items)
    assert [item.nodeid[6] for item in items] == ["c", "b", "b", "a", "d"]


def test_nine_of_ten_cases_of_a_long_test_are_marked(tmp_path):
    plugin = durations(tmp_path, {"a.py::test_long": LONG, "a.py::test_short": LONG - 0.1})
    long, short = [Item(f"tests/a.py::test_long[{n}]") for n in range(20)], Item("tests/a.py::test_short")
    plugin.pytest_collection_modifyitems([*long, short])
    assert sum(item.marks == ["long"] for item in long) == 18 and not short.marks


def test_cases_of_make_test_all_are_neither_counted_nor_marked(tmp_path):
    plugin = durations(tmp_path, {"a.py::test_long": LONG, "a.py::test_full": 9.0, "b.py::test": LONG + 1})
    items = [Item(f"tests/a.py::test_long[{n}]", *["full"] * (n == 0)) for n in range(11)]
    items += [Item("tests/a.py::test_full", "full"), Item("tests/b.py::test")]
    plugin.pytest_collection_modifyitems(items)
    assert items[0].nodeid == "tests/b.py::test" and items[1].marks == items[-1].marks == ["full"]
    assert [item.marks for item in items[2:-1]] == [["long"]] * 9 + [[]]


def test_durations_of_all_cases_and_phases_are_stored(tmp_path):
    (tmp_path / "a.py").touch()
    plugin = durations(tmp_path, {"a.py::test_old": 7.0, "gone.py::test": 9.0}, stores=True)
    for nodeid, seconds in (("a.py::test[1]", 0.4), ("a.py::test[2]", 0.83), ("a.py::test_quick", 0.1)):
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=f"tests/{nodeid}", duration=seconds))
    plugin.pytest_sessionfinish()
    assert json.loads((tmp_path / "durations.json").read_text()) == {"a.py::test": 1.2, "a.py::test_old": 7.0}
