"""The field's terms are used in the documentation and the package, and the documentation names what there is."""

import re
import shlex
from pathlib import Path

import pytest

from megalith.cli.main import build_parser
from megalith.cli.planning import read_words

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "megalith").rglob("*.py"))

TERMS = {  # a homemade word, as a regular expression: the field's term
    r"multiprocessors?": "SM",
    r"matrix products?|products of (the )?(layers?|backward pass|linears?)|beside products": "GEMM, matmul",
    r"(runs?|goes?|layers|micro-batches) in (two )?halves|half by half": "ping-pong micro-batches",
    r"heads (are )?exchanged": "all-to-all CP, Ulysses",
    r"sums? of (the )?gradients|gradients' sums?": "gradient all-reduce, reduce-scatter, reduction",
    r"gradients of (the )?weights|weights?' gradients?": "wgrad",
    r"gradients? of the inputs?|input's gradients?": "dgrad",
    r"kept for (the|its) backward( pass)?": "saved activations",
    r"(is|are|was|were|be) told(?! apart)": "log, warn, print",
    r"stands? still": "hang",
    r"way of talking|while the other talks|to talk over": "communicate",
    r"in the shadow of": "overlapped with",
    r"all the others' beats?|life signs?": "heartbeat",
    r"multi-token layers?": "MTP layer",
    r"megalith_direct": "copy engine",
    r"wide_product": "matmul",
    r"has_places": "position_ids",
}
COMMAND = re.compile(r"^(?:\$ )?megalith (.*)$", re.MULTILINE)
FILE = re.compile(r"\b(?:megalith|tests|benchmarks|examples|docs)/[\w/.-]*\.(?:py|yaml|md)\b")
LINK = re.compile(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_docs_and_package_use_the_fields_terms():
    words = re.compile("|".join(rf"\b(?:{word})\b" for word in TERMS))
    found = {}
    for path in [*DOCS, *SOURCES]:
        for match in words.finditer(text_of(path)):
            terms = [term for word, term in TERMS.items() if re.fullmatch(word, match[0])]
            found.setdefault(str(path.relative_to(ROOT)), []).append((match[0], terms))
    assert not found


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_names_files_and_headings_that_are_there(page):
    missing = [name for name in FILE.findall(text_of(page)) if not (ROOT / name).exists()]
    for name, anchor in LINK.findall(text_of(page)):
        target = page.parent / name if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(f"{name}#{anchor}")
    assert not missing


def test_every_command_of_the_documentation_is_one_that_the_command_line_takes():
    parser, commands = build_parser(), set()
    for page in DOCS:
        shown = re.sub(r"\\\n\s*", "", text_of(page))
        for block in re.split(r"^```.*$", shown, flags=re.MULTILINE)[1::2]:
            commands |= set(COMMAND.findall(block))
    commands = {line for line in commands if line[0].isalpha() and "[" not in line}  # no output, no usage
    commands = {
        line
        for line in commands
        if not line.startswith(
            (
                "train ",
                "sft ",
                "dpo ",
                "grpo ",
                "parity ",
                "pretrain-gpt ",
                "megatron ",
                "accelerate ",
                "oumi ",
            )
        )
    }  # these take settings too, or read their own options
    assert len(commands) > 20
    for line in commands:
        words = shlex.split(line, comments=True)
        assert read_words(words) if words[0] == "plan" else parser.parse_args(words), line
