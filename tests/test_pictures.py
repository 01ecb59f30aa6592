"""The documentation's pictures are what today's program draws, and each is shown with words for who cannot see it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]*)\)")
LARGEST = 60_000  # bytes


def test_the_pictures_are_what_the_program_draws_today(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "site"))
    from pictures import PICTURES

    stale = []
    for name, draw in PICTURES.items():
        drawn = draw()
        assert len(drawn.encode()) < LARGEST, name
        if drawn != (IMAGES / f"{name}.svg").read_text(encoding="utf-8"):
            stale.append(name)
    assert not stale, f"make pictures draws {stale} otherwise: look at them, and commit them"


def test_every_picture_stands_on_a_page_with_a_description():
    shown = set()
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "RESULTS.md", ROOT / "README.md"]:
        for words, target in SHOWN.findall(page.read_text(encoding="utf-8")):
            assert len(words) > 40, (page, target)
            shown.add((page.parent / target).resolve())
    assert shown == set(IMAGES.iterdir())
