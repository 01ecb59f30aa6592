"""Plugins and marks of the suite. Fixtures are in shared_fixtures.py, which the main process of pytest-xdist does not
import, so that its workers start 2 s earlier."""

import gc

import pytest
from default_cases import COLLECTED
from durations import Durations
from fault_items import FaultItems

COMPILING = "test_compiled_layers.py", "test_fused.py", "test_inductor.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # garbage collection took a tenth of the time of test collection
    config.pluginmanager.register(FaultItems(config), "fault_items")
    config.pluginmanager.register(Durations(config), "durations")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # scanning the imported modules took a sixth of the tests' time
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = {item.nodeid for item in items}
    for item in items:
        if item.path.parent.name in ("faults", "launch") or {"pool", "pool_of_eight"} & set(
            item.fixturenames
        ):
            item.add_marker("processes")
        if item.path.name in COMPILING or any(
            word in item.name for word in ("compiled", "traced", "one_graph")
        ):
            item.add_marker("compiled")
