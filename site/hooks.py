"""Pages of the site outside of docs/: the README as the first page, the benchmarks, the API, and files that pages
link to.

Pages link to each other and to the repository as they lie there, so that they can be read there too; the site gives
every such link its place here. Markdown is read as the repository's readers read it: a list needs no blank line before
it.
"""

from __future__ import annotations

import ast
import functools
import logging
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path

from logo import favicon, white_mark
from page_sources import PAGES

ROOT = Path(__file__).parents[1]
SCRIPTS = {  # beside the pages, where they have been fetched
    "mermaid.min.js": ROOT / "build" / "mermaid" / "package" / "dist" / "mermaid.min.js",
    "iframe-worker.js": ROOT / "build" / "iframe-worker" / "package" / "shim" / "index.js",
}
GLOSSARY = "glossary.md"
ABBREVIATION = re.compile(r"^\| (\w*[A-Z]\w*[A-Z]\w*) \| [^|]*\| ([^|]+) \|", re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
INLINE = re.compile(r"<code>([^<\n]*--[^<\n]*)</code>")
OPTION = re.compile(r"(?<![\w-])--\w[\w.-]*")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
TEXT = re.compile(r">[^<]+<")
JOINT = re.compile(r"(?<=\w[_|])(?=\w)")
ALERT = re.compile(r"> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]$")
FENCE = re.compile(r"^\s*```")
ITEM = re.compile(r"\s*([-*]|\d+\.) ")
SETTINGS_TABLE = re.compile(r"<table>(?=\s*<thead>\s*<tr>\s*<th[^>]*>setting</th>)")
TIMES = re.compile(r"(?<=\d) (?=×)")
API = """# API

The names that `import megalith` exports. Everything else is internal and changes without notice.
"""
API_PARTS = {  # first name of each part
    "RunConfig": "Run files",
    "init_mesh": "Your own training loop",
    "Loss": "Your own loss, model, optimizer or dataset",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for name in (
        "griffe",
        "mkdocs.plugins.griffe",
    ):  # it reads no __all__ that is made at run time, as Accelerate's is
        logging.getLogger(name).addFilter(lambda record: "__all__" not in record.getMessage())
    if SCRIPTS["mermaid.min.js"].is_file():
        config.extra_javascript.insert(0, "mermaid.min.js")
    if SCRIPTS[
        "iframe-worker.js"
    ].is_file():  # the search in a folder; else its plugin has every page fetch it
        config.extra["polyfills"] = ["iframe-worker.js"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    add = lambda uri, content: files.append(File.generated(config, uri, content=content))  # noqa: E731
    for source, uri in PAGES.items():
        add(uri, (ROOT / source).read_text("utf-8"))
    add("api.md", api_page())
    add("run.schema.json", run_schema())
    add("header_logo.svg", white_mark())
    add("favicon.svg", favicon())
    add("site.css", (Path(__file__).parent / "site.css").read_text("utf-8"))
    for name, script in SCRIPTS.items():
        if script.is_file():
            files.append(File.generated(config, name, abs_src_path=str(script)))
    for name in sorted(linked_files(files)):
        add(f"files/{name}", (ROOT / name).read_bytes())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    text = spaced_lists(LINK.sub(lambda match: f"]({place_of(match[1], here)}", admonitions(markdown)))
    return text if here == GLOSSARY else text + abbreviations()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Options are not broken after their hyphens, nor figures before their ×; names in a table may be after an
    underscore, choices after a bar. A table of settings is marked, because phones show it as a list."""
    html = SETTINGS_TABLE.sub("<table data-settings>", html)
    whole = lambda match: OPTION.sub(r'<span class="option">\g<0></span>', match[0])  # noqa: E731
    jointed = lambda match: TIMES.sub("\N{NO-BREAK SPACE}", JOINT.sub("<wbr>", match[0]))  # noqa: E731
    return CELL.sub(lambda cell: TEXT.sub(jointed, cell[0]), INLINE.sub(whole, html))


def repository_path(uri: str) -> str:
    """Where the source of a page of the site lies in the repository."""
    if uri == "index.md":
        return "home.md"  # links from the root
    return next((source for source, page in PAGES.items() if page == uri), f"docs/{uri}")


def target_of(link: str, uri: str) -> str:
    """The file of the repository that a link on a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(uri)), link))


def place_of(link: str, uri: str) -> str:
    """The link as the site has it."""
    target = target_of(link, uri)
    if target in PAGES:
        there = PAGES[target]
    elif target.startswith("docs/"):
        there = target.removeprefix("docs/")
    else:
        there = f"files/{target}"
    return posixpath.relpath(there, posixpath.dirname(uri) or ".")


def linked_files(files: Files) -> set[str]:
    """Files outside docs/ that pages link to."""
    found = {
        target_of(link, page.src_uri)
        for page in files.documentation_pages()
        for link in LINK.findall(page.content_string)
    }
    outside = (name for name in found if name not in PAGES and not name.startswith(("docs/", "..")))
    return {name for name in outside if (ROOT / name).is_file()}


def admonitions(markdown: str) -> str:
    """Turn GitHub's alerts (`> [!NOTE]` and the quoted lines after it) into admonitions."""
    lines: list[str] = []
    inside = False
    for line in markdown.split("\n"):
        if alert := ALERT.match(line):
            inside = True
            lines += [f"!!! {alert[1].lower()}", ""]
        elif inside and line.startswith(">"):
            lines.append(f"    {line[1:].strip()}")
        else:
            inside = False
            lines.append(line)
    return "\n".join(lines)


def spaced_lists(markdown: str) -> str:
    """A blank line before each list that follows a paragraph, and nested items four columns in."""
    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        fenced ^= bool(FENCE.match(line))
        if not fenced and (item := ITEM.match(line)):
            before = lines[-1] if lines else ""
            if before.strip() and not ITEM.match(before) and not before.startswith(" "):
                lines.append("")
            if 2 <= len(line) - len(line.lstrip()) < 4 and item[1] in "-*":
                line = f"    {line.lstrip()}"
        lines.append(line)
    return "\n".join(lines)


@functools.cache
def abbreviations() -> str:
    """Return the Markdown that gives each page the tooltips of abbreviations, from docs/glossary.md."""
    rows = ABBREVIATION.findall((ROOT / "docs" / GLOSSARY).read_text("utf-8"))
    return "\n\n" + "".join(f"*[{word}]: {meaning}\n" for word, meaning in rows)


def run_schema() -> str:
    """Return the JSON Schema of run files. It needs pydantic, but not torch."""
    sys.path.insert(0, str(ROOT))
    from megalith.config.describe import schema_text

    return schema_text()


def api_page() -> str:
    sys.path.insert(0, str(ROOT))
    import megalith  # no part of it, which would need torch

    heading = "    options:\n      heading: megalith.{0}\n      toc_label: {0}\n"
    homes = {name: home.partition(":") for name, home in megalith._MODULES.items()}
    overview, entries = "", ""
    for name, (home, _, other) in homes.items():
        if name in API_PARTS:
            overview += f"\n**{API_PARTS[name]}**\n\n| Name | Use |\n|---|---|\n"
        place = f"{home}.{other or name}"
        overview += f"| [{name}][{place}] | {summary_of(home, other or name)} |\n"
        entries += f"\n::: {place}\n{heading.format(name)}"
    return f"{API}{overview}{entries}"


def summary_of(module: str, name: str) -> str:
    """Return the first paragraph of the docstring of a class or function, wherever its package takes it from."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return summary_of(str(node.module), name)
    raise LookupError(f"{module} has no {name}")
