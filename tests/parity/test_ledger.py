"""The correctness ledger: its table names tests that there are, its page is current, its command runs and counts."""

import ast
import functools
import json
from collections import Counter
from pathlib import Path

import pytest
from default_cases import COLLECTED
from mutation_trials import read_ledger_faults

from megalith.errors import ConfigError
from megalith.parity import ledger
from megalith.parity.ledger import CaseResult, format_results, main, page, read_ledger, run_cases, select

ROOT = Path(__file__).parents[2]
LEDGER = read_ledger(ROOT)
CASES = [report.case for report in LEDGER.reports]


@functools.cache
def marks_by_test(path: str) -> dict[str, list[str]]:
    """The test functions of a file, with the source of their decorators."""
    functions = [
        node
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    return {each.name: [ast.unparse(mark) for mark in each.decorator_list] for each in functions}


def test_every_case_is_a_test_and_most_run_by_default(request):
    """By the sources; and by the items of this session if it is that of `make test`."""
    for case in CASES:
        path, _, test = case.partition("::")
        assert test.partition("[")[0] in marks_by_test(path), case
    if not any("::" in word for word in request.config.args):
        assert not absent_cases(CASES, request.config.stash[COLLECTED])
    collected = {item.nodeid for item in request.session.items}
    files = {name.partition("::")[0] for name in collected}
    if not files >= {case.partition("::")[0] for case in CASES} or request.config.option.keyword:
        return
    by_default = [
        case for case in CASES if case in collected or any(name.startswith(f"{case}[") for name in collected)
    ]
    assert len(by_default) > 0.8 * len(CASES)


def absent_cases(cases: list[str], nodes: set[str]) -> list[str]:
    """Return the cases with parameters that are none of these nodes, although their files are among them."""
    files = {node.partition("::")[0] for node in nodes}
    return [case for case in cases if "[" in case and case.partition("::")[0] in files and case not in nodes]


def test_cases_whose_parameters_have_changed_are_noticed():
    assert not absent_cases(["a.py::test[x]", "b.py::test[x]", "a.py::test"], {"a.py::test[x]"})
    assert absent_cases(["a.py::test[x]"], {"a.py::test[y]"}) == ["a.py::test[x]"]


def test_reports_are_named_once_and_enough_of_them_have_a_case():
    names = Counter(row.name for row in (*LEDGER.reports, *LEDGER.uncovered))
    assert not [name for name, count in names.items() if count > 1]
    assert len({(report.repository, report.number) for report in LEDGER.reports}) >= 60
    for report in LEDGER.reports:
        assert report.symptom[-1] == "." and report.bound and report.planted.rstrip(".") == report.planted


def test_every_case_has_noticed_a_planted_fault():
    """By the stored score of `mutation_trials.py --ledger --store`, unless the test plants the fault itself."""
    faults, stored = (
        read_ledger_faults(),
        json.loads((ROOT / ledger.SCORE).read_text(encoding="utf-8"))["ledger"],
    )
    for report in LEDGER.reports:
        if report.name in faults:
            mutant = faults[report.name]
            assert (
                mutant.plant(source := (ROOT / "megalith" / mutant.file).read_text(encoding="utf-8"))
                != source
            )
            assert stored[report.name], f"{report.case} did not notice: {report.planted}"
        else:
            assert report.planted.endswith("by the test itself"), report.name


def test_the_page_is_that_of_the_table():
    text = (ROOT / ledger.PAGE).read_text(encoding="utf-8")
    assert text == page(LEDGER), "run `python -m megalith.parity.ledger --write`"


def test_the_command_runs_nodes_and_counts_what_failed(tmp_path, monkeypatch, capfd):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_all(x): pass\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_one(x): assert x == 1\n"
        "def test_skipped(): pytest.skip()\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    names = "all", "one", "skipped", "one[1]", "no_longer_there[1]"
    named = {name: f"tests/test_some.py::test_{name}" for name in names}
    results = run_cases(named.values(), tmp_path)
    assert [results[named[name]].passed for name in names] == [True, False, False, True, False]
    capfd.readouterr()
    monkeypatch.setattr(
        ledger,
        "run_cases",
        lambda cases: {case: CaseResult(case != LEDGER.reports[0].case, 1.5) for case in cases},
    )
    assert main(["--only", "megatron-lm#673"]) == 0
    assert capfd.readouterr().out == "held       1.5 s  NVIDIA/Megatron-LM#673\n1 reports, 1 held, 0 failed\n"
    assert main([]) == 1
    assert f"{len(CASES)} reports, {len(CASES) - 1} held, 1 failed" in capfd.readouterr().out
    assert main(["--list"]) == 0 and CASES[0] in capfd.readouterr().out
    failed = format_results(LEDGER.reports[:1], {CASES[0]: CaseResult(False, 2.0)})
    assert failed.startswith("failed     2.0 s  NVIDIA/Megatron-LM#7452 (2)") and CASES[0] in failed


def test_an_installed_package_and_an_unknown_report_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="in a clone of the repository"):
        read_ledger(tmp_path)
    assert len(select(LEDGER.reports, ["Megatron-LM#7452"])) > 3
    with pytest.raises(ConfigError, match=r"no row of tests/ledger\.toml is Megatron-LM#1"):
        select(LEDGER.reports, ["Megatron-LM#1"])
