"""Write llms.txt: the documentation's pages with a sentence each, for language models (llmstxt.org).

    python site/llms.py > llms.txt

The pages and their order are the site's navigation. The sentence is the first of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from page_sources import PAGES

ROOT = Path(__file__).parents[1]
SOURCES = {page: source for source, page in PAGES.items()}
GENERATED = {"api.md", "licences.md"}  # while the site is built
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SENTENCE = re.compile(r".*?(?<!et al)[.:](?=\s|$)", re.DOTALL)


class _Loader(yaml.SafeLoader):
    """Loader that reads mkdocs.yml without resolving its Python names."""


_Loader.add_multi_constructor("!ENV", lambda loader, suffix, node: None)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def llms_text() -> str:
    """Return the contents of llms.txt."""
    config = yaml.load((ROOT / "site" / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for entry in config["nav"]:
        for title, pages in entry.items():
            if isinstance(pages, str):
                lines += ["", *_items([pages])]
            else:
                lines += ["", f"## {title}", "", *_items(pages)]
    return "\n".join(lines) + "\n"


def _items(pages: list[str | dict[str, str]]) -> Iterator[str]:
    for entry in pages:
        page = (
            entry if isinstance(entry, str) else next(iter(entry.values()))
        )  # a dict has the title of its own
        if page in GENERATED:
            continue
        path = SOURCES.get(page, f"docs/{page}")
        title, sentence = _heading((ROOT / path).read_text(encoding="utf-8"))
        yield f"- [{title}]({path}): {sentence}"


def _heading(text: str) -> tuple[str, str]:
    """Return a page's title and the first sentence of its first paragraph."""
    title, _, rest = text.partition("\n")
    paragraphs = (block.strip() for block in CODE.sub("", rest).split("\n\n"))
    first = next(block for block in paragraphs if block and block[0] not in "#|!<>-*0123456789")
    sentence = " ".join(SENTENCE.match(LINK.sub(r"\1", first) + ".")[0].split())
    return title.removeprefix("# "), sentence.rstrip(".:") + "."


if __name__ == "__main__":
    print(llms_text(), end="")
