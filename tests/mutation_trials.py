"""Plant one-line faults and count those that the tests of their neighbourhood notice (`make mutants`).

`tests/mutants.toml` lists the faults. Each is planted in a copy of the tree, never in the tree itself, and its tests
run in a fork of this process, which has torch loaded. A test that noticed a fault also runs once without any, and has
to pass. Results are appended to build/mutants.jsonl, from which --resume continues. --store writes tests/mutants.json,
from which `python -m megalith.parity.ledger --write` takes the score in docs/correctness.md.

    python tests/mutation_trials.py [--ledger] [--only TEXT …] [--sample N --seed S] [--resume | --survivors] [--store]
"""

import argparse
import ctypes
import datetime
import hashlib
import importlib
import json
import multiprocessing.util
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
LEDGER = ROOT / "tests" / "ledger.toml"
SCORE = ROOT / "tests" / "mutants.json"
RESULTS = ROOT / "build" / "mutants.jsonl"
COPIED = "megalith", "tests", "examples", "benchmarks", "deploy", "docs", "pyproject.toml", "README.md"
PRELOADED = (
    "numpy",
    "pytest",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("gpt2", "llama", "mixtral")),
)
LIMIT = 240.0  # seconds of a fault's tests
TIME_LIMIT = "time limit"
NOTHING_RUN = 4, 5  # exit codes of pytest: a test does not exist, or none is selected
PR_SET_CHILD_SUBREAPER = 36
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::\w+(?:\[.*?\](?= - |$))?|\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A one-line fault and the tests that have to notice it.

    Args:
        file: source file, from the package's folder.
        fault: description of the fault, without a full stop.
        old: text that occurs once in the file.
        new: text that replaces it.
        tests: pytest nodes, from the root of the checkout.
        survives: reason for which no test notices it; empty if one has to.
    """

    file: str
    fault: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.fault}"

    @property
    def key(self) -> str:
        """Return a hash of the fault and its tests, under which a result is stored."""
        return hashlib.sha256(repr((self.file, self.old, self.new, self.tests)).encode()).hexdigest()[:16]

    def plant(self, source: str) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: the old text occurs {count} times in megalith/{self.file}, not once. "
                f"Adapt the row of tests/mutants.toml to the present source.\n    {self.old}"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """The outcome of a fault's tests: the test that failed, TIME_LIMIT, or "" if all passed. Seconds of CPU time."""

    name: str
    key: str
    noticed_by: str
    seconds: float


def read_table(path: Path = TABLE) -> list[Mutant]:
    """Return the faults of the table."""
    rows = tomllib.loads(path.read_text("utf-8"))["mutant"]
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in rows]


def read_ledger_faults(path: Path = LEDGER) -> dict[str, Mutant]:
    """Return the fault of each report of the correctness ledger that has one, by `owner/name#number`.

    A row names a fault of the table, or has its own `file`, `old` and `new`. The report's case is its only test.
    """
    named = {each.name: each for each in read_table()}
    faults = {}
    for row in tomllib.loads(path.read_text("utf-8"))["report"]:
        if not (fault := row.get("fault")):
            continue
        report = f"{row['repository']}#{row['number']}" + (f" ({row['part']})" if "part" in row else "")
        if isinstance(fault, str):
            if fault not in named:
                raise ValueError(f"{report}: no row of {TABLE.name} is {fault}; adapt {LEDGER.name}")
            fault = {name: getattr(named[fault], name) for name in ("file", "old", "new")}
        faults[report] = Mutant(**fault, fault=f"{row['planted']} ({report})", tests=(row["case"],))
    return faults


def read_results(path: Path = RESULTS) -> dict[str, Result]:
    """Return the stored results by key, the last of each."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {result.key: result for result in (Result(**json.loads(line)) for line in lines)}


def select(
    mutants: Sequence[Mutant], only: Sequence[str] = (), sample: int | None = None, seed: int = 0
) -> list[Mutant]:
    """Return the faults whose name contains one of the texts, or `sample` of them chosen by the seed."""
    chosen = [each for each in mutants if not only or any(text in each.name for text in only)]
    if sample is None or sample >= len(chosen):
        return chosen
    return random.Random(seed).sample(chosen, sample)


def copy_tree(folder: Path, root: Path = ROOT) -> Path:
    """Copy what the tests need of the tree and return the copy's folder."""
    folder.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        if (source := root / name).is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, folder / name)
    (folder / "tests" / "warm.py").write_text("")  # takes longer than a fault's few tests gain by it
    return folder


class Trial:
    """Tests that run in a fork, in a copy of the tree."""

    def __init__(self, tree: Path, tests: Sequence[str]):
        descriptor, log = tempfile.mkstemp(suffix=".log", dir=tree.parent)
        os.close(descriptor)
        self._log = Path(log)
        self.started, self.cpu_seconds = time.monotonic(), 0.0
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _run_tests(tree, tests, self._log)

    def code(self) -> int | None:
        """Return the exit code, None while the tests run."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        return os.waitstatus_to_exitcode(status)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def kill(self) -> None:
        """Kill the tests and every process that they started."""
        for pid in [*descendants(self.pid), self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def failed_test(self, code: int) -> str:
        """Return the first test that failed, or the exit code if the process ended without naming one."""
        match = FAILED.search(self._log.read_text(errors="replace"))
        return match[1] if match else f"exit code {code}"


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        started = children.get(waiting.pop(), [])
        found += started
        waiting += started
    return found


def _run_tests(tree: Path, tests: Sequence[str], log: Path) -> None:
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans stay among the descendants
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        os.environ["TMPDIR"] = tempfile.tempdir = str(tree.parent)
        sys.path[:] = [
            str(tree),
            *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests"))),
        ]
        multiprocessing.util.spawnv_passfds = _fork_python(multiprocessing.util.spawnv_passfds)
        import pytest

        code = int(
            pytest.main([*tests, "-m", "not compiled", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"])
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_python(spawn):
    """Return a `spawnv_passfds` that forks multiprocessing's fork server instead of loading torch anew."""

    def fork(path, words, descriptors):
        if "multiprocessing.forkserver" not in words[-1]:
            return spawn(path, words, descriptors)
        if pid := os.fork():
            return pid
        for number in range(3, 4096):
            if number not in descriptors:
                with suppress(OSError):
                    os.close(number)
        sys.path[:0] = [each for each in os.environ["PYTHONPATH"].split(os.pathsep) if each not in sys.path]
        try:
            exec(compile(words[-1], "<fork server>", "exec"), {"__name__": "__main__"})
        finally:
            os._exit(0)

    return fork


class Planted:
    """Context in which a copy of the tree has a fault."""

    def __init__(self, tree: Path, mutant: Mutant, moment: int):
        self._path, self._mutant, self._moment = tree / "megalith" / mutant.file, mutant, moment

    def __enter__(self) -> None:
        self._source, self._stat = self._path.read_text("utf-8"), self._path.stat()
        self._path.write_text(self._mutant.plant(self._source), "utf-8")
        # bytecode is valid for a time in seconds and a size: each fault has a time of its own
        os.utime(self._path, (self._moment, self._moment))

    def __exit__(self, *_: object) -> None:
        self._path.write_text(self._source, "utf-8")
        os.utime(self._path, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))


def noticing(mutant: Mutant, result: Result) -> Sequence[str]:
    """Return the test that noticed a fault, all its tests if the process ended or hung without naming one."""
    if not result.noticed_by or "::" in result.noticed_by:
        return [result.noticed_by] if result.noticed_by else []
    return mutant.tests


def failing_without_fault(tree: Path, tests: Sequence[str]) -> str:
    """Run tests without a fault and return the first that fails, "" if all pass."""
    if not tests:
        return ""
    trial = Trial(tree, tests)
    try:
        while (code := trial.code()) is None:
            time.sleep(0.1)
    except BaseException:
        trial.kill()
        raise
    return trial.failed_test(code) if code else ""


def run_mutants(
    mutants: Sequence[Mutant], trees: Sequence[Path], limit: float = LIMIT
) -> Iterator[tuple[Mutant, Result]]:
    """Plant each fault, run its tests and yield the results as they come, one fault per tree at a time."""
    waiting, moment = list(reversed(mutants)), int(time.time())
    running: dict[Path, tuple[Mutant, Trial, Planted]] = {}
    try:
        while waiting or running:
            for tree in trees:
                if tree not in running and waiting:
                    mutant, moment = waiting.pop(), moment + 1
                    planted = Planted(tree, mutant, moment)
                    planted.__enter__()
                    running[tree] = mutant, Trial(tree, mutant.tests), planted
            time.sleep(0.05)
            for tree, (mutant, trial, planted) in list(running.items()):
                code = trial.code()
                if code is None and trial.seconds < limit:
                    continue
                if code is None:
                    trial.kill()
                if code in NOTHING_RUN:
                    raise SystemExit(
                        f"error: pytest ran none of the tests {' '.join(mutant.tests)}; correct them in {TABLE.name}"
                    )
                noticed_by = TIME_LIMIT if code is None else trial.failed_test(code) if code else ""
                planted.__exit__()
                del running[tree]
                yield mutant, Result(mutant.name, mutant.key, noticed_by, round(trial.cpu_seconds, 1))
    finally:
        for _, trial, _ in running.values():
            trial.kill()


def run_in_copies(
    mutants: Sequence[Mutant], results: dict[str, Result], jobs: int, limit: float, checks_all: bool
) -> list[Mutant]:
    """Run faults in `jobs` copies of the tree, add their results to `results` and to the file, and return survivors.

    Args:
        mutants: the faults.
        results: results so far.
        jobs: faults at a time.
        limit: seconds per fault.
        checks_all: run the noticing tests of all results without a fault, not only those of `mutants`.

    Raises:
        SystemExit: a test that noticed a fault also fails without one.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOADED:
        importlib.import_module(name)
    RESULTS.parent.mkdir(exist_ok=True)
    survived = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(Path(scratch, "bytecode"))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        trees = [copy_tree(Path(scratch, str(number), "tree")) for number in range(jobs)]
        for count, (mutant, result) in enumerate(run_mutants(mutants, trees, limit), 1):
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(result)) + "\n")
            results[result.key] = result
            outcome = "noticed" if result.noticed_by else "SURVIVED"
            print(f"{count:3}/{len(mutants)} {outcome:8} {result.seconds:5.1f} s  {mutant.name}", flush=True)
            if not result.noticed_by and not mutant.survives:
                survived.append(mutant)
        checked = [*read_table(), *read_ledger_faults().values()] if checks_all else mutants
        tests = {
            test for each in checked if each.key in results for test in noticing(each, results[each.key])
        }
        if broken := failing_without_fault(trees[0], sorted(tests)):
            raise SystemExit(
                f"error: {broken} noticed a fault, but also fails without one. Mend it and plant its faults again."
            )
    return survived


def store_score(
    mutants: Sequence[Mutant],
    results: dict[str, Result],
    path: Path = SCORE,
    ledger: Mapping[str, Mutant] | None = None,
) -> None:
    """Write the score: the date, and the test that noticed each fault, of the table and of the ledger's reports."""
    score = {
        "date": datetime.date.today().isoformat(),
        "noticed_by": {each.name: results[each.key].noticed_by for each in mutants if each.key in results},
        "ledger": {
            report: results[each.key].noticed_by
            for report, each in (ledger or {}).items()
            if each.key in results
        },
    }
    path.write_text(json.dumps(score, indent=1) + "\n", "utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a fault survived that a test has to notice."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[], help="faults whose name contains a text"
    )
    parser.add_argument(
        "--ledger",
        action="store_true",
        help="the faults of the correctness ledger's reports, each with its case",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="N faults chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample")
    parser.add_argument("--resume", action="store_true", help=f"leave out faults with a result in {RESULTS}")
    parser.add_argument("--survivors", action="store_true", help="only faults that survived so far")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="faults at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds per fault")
    parser.add_argument("--store", action="store_true", help=f"write {SCORE} from all results")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args(words)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # ends the tests and removes the copies
    table = list(read_ledger_faults().values()) if options.ledger else read_table()
    mutants = select(table, options.only, options.sample, options.seed)
    results = read_results()
    if options.survivors:
        mutants = [each for each in mutants if each.key in results and not results[each.key].noticed_by]
    elif options.resume:
        mutants = [each for each in mutants if each.key not in results]
    if options.list:
        print("\n".join(each.name for each in mutants))
        return 0
    survived = []
    if mutants or options.store:
        survived = run_in_copies(mutants, results, options.jobs, options.limit, options.store)
    if options.store:
        store_score(read_table(), results, ledger=read_ledger_faults())
    ran = [each for each in table if each.key in results]
    noticed = sum(bool(results[each.key].noticed_by) for each in ran)
    print(f"{len(table)} faults, {len(ran)} with a result, {noticed} noticed, {len(ran) - noticed} survived")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
