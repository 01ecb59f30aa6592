"""Run the cases of the correctness ledger: public reports of silently wrong results, each with a test of Megalith.

`tests/ledger.toml` is the table. `python -m megalith.parity.ledger` runs its cases with pytest, prints the results and
exits with status 1 if any case failed. `--write` writes docs/correctness.md from the table.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from xml.etree import ElementTree

import megalith
from megalith.errors import ConfigError, did_you_mean

ROOT = Path(megalith.__file__).parents[1]
TABLE = Path("tests/ledger.toml")
PAGE = Path("docs/correctness.md")
MUTANTS, SCORE = Path("tests/mutants.toml"), Path("tests/mutants.json")  # see tests/mutation_trials.py
NO_SUCH_TEST = re.compile(r"^ERROR: not found: (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class PublicReport:
    """A public report, and the test that would detect the same fault in Megalith.

    Args:
        repository: GitHub's `owner/name`.
        number: number of the issue or pull request.
        symptom: the fault in one sentence.
        area: heading under which the page lists the report.
        case: pytest node, from the root of the checkout. A node without a parameter stands for all parameters of the
            function.
        bound: tolerance of the test.
        part: number of the finding, if a report lists several.
        planted: fault of the mutant that the case has detected.
        fault: what `make mutants` plants: a row of tests/mutants.toml, or `file`, `old` and `new`. Empty if the test
            plants the fault itself.
    """

    repository: str
    number: int
    symptom: str
    area: str
    case: str
    bound: str
    planted: str
    fault: str | Mapping[str, str] = ""
    part: int | None = None

    @property
    def name(self) -> str:
        """Return `owner/name#number`, with the number of the finding if there are several."""
        return f"{self.repository}#{self.number}" + (f" ({self.part})" if self.part else "")

    @property
    def url(self) -> str:
        """Return the thread's address. GitHub redirects it if the number is a pull request's."""
        return f"https://github.com/{self.repository}/issues/{self.number}"


@dataclass(frozen=True)
class UncoveredReport:
    """A public report without a case, and the reason."""

    repository: str
    number: int
    symptom: str
    reason: str
    part: int | None = None

    name = PublicReport.name
    url = PublicReport.url


@dataclass(frozen=True)
class BoundedDifference:
    """A result that differs from its reference, with the cause and the file that bounds the difference."""

    title: str
    text: str
    bound: str


@dataclass(frozen=True)
class Ledger:
    """Entries of tests/ledger.toml."""

    reports: tuple[PublicReport, ...]
    uncovered: tuple[UncoveredReport, ...]
    differences: tuple[BoundedDifference, ...]


@dataclass(frozen=True)
class CaseResult:
    """The outcome of a case's tests."""

    passed: bool
    seconds: float


def read_ledger(root: Path = ROOT) -> Ledger:
    """Return the table of a checkout.

    Raises:
        ConfigError: the folder has no table, as with an installed package.
    """
    path = root / TABLE
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist. The ledger's cases are tests, which an installed package does not have. Run "
            "`python -m megalith.parity.ledger` in a clone of the repository that is installed with `pip install -e .`."
        )
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return Ledger(
        tuple(PublicReport(**row) for row in table["report"]),
        tuple(UncoveredReport(**row) for row in table["uncovered"]),
        tuple(BoundedDifference(**row) for row in table["difference"]),
    )


def select(reports: Sequence[PublicReport], names: Sequence[str]) -> list[PublicReport]:
    """Return the reports with these names, `owner/name#number` or `name#number`, ignoring case; all without names.

    Raises:
        ConfigError: a name is in no row.
    """
    if not names:
        return list(reports)
    selected = []
    for name in names:
        matching = [
            report
            for report in reports
            if f"/{report.repository}#{report.number}".lower().endswith(f"/{name.lower()}")
        ]
        if not matching:
            names_of_rows = {report.name for report in reports}
            raise ConfigError(
                f"no row of {TABLE} is {name}{did_you_mean(name, names_of_rows)}; --list prints all of them"
            )
        selected += [report for report in matching if report not in selected]
    return selected


def run_cases(cases: Iterable[str], root: Path = ROOT) -> dict[str, CaseResult]:
    """Run pytest nodes in one session and return the result of each.

    A node fails if one of its tests failed, if none ran and passed, or if there is no such test. Nodes that pytest does
    not find are skipped, and the others run.
    """
    cases = list(dict.fromkeys(cases))
    present, tests = cases, []
    while present:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "junit.xml"
            options = ["-q", "-p", "no:cacheprovider", "-m", "full or not full", f"--junitxml={report}"]
            command = [sys.executable, "-m", "pytest", *present, *options]
            done = subprocess.run(command, cwd=root, check=False, stderr=subprocess.PIPE, text=True)
            tests = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
        sys.stderr.write(done.stderr)
        absent = {str(root / name) for name in NO_SUCH_TEST.findall(done.stderr)}
        remaining = [case for case in present if str(root / case.partition("[")[0]) not in absent]
        if remaining == present:
            break
        present = remaining
    return {case: _result_of(case, tests) for case in cases}


def _result_of(case: str, tests: Sequence[ElementTree.Element]) -> CaseResult:
    path, _, test = case.partition("::")
    module = path.removesuffix(".py").replace("/", ".")
    its_tests = [
        each
        for each in tests
        if each.get("classname") == module
        and (each.get("name") == test or each.get("name", "").startswith(f"{test}["))
    ]
    passed = bool(its_tests) and not any(
        len(each.findall(kind)) for each in its_tests for kind in ("failure", "error")
    )
    passed = passed and any(each.find("skipped") is None for each in its_tests)
    return CaseResult(passed, sum(float(each.get("time", 0)) for each in its_tests))


def format_results(reports: Sequence[PublicReport], results: Mapping[str, CaseResult]) -> str:
    """Format the results: one line per report with its seconds and name, and the counts."""
    lines = []
    for report in reports:
        result = results[report.case]
        lines.append(f"{'held' if result.passed else 'failed':6}  {result.seconds:6.1f} s  {report.name}")
        if not result.passed:
            lines.append(f"                  {report.case}")
    failed = sum(not results[report.case].passed for report in reports)
    return "\n".join([*lines, f"{len(reports)} reports, {len(reports) - failed} held, {failed} failed"])


def page(ledger: Ledger, root: Path = ROOT) -> str:
    """Return docs/correctness.md."""
    reports = ledger.reports
    by_runner = sum(bool(report.fault) for report in reports)
    lines = [
        "# Correctness ledger",
        "",
        *_wrapped(
            "This page lists public reports of silently wrong results in other training systems. Most have a case: a "
            "test in this repository that would detect the same fault in Megalith. The reports are about losses, "
            "gradients, norms, resumed runs, data orders, masks, conversions and log-probabilities. Many of the faults "
            "have been fixed since: an entry does not describe the present state of the other system."
        ),
        "",
        *_wrapped(
            f"{len(reports)} reports have a case. {len(ledger.uncovered)} have none and are listed with the reason. "
            "Each case was tried on a mutant, a copy of Megalith with a fault of the same kind, and failed as it "
            f"should. The entry describes this fault after `mutant:`. A number in parentheses is the item of a report "
            f"that lists several. "
            f"{by_runner} of the mutants change one line; "
            "`python tests/mutation_trials.py --ledger` creates them in a copy of the tree. The tests create the other "
            f"{len(reports) - by_runner} themselves."
        ),
        "",
        "## Run the cases",
        "",
        "```bash",
        "# needs a clone, and five minutes on two cores",
        "python -m megalith.parity.ledger",
        "python -m megalith.parity.ledger --only Megatron-LM#673",
        "python -m megalith.parity.ledger --list",
        "```",
        "",
        *_wrapped(
            "The command runs the tests with pytest and prints `held` or `failed` and the time of each. The exit "
            "status is 1 if any case failed. `make test` runs most cases, and `make test-all` runs all. The entries "
            "are in `tests/ledger.toml`; `--write` writes this page from them."
        ),
        "",
        *_wrapped(
            'A bound of "equal" means bitwise. "Gradients 1e-5" means ‖a − b‖ ≤ 1e-5 · ‖b‖ for each parameter. Layouts '
            "are compared with one process in fp32 ([Parity](parallelism/parity.md#what-is-compared))."
        ),
    ]
    for area in dict.fromkeys(report.area for report in reports):
        lines += ["", f"## {area}", ""]
        for report in reports:
            if report.area == area:
                lines += _row(report)
    lines += ["", "## Not equal, and why", ""]
    lines += _wrapped(
        "These results differ from their reference. The cause is known and the difference is bounded."
    )
    for difference in ledger.differences:
        lines += ["", *_wrapped(f"**{difference.title}.** {difference.text} Bounded by {difference.bound}.")]
    lines += mutant_section(root)
    lines += ["", "## Not covered", "", "| Report | Symptom | Reason |", "|---|---|---|"]
    lines += [f"| [{row.name}]({row.url}) | {row.symptom} | {row.reason} |" for row in ledger.uncovered]
    return "\n".join(lines) + "\n"


def mutant_section(root: Path) -> list[str]:
    """Return the page's section on mutants, from their table and the stored results."""
    rows = tomllib.loads((root / MUTANTS).read_text(encoding="utf-8"))["mutant"]
    score = json.loads((root / SCORE).read_text(encoding="utf-8"))
    noticed_by = score["noticed_by"]
    names = [f"{row['file']}: {row['fault']}" for row in rows]
    counts: dict[str, list[int]] = {}
    for row, name in zip(rows, names):
        if name in noticed_by:
            room = counts.setdefault(row["file"].partition("/")[0], [0, 0])
            room[0] += 1
            room[1] += bool(noticed_by[name])
    ran, noticed = (sum(count[column] for count in counts.values()) for column in (0, 1))
    missing = len(names) - ran
    lines = [
        "",
        "## Mutation tests of the package",
        "",
        *_wrapped(
            f"`tests/mutants.toml` lists {len(rows)} mutants, each with a one-line fault of the kinds that engineers "
            "make: a missing all-reduce, a wrong group, an index off by one, a dropped mask, a wrong sign, a stale "
            "cache. Each entry names the tests that must fail. `make mutants` creates the mutants one by one in a "
            "copy of the tree and runs those tests. It continues an interrupted run; to start over, remove "
            "`build/mutants.jsonl`."
        ),
        "",
        "```bash",
        "make mutants  # needs an hour on two cores; MUTANTS='--sample 20 --seed 1' runs some",
        "```",
        "",
        *_wrapped(
            f"On {score['date']}, the tests detected {noticed} of {ran} mutants, {noticed / max(ran, 1):.1%}."
            + (
                f" {missing} of the table have not been tried since they were added or changed."
                if missing
                else ""
            )
        ),
        "",
        "| Folder | Mutants | Detected |",
        "|---|---|---|",
        *(f"| `{room}` | {count} | {seen} |" for room, (count, seen) in sorted(counts.items())),
    ]
    survivors = [(row, name) for row, name in zip(rows, names) if noticed_by.get(name) == ""]
    if survivors:
        lines += ["", "Not detected:", ""]
        lines += [
            f"- `{row['file']}`: {row['fault']}. {row.get('survives', 'The tests that the table names for it pass.')}"
            for row, _ in survivors
        ]
    return lines


def _wrapped(text: str) -> list[str]:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False).splitlines()


def _row(report: PublicReport) -> list[str]:
    return [
        f"- [{report.name}]({report.url}): {report.symptom}",
        f"  `{report.case}` · {report.bound} · mutant: {report.planted}",
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megalith.parity.ledger", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--only", nargs="+", metavar="REPO#NUMBER", default=[], help="run these reports' cases"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the reports and their cases, and run nothing"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} from the table, and run nothing")
    options = parser.parse_args(words)
    try:
        ledger = read_ledger()
        reports = select(ledger.reports, options.only)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.write:
        (ROOT / PAGE).write_text(page(ledger), encoding="utf-8")
        return 0
    if options.list:
        print("\n".join(f"{report.name}  {report.symptom}\n    {report.case}" for report in reports))
        return 0
    results = run_cases(report.case for report in reports)
    print(format_results(reports, results))
    return int(not all(results[report.case].passed for report in reports))


if __name__ == "__main__":
    sys.exit(main())
