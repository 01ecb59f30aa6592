"""Each fault that a run has to survive is shown by tests that assert it, that run, and that pass (fault_items.py)."""

import ast
import functools
from pathlib import Path

import pytest
from fault_items import CRITERIA, TESTS, unmet

pytest_plugins = ["pytester"]

CHECKS = {
    "raises",
    "refused",
}  # functions that assert for their caller: pytest's, and a fixture of test_bad_input.py


@functools.cache
def marked_tests() -> dict[int, list[tuple[str, ast.FunctionDef]]]:
    """The tests of each item as they stand in the files, with their names."""
    found: dict[int, list[tuple[str, ast.FunctionDef]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    for number in map(ast.literal_eval, mark.args):
                        found.setdefault(number, []).append((f"{path.relative_to(TESTS)}::{node.name}", node))
    return found


def asserts(test: ast.FunctionDef) -> bool:
    called = {
        ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(test) if isinstance(node, ast.Call)
    }
    return any(isinstance(node, ast.Assert) for node in ast.walk(test)) or not called.isdisjoint(CHECKS)


@pytest.mark.parametrize("item", CRITERIA)
def test_each_item_has_tests_and_each_of_them_asserts(item):
    tests = marked_tests().get(item, [])
    assert tests, CRITERIA[item]
    assert [name for name, test in tests if not asserts(test)] == []


def test_no_test_shows_an_item_that_is_not_on_the_list():
    assert set(marked_tests()) == set(CRITERIA) == set(range(1, 27))


def test_an_item_is_met_by_tests_that_all_ran_and_passed():
    everything = {f"test_{item}": {item} for item in CRITERIA}
    passed = dict.fromkeys(everything, "passed")
    assert unmet(everything, passed, is_complete=True) == []
    assert unmet({"test_3": {3}}, passed, is_complete=False) == []
    assert len(unmet({"test_3": {3}}, passed, is_complete=True)) == 25
    (problem,) = unmet(everything, {**passed, "test_7": "skipped"}, is_complete=True)
    assert problem == "fault 7: test_7 was skipped, which shows nothing"
    (problem,) = unmet({**everything, "test_more": {7}}, passed, is_complete=True)
    assert "test_more was not run" in problem
    (problem,) = unmet({"test_27": {27}}, {"test_27": "passed"}, is_complete=False)
    assert "none of the list" in problem


@pytest.mark.parametrize(
    ("given", "words", "said"),
    [
        ("pass", ["-k", "other"], None),
        ("pass", ["test_a.py"], None),
        ("pass", [], "fault 2: *no test shows it"),
        ("pytest.skip()", ["test_a.py"], "fault 1: test_a.py::test_fault was skipped*"),
        ("pytest.xfail()", ["test_a.py"], "fault 1: test_a.py::test_fault was an expected failure*"),
    ],
)
def test_a_session_fails_for_faults_that_it_has_not_shown(pytester, given, words, said):
    pytester.makepyfile(
        conftest="""
            from fault_items import FaultItems
            def pytest_configure(config):
                config.addinivalue_line("markers", "fault")
                config.pluginmanager.register(FaultItems(config, config.rootpath))
        """,
        test_a=f"import pytest\n@pytest.mark.fault(1)\ndef test_fault(): {given}\ndef test_other(): pass",
    )
    pytester.makeini("[pytest]")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *words)
    assert result.ret == (0 if said is None else 1)
    if said:
        result.stdout.fnmatch_lines([said])


def test_the_suite_has_the_plugin(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("fault_items")
    assert Path(pytestconfig.rootpath, "tests").resolve() == TESTS.resolve()
