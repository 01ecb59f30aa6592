"""The field's terms are used in the documentation and the package, and the documentation names what there is."""

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from benchmarks import headlines
from megalith.bench.bench_command import OTHERS
from megalith.bench.workloads import LAYOUTS, WORKLOADS
from megalith.cli.main import build_parser
from megalith.cli.planning import read_words
from megalith.cli.training import PROGRAMS, _launcher_options
from megalith.config import RunConfig
from megalith.config.run import begins_override, known_keys, parse_yaml

ROOT = Path(__file__).parents[1]
DOCS = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/RESULTS.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
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
SETTING = re.compile(rf"(?:--|`)({'|'.join(RunConfig.model_fields)})\.(\w+)(?=[ =:`\n])")
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


def test_the_architecture_names_what_stands_in_the_files_it_names():
    named = re.findall(
        r"`?([\w/]+\.py)`?: `?([A-Za-z_.]+[A-Za-z_])", text_of(ROOT / "docs" / "architecture.md")
    )
    assert len(named) > 30
    for file, name in named:
        (path,) = [path for path in SOURCES if path.as_posix().endswith(f"/{file}")]
        assert re.search(rf"^\s*(def |class )?{name.rpartition('.')[2]}\b", text_of(path), re.MULTILINE), (
            file,
            name,
        )


def test_every_page_stands_in_the_sites_navigation():
    listed = re.findall(r"^ +- ([\w/]+\.md)$", text_of(ROOT / "site" / "mkdocs.yml"), re.MULTILINE)
    made = {"index.md", "benchmarks.md", "examples.md", "api.md", "contributing.md", "changes.md"}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed)) and set(listed) | {"index.md"} == pages | made


def test_every_example_stands_in_the_gallery_and_its_run_files_load():
    folder = ROOT / "examples"
    told = set(re.findall(r"`([\w/.-]+\.\w+|[\w/]+/Makefile)`", text_of(folder / "README.md")))
    there = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert told == there - {"README.md"}
    for name in told:
        if name.endswith(".yaml") and not name.startswith("oumi/"):
            RunConfig.load(folder / name)


def commands() -> set[tuple[str, ...]]:
    """Of every command in a block of the documentation the words after `megalith`."""
    found: set[str] = set()
    for page in DOCS:
        shown = re.sub(r"\\\n\s*", "", text_of(page))
        for block in re.split(r"^```.*$", shown, flags=re.MULTILINE)[1::2]:
            found |= set(COMMAND.findall(block))
    lines = (line for line in found if line[0].isalpha() and "[" not in line)  # no output, no usage
    return {tuple(shlex.split(line, comments=True)) for line in lines}


def test_every_command_of_the_documentation_is_one_that_the_command_line_takes():
    parser = build_parser()
    own = {
        *PROGRAMS,
        "pretrain-gpt",
        "pretrain-bert",
        "pretrain-t5",
        "megatron",
        "accelerate",
        "oumi",
        "bench",
    }  # read their own options
    others = [words for words in commands() if words[0] not in own]
    assert len(others) > 20
    for words in others:
        if words[0] == "plan":
            assert read_words(words), words
            continue
        parsed, settings = parser.parse_known_args(words)
        assert parsed.takes_settings or not settings, words
        RunConfig.load(None, settings)


def test_benchmarks_of_the_documentation_are_there():
    shown = [words[1:] for words in commands() if words[0] == "bench" and words[1:]]
    assert len(shown) > 5
    for name, *options in shown:
        assert name in (WORKLOADS if "--layout" in options else [*WORKLOADS, *OTHERS]), name
        layouts = options[options.index("--layout") + 1 :] if "--layout" in options else []
        assert all(layout in LAYOUTS for layout in takewhile(lambda word: word[0] != "-", layouts)), options


def test_the_benchmarks_table_and_picture_are_of_the_results():
    text = headlines.RESULTS.read_text("utf-8")
    assert headlines.with_table(text) == text, "python -m benchmarks.headlines writes it"
    drawn = headlines.PICTURE.read_text("utf-8")
    for each in headlines.COMPARISONS:
        for peer in each.peers:
            assert (
                f"{headlines.speed(each, peer, text):.2f} ×" in drawn and each.work.replace("`", "") in drawn
            )


def test_settings_on_the_documentations_command_lines_are_taken():
    """Their names and values; a run file's are not known here."""
    trained = [words for words in commands() if words[0] in PROGRAMS and "--help" not in words]
    assert len(trained) > 20
    for _, *words in trained:
        settings = _launcher_options().parse_known_args(words)[1]
        RunConfig.load(None, settings if begins_override(settings[0]) else settings[1:])


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_names_settings_that_are_there_and_shows_run_files_that_load(page):
    named = set(SETTING.findall(text_of(page)))
    assert not {(section, key) for section, key in named if key not in known_keys(section)}
    for block in re.findall(r"^```yaml\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
        tree = parse_yaml(block)
        if tree.keys() & RunConfig.model_fields:  # Accelerate's files are others
            RunConfig.from_tree(tree)
