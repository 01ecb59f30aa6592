"""The Python that the pages show runs as it is shown."""

import ast
import importlib

import pytest
from page_code import PYTHON
from page_trials import PAGES, ROOT, fences

import megalith.optim.optimizer


def blocks(page: str) -> list[str]:
    return [text for language, text in fences(ROOT / page) if language == "python"]


CASES = [
    pytest.param(page, number, marks=() if block.is_quick else pytest.mark.full, id=f"{page}-{number}")
    for page, of_page in PYTHON.items()
    for number, block in enumerate(of_page)
    if not block.not_run
]


@pytest.mark.parametrize(("page", "number"), CASES)
def test_a_block_of_python_runs_as_it_is_shown(page, number, monkeypatch):
    monkeypatch.setattr(megalith.optim.optimizer, "_REGISTERED", dict(megalith.optim.optimizer._REGISTERED))
    program = PYTHON[page][number].program(blocks(page)[number])
    exec(compile(program, f"{page}, block {number}", "exec"), {"__name__": "page"})


def test_every_block_of_python_is_run_or_says_why_not():
    shown = {page.relative_to(ROOT).as_posix(): page for page in PAGES}
    counts = {name: len(found) for name in shown if (found := blocks(name))}
    assert counts == {page: len(of_page) for page, of_page in PYTHON.items()}


def test_what_is_not_run_imports_names_that_exist():
    for page, of_page in PYTHON.items():
        for block, text in zip(of_page, blocks(page)):
            for node in ast.walk(ast.parse(text)):
                own = isinstance(node, ast.ImportFrom) and node.module.startswith("megalith")
                if block.not_run and own:
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names), page
