"""The table of planted faults fits the sources, and its runner plants, counts and cleans up."""

import ast
import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mutation_trials import Mutant, read_results, read_table, select, store_score

ROOT = Path(__file__).parents[1]
TABLE = read_table()
ROOMS = {
    *(
        "bridge",
        "checkpoint",
        "comm",
        "config",
        "data",
        "dialects",
        "generation",
        "launch",
        "models",
        "ops",
        "optim",
    ),
    *("parallel", "planner", "report", "rl", "training"),
}


@functools.cache
def source_of(file: str) -> str:
    return (ROOT / "megalith" / file).read_text(encoding="utf-8")


@functools.cache
def functions_in(path: str) -> set[str]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_fault_is_a_change_of_the_present_source_that_python_reads():
    stale = []
    for mutant in TABLE:
        try:
            planted = mutant.plant(source_of(mutant.file))
        except ValueError as error:
            stale.append(str(error))
            continue
        assert planted != source_of(mutant.file), mutant.name
        compile(planted, mutant.file, "exec", ast.PyCF_ONLY_AST)
    assert not stale, "\n".join(stale)


def test_every_fault_names_tests_that_there_are():
    for mutant in TABLE:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert not name or name.partition("[")[0] in functions_in(path), f"{mutant.name}: {test}"


def test_faults_are_of_all_rooms_and_named_once():
    assert len(TABLE) >= 150
    assert {mutant.file.partition("/")[0] for mutant in TABLE} >= ROOMS
    assert not [name for name, count in Counter(mutant.name for mutant in TABLE).items() if count > 1]
    assert all(mutant.fault[-1] != "." for mutant in TABLE)


def test_a_fault_that_no_longer_fits_says_how_to_go_on():
    mutant = Mutant("optim/step.py", "a fault", "no such line", "", ("tests/optim/test_schedule.py",))
    with pytest.raises(
        ValueError, match=r"the old text occurs 0 times in megalith/optim/step\.py, not once\. Adapt"
    ):
        mutant.plant(source_of("optim/step.py"))


def test_faults_are_selected_by_text_or_by_seed():
    assert {mutant.file for mutant in select(TABLE, ["optim/lion"])} == {"optim/lion.py"}
    chosen = select(TABLE, sample=5, seed=1)
    assert len(chosen) == 5 and chosen == select(TABLE, sample=5, seed=1) != select(TABLE, sample=5, seed=2)


RUN_IN_COPIES = """
import json, sys
from pathlib import Path
import mutation_trials
from mutation_trials import Mutant, copy_tree, run_mutants
folder = Path(sys.argv[1])
mutation_trials.COPIED = "megalith", "tests", "absent"
trees = [copy_tree(folder / str(number) / "tree", folder / "source") for number in range(2)]
mutants = [Mutant(**fields | {"tests": tuple(fields["tests"])}) for fields in json.loads(sys.argv[2])]
for limit, some in (mutation_trials.LIMIT, mutants[:2]), (1.0, mutants[2:]):
    for _, result in run_mutants(some, trees, limit):
        print(json.dumps(vars(result)))
"""


def test_the_runner_plants_in_copies_and_counts(tmp_path):
    source = tmp_path / "source"
    (source / "megalith").mkdir(parents=True)
    (source / "tests").mkdir()
    (source / "megalith" / "some.py").write_text("a = 1\nb = 2\n")
    (source / "tests" / "test_some.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "def test_a():\n"
        "    text = Path('megalith/some.py').read_text()\n"
        "    assert 'a = 1' in text\n"
        "    time.sleep(100 * ('sleeps' in text))\n"
    )
    faults = {"wrong": ("a = 1", "a = 3"), "kept": ("b = 2", "b = 3"), "slow": ("b = 2", "b = 'sleeps'")}
    mutants = [Mutant("some.py", name, *change, ("tests/test_some.py",)) for name, change in faults.items()]
    # the runner forks, which is safe only in a process without the threads that other tests have started here
    words = sys.executable, "-c", RUN_IN_COPIES, str(tmp_path), json.dumps([vars(each) for each in mutants])
    run = subprocess.run(words, cwd=ROOT / "tests", capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    file = tmp_path / "results.jsonl"
    file.write_text(run.stdout)
    stored = read_results(file)
    assert {result.name: result.noticed_by for result in stored.values()} == {
        "some.py: wrong": "tests/test_some.py::test_a",
        "some.py: kept": "",
        "some.py: slow": "time limit",
    }
    assert set(stored) == {each.key for each in mutants}
    trees = [tmp_path / str(number) / "tree" for number in range(2)]
    assert all((tree / "megalith" / "some.py").read_text() == "a = 1\nb = 2\n" for tree in trees)
    store_score(mutants[:2], stored, tmp_path / "score.json")
    score = json.loads((tmp_path / "score.json").read_text())["noticed_by"]
    assert score == {"some.py: wrong": "tests/test_some.py::test_a", "some.py: kept": ""}
