"""The logo: four stones that carry a fifth. It needs no package, so that the site's build can import it."""

from __future__ import annotations

INK_LIGHT, INK_DARK = "#333a44", "#d5dae1"  # on light and on dark pages, as the pictures' text
STONES = ((10, 25), (10, 41.5), (40, 25), (40, 41.5))  # left and top edge of each stone below
RANKS = ("#74a9e8", "#f0a35e", "#7fc48d", "#c99be0")  # the colours of ranks in the pictures
WHITE = 'fill="#fff"'
NAME = "Megalith: four stones, one per rank, carry a fifth"


def _mark(lintel: str, stones: list[str]) -> str:
    """Return the shapes of the mark, 64 units wide and high."""
    below = "".join(
        f'<rect x="{x:g}" y="{y:g}" width="14" height="14.5" rx="2" {fill}/>'
        for (x, y), fill in zip(STONES, stones, strict=True)
    )
    return f'<rect x="4" y="9" width="56" height="13" rx="3" {lintel}/>{below}'


def white_mark() -> str:
    """Return the mark in white, for the site's coloured header."""
    stones = [f'{WHITE} fill-opacity="{opacity}"' for opacity in (0.9, 0.65, 0.65, 0.9)]
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">{_mark(WHITE, stones)}</svg>\n'


def _coloured(width: int, size: str, words: str) -> str:
    style = (
        f".ink{{fill:{INK_LIGHT}}}@media(prefers-color-scheme:dark){{.ink{{fill:{INK_DARK}}}}}"
        "text{font:700 38px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    )
    stones = [f'fill="{colour}"' for colour in RANKS]
    mark = _mark('class="ink"', stones)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 64" {size} role="img">'
        f"<title>{NAME}</title><style>{style}</style>{mark}{words}</svg>\n"
    )


def favicon() -> str:
    """Return the mark in colour; its ink follows the browser's light or dark scheme."""
    return _coloured(64, 'width="64" height="64"', "")


def logo() -> str:
    """Return the mark with the name, for light and dark pages."""
    name = '<text class="ink" x="76" y="46" textLength="186" lengthAdjust="spacingAndGlyphs">Megalith</text>'
    return _coloured(270, 'width="270" height="64"', name)
