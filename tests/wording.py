"""Counts what keeps a reader from reading the package once: python tests/wording.py [FOLDER ...]

Words and identifiers that PyTorch's, torchtitan's and Megatron-LM's authors do not use for what they mean here, and
docstrings that begin with neither a verb nor a noun. `tests/test_words.py` holds the package to the limits.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megalith"
WORDS = {
    "told, tells": r"\b(told|tells?)\b",
    "asked, asks": r"\b(asked|asks)\b",
    "places": r"\bplaces\b",
    "stands": r"\b(stands?|stood)\b",
    "goes on": r"\b(goes|go|going|gone|went) on\b",
    "beside": r"\bbeside\b",
    "anew": r"\banew\b",
}
"""A word's name and its regular expression; counted in code, comments and texts alike."""

LIMIT = 0.1  # of each word per 1,000 lines: six well-known packages have 0 to 0.1
IDENTIFIERS = re.compile(
    r"_*(told|asked|found|given|known|own|places|numbers|side|beside|said|held|every_\w+|goes_on\w*)"
)
"""Names that say nothing about the value they hold."""

OF_LIBRARIES = {("rewards.py", "numbers"), ("gsm8k.py", "numbers"), ("dataset.py", "side")}
"""Files and names that are others': Python's module numbers and an argument of numpy's searchsorted."""

FIRST_WORDS = {"What", "Whether", "Where", "Of", "As", "Those", "That", "It", "How", "Who", "Which"}
"""First words of docstrings that are neither verbs nor nouns."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring: of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                value = getattr(statement, "value", None)
                if (
                    isinstance(statement, ast.Expr)
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                ):
                    yield statement.lineno, value.value.strip()


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each name in the code, attributes and keyword arguments included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


# Parsing, tokenizing and searching without case take most of the time: files without a candidate are left out.
_MAY_BE_WORDS = {name: re.compile(pattern.replace(r"\b", "")) for name, pattern in WORDS.items()}
_TEXTS = re.compile(
    r'''"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*'''
)
_MAY_BE_IDENTIFIERS = re.compile(rf"\b(?:{IDENTIFIERS.pattern})\b")
_MAY_BE_DOCSTRINGS = re.compile(rf"""["']\s*(?:{"|".join(FIRST_WORDS)})\b""")


def findings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (kind, place) of each word, identifier and docstring of a file that is counted."""
    source = path.read_text(encoding="utf-8")
    lines, lower, code = source.split("\n"), source.lower(), _TEXTS.sub(" ", source)
    for name, pattern in WORDS.items():
        for match in re.finditer(pattern, source, re.IGNORECASE) if _MAY_BE_WORDS[name].search(lower) else ():
            number = source.count("\n", 0, match.start()) + 1
            yield name, f"{path}:{number}: {lines[number - 1].strip()}"
    for number, text in docstrings(source) if _MAY_BE_DOCSTRINGS.search(source) else ():
        if text.split(maxsplit=1)[0].rstrip(",:") in FIRST_WORDS:
            yield "docstrings", f"{path}:{number}: {text.splitlines()[0]}"
    for number, name in identifiers(source) if _MAY_BE_IDENTIFIERS.search(code) else ():
        if IDENTIFIERS.fullmatch(name) and (path.name, name) not in OF_LIBRARIES:
            yield "identifiers", f"{path}:{number}: {name}"


def main(folders: list[str]) -> None:
    files = [path for folder in folders or [PACKAGE] for path in sorted(Path(folder).rglob("*.py"))]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    counts = Counter(kind for path in files for kind, _ in findings(path))
    print(f"{len(files)} files, {lines:,} lines")
    for kind in (*WORDS, "docstrings", "identifiers"):
        print(f"{kind:12} {counts[kind]:6} {1000 * counts[kind] / lines:8.2f} per 1,000 lines")


if __name__ == "__main__":
    main(sys.argv[1:])
