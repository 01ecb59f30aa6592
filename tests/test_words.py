"""The field's terms are used in the documentation and the package, and the documentation names what there is."""

import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import wording
from page_trials import BEFORE, INSTEAD, NAME, PAGES, fences, is_tried, lines_of

from benchmarks import headlines
from megalith.bench.bench_command import OTHERS
from megalith.bench.workloads import WORKLOADS, layout_of
from megalith.cli.commands import COMMANDS
from megalith.cli.main import build_parser
from megalith.cli.planning import read_words
from megalith.cli.training import _launcher_options
from megalith.config import RunConfig
from megalith.config.run import begins_override, known_keys
from megalith.config.yaml_loader import parse_yaml
from megalith.dialects.accelerate import launch_door
from megalith.dialects.megatron import door
from megalith.dialects.megatron.flag_table import FLAGS
from megalith.dialects.oumi import oumi_command
from megalith.dialects.oumi.oumi_migration import migrated

PROGRAMS = [name for name, command in COMMANDS.items() if command.run == "training:train"]
ROOT = Path(__file__).parents[1]
DOCS = [*PAGES, ROOT / "benchmarks" / "RESULTS.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
    r"(every|each) (rank|process)( of \S+)? calls it": "collective over …",
    r"(same|equal|unchanged) to the bit": "bitwise equal",
    r"(rejected|refused) by name": "rejected with an error that names it",
}
COMMAND = re.compile(r"^(?:\$ )?megalith (.*)$", re.MULTILINE)
FILE = re.compile(
    r"\b(?:megalith|tests|benchmarks|examples|docs|deploy)/[\w/.-]*\.(?:py|yaml|md|sh|jinja|json)\b"
)
PROGRAM = re.compile(
    r"(megalith(?! \d)|python|torchrun|accelerate|make|pytest|pip|docker|kubectl|sbatch|([A-Z_]+=\S+ )+\w+) "
)
MORE = re.compile(  # more than one machine without a GPU, and other programs
    r"^(python -m benchmarks\.\w+|docker|kubectl|sbatch|.*vllm serve|.*sglang\S*)|--submit|--nnodes|--num_machines"
)
ACCELERATES = {"--multi_gpu", "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip"}
ACCELERATES |= {
    *(
        f"--megatron_lm_{name}"
        for name in ("tp_degree", "pp_degree", "num_micro_batches", "gradient_clipping")
    ),
    "--main_process_port",
    "--config_file",
    "--cpu",
    "--use_megatron_lm",
}  # what its own launcher takes
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
    listed = re.findall(r"^ +- (?:\w+: )?([\w/]+\.md)$", text_of(ROOT / "site" / "mkdocs.yml"), re.MULTILINE)
    made = {
        "index.md",
        "readme.md",
        "benchmarks.md",
        "examples.md",
        "api.md",
        "contributing.md",
        "changes.md",
        "security.md",
    }
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed)) and set(listed) | {"index.md"} == pages | made


def test_every_example_stands_in_the_gallery_and_its_run_files_load():
    folder = ROOT / "examples"
    told = set(re.findall(r"`([\w/.-]+\.\w+|[\w/]+/Makefile)`", text_of(folder / "README.md")))
    there = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != "__init__.py"
    }
    assert told == there - {"README.md"}
    for name in told:
        if name.endswith(".yaml") and not name.startswith("oumi/"):
            RunConfig.load(folder / name)


def test_the_package_uses_the_fields_words_and_names():
    """tests/wording.py lists what is counted and why."""
    lines_by_kind = defaultdict(list)
    for path in SOURCES:
        for kind, line in wording.findings(path):
            lines_by_kind[kind].append(line)
    lines = sum(text_of(path).count("\n") for path in SOURCES)
    limits = dict.fromkeys(wording.WORDS, wording.LIMIT * lines / 1000)
    assert not {kind: each for kind, each in lines_by_kind.items() if len(each) > limits.get(kind, 0)}


def test_what_is_counted_is_found(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        'def told(own):\n    """What is asked of x."""\n    return own.places\n', encoding="utf-8"
    )
    kinds = sorted(kind for kind, _ in wording.findings(file))
    assert kinds == ["asked, asks", "docstrings", *["identifiers"] * 4, "places", "told, tells"]


def blocks(page: Path) -> Iterator[str]:
    """A page's blocks of commands and of what they print, a command on a line."""
    yield from (re.sub(r"\\\n\s*", "", block) for language, block in fences(page) if language in ("", "bash"))


def commands() -> set[tuple[str, ...]]:
    """Of every command in a block of the documentation the words after `megalith`."""
    found = {line for page in DOCS for block in blocks(page) for line in COMMAND.findall(block)}
    lines = (line for line in found if line[0].isalpha() and "[" not in line)  # no output, no usage
    return {tuple(shlex.split(line, comments=True)) for line in lines}


def wrong_in(line: str, block: str, page: Path) -> Iterator[str]:
    """What a command of a block names that is not there. Of `megalith`'s own options see the tests below."""
    program, *words = shlex.split(line.removeprefix("$ "), comments=True)
    if program == "make" and words[:1] != ["-C"]:
        targets = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
        yield from {word for word in words if "=" not in word} - set(targets)
    if program == "pip":
        named = ",".join(re.findall(r"\[([\w,]+)\]", line)).split(",")
        yield from set(filter(None, named)) - set(PROJECT["optional-dependencies"])
    options = [word.partition("=")[0] for word in words if re.fullmatch(r"--[\w-]+(=.*)?", word)]
    if program == "python" and words[0] in ("-m", "-c") and not words[1].startswith("benchmarks"):
        options = []  # another's program
    elif program == "python":
        script = ROOT / (f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0])
        yield from [] if script.is_file() or f"`{words[0]}`" in text_of(page) else [str(script)]
        yield from (each for each in options if script.is_file() and f'"{each}"' not in text_of(script))
    door = words[0] if program == "megalith" and words else ""
    if door in ("megatron", "accelerate", "oumi"):
        sources = "".join(text_of(path) for path in (ROOT / "megalith" / "dialects" / door).rglob("*.py"))
        yield from [] if f'"{words[1]}"' in sources else [words[1]]
        flags = set(re.findall(r"--?[\w-]+", sources)) | (ACCELERATES if door == "accelerate" else set())
        yield from (each for each in options if each not in flags)
    if program in ("megalith", "torchrun", "pytest"):
        own = {"run.yaml", "best.yaml", "old.yaml", "new.yaml"}  # the reader's
        own |= set(re.findall(r" --(?:write|output) ([\w.-]+)", text_of(page)))  # and what a command writes
        shown = set(
            re.findall(r"^# ([\w.-]+)|`([\w.-]+\.yaml)`", text_of(page) + text_of(ROOT / "README.md"), re.M)
        )
        for word in words:
            is_known = word in own or any(word in pair for pair in shown) or (ROOT / word).exists()
            if re.fullmatch(r"[\w/.-]+\.yaml|(examples|tests|benchmarks)/[\w/.-]+", word) and not is_known:
                yield word
    needs_more = MORE.search(line)
    if needs_more and "# needs " not in block:
        yield f"{needs_more[0]}: its block has no line that begins with '# needs'"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_every_other_command_of_a_page_names_what_is_there_and_says_what_it_needs(page):
    wrong = {
        line: found
        for block in blocks(page)
        for line in block.split("\n")
        if PROGRAM.match(line) and (found := list(wrong_in(line, block, page)))
    }
    assert not wrong


def test_every_block_of_commands_is_tried_or_says_what_it_needs():
    """`make test-docs` runs what is marked as bash, to the last line."""
    tried, needs = 0, 0
    for page in PAGES:
        shells = [block for language, block in fences(page) if language in ("sh", "shell", "console", "text")]
        assert not shells, f"{page}: commands are marked as bash, what they print has no language"
        for language, block in fences(page):
            if language == "bash" and not NAME.match(block):
                for line in lines_of(block):
                    known = PROGRAM.match(line)
                    assert known or block.startswith("# needs "), f"{page}: no command that is known: {line}"
                    tried, needs = tried + is_tried(block, line), needs + ("# needs " in block)
            elif not language:
                inside = [line for line in block.splitlines() if PROGRAM.match(line) and "[-" not in line]
                assert not inside, f"{page}: commands in a block that is not marked as bash: {inside}"
    assert tried > 100 and needs > 20
    assert {*INSTEAD, *BEFORE} <= {str(page.relative_to(ROOT)) for page in PAGES}


def test_every_command_of_the_documentation_is_one_that_the_command_line_takes():
    parser = build_parser()
    parse_themselves = {name for name, command in COMMANDS.items() if command.options is None} - {"plan"}
    others = [words for words in commands() if words[0] not in parse_themselves]
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
        for layout in takewhile(lambda word: word[0] != "-", layouts):
            layout_of(layout)  # raises for one that there is not


def test_the_benchmarks_table_and_picture_are_of_the_results():
    text = headlines.RESULTS.read_text("utf-8")
    assert headlines.with_table(text) == text, "python -m benchmarks.headlines writes it"
    page = headlines.COMPARED.read_text("utf-8")
    assert headlines.with_verdicts(page, text) == page, "python -m benchmarks.headlines writes it"
    drawn = headlines.PICTURE.read_text("utf-8")
    for each in headlines.COMPARISONS:
        for peer in each.peers:
            assert (
                f"{headlines.speed(each, peer, text):.2f} ×" in drawn and each.work.replace("`", "") in drawn
            )


def test_every_speed_of_the_readme_is_of_the_results():
    results = headlines.RESULTS.read_text("utf-8")
    table = text_of(ROOT / "README.md").partition("| Workload | Megalith |")[2].partition("\n\n")[0]
    shown = {
        figure
        for row in table.splitlines()[2:]
        for figure in re.findall(r"\d+,\d+|\d+\.\d", row.split("|", 2)[2])
    }
    assert len(shown) > 12
    assert not {figure for figure in shown if figure not in results}


def test_commands_of_other_systems_doors_are_theirs_with_flags_that_megatron_has():
    doors = {"megatron": door.COMMANDS, "accelerate": launch_door.COMMANDS, "oumi": oumi_command.COMMANDS}
    shown = [words for words in commands() if words[0] in doors]
    assert len(shown) > 15 and all(words[1] in doors[words[0]] for words in shown), shown
    programs = [words for words in commands() if words[0].startswith("pretrain-")]
    overrides = [shlex.split(words[-1]) for words in shown if "--override" in words]
    flags = {word for words in [*programs, *overrides] for word in words if word.startswith("--")}
    assert flags - {"--nproc", "--emit"} and not flags - {*FLAGS, "--nproc", "--emit"}


def test_settings_on_the_documentations_command_lines_are_taken():
    """Their names and values; a run file's are not known here."""
    trained = [words for words in commands() if words[0] in PROGRAMS and "--help" not in words]
    assert len(trained) > 20
    for _, *words in trained:
        settings = _launcher_options().parse_known_args(words)[1]
        RunConfig.load(None, settings if begins_override(settings[0]) else settings[1:])


def test_messages_that_troubleshooting_explains_are_ones_that_are_printed():
    table = text_of(ROOT / "docs" / "troubleshooting.md").partition("## By message")[2].partition("\n## ")[0]
    told = [part.strip(" `;:") for part in re.findall(r"^\| `([^|]*)` \|", table, re.MULTILINE)]
    pieces = {
        piece.strip() for one in told for piece in re.split(r"…|/config.json|`, `|\(\d+\)|\(…\)|[;:]", one)
    }
    written = re.sub(r"\{[^{}]*\}|\"\s+f?\"", "", "".join(map(text_of, SOURCES)))
    assert len(told) > 10 and not {piece for piece in pieces if len(piece) > 12 and piece not in written}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_names_settings_that_are_there_and_shows_run_files_that_load(page, tmp_path):
    named = set(SETTING.findall(text_of(page)))
    assert not {(section, key) for section, key in named if key not in known_keys(section)}
    for block in re.findall(r"^```yaml\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
        tree = parse_yaml(block)
        if "trainer_type" in tree.get("training", {}):
            (tmp_path / "oumi.yaml").write_text(block)
            migrated(tmp_path / "oumi.yaml")
        elif tree.keys() & RunConfig.model_fields:  # Accelerate's files are others
            RunConfig.from_tree(tree)
