"""Terminals of recorded commands (record.py) as SVG: text in a window, with the colours of the recording."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from rich.color import ColorType
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from pictures.record import COLUMNS, RECORDINGS

LETTER, LINE, EDGE, TOP = 7.2, 17.0, 14.0, 34.0
BACK, INK, DIM = "#11161d", "#d5dae1", "#7d8794"
DOTS = ("#e5534b", "#d29922", "#3fb950")
MAX_LINES = 40
BLANK = "\N{NO-BREAK SPACE}"  # several are not joined into one


def run() -> str:
    return draw(
        "run",
        "A training run in a terminal: settings, one line per log interval, and a live line with the time left",
    )


def plan() -> str:
    return draw("plan", "The plan of Llama-3-8B on eight H100 GPUs: four layouts with time, speed and memory")


def chat() -> str:
    return draw(
        "chat", "A conversation in a terminal: two questions about capitals, each with the model's answer"
    )


def draw(recording: str, title: str) -> str:
    """Return the SVG of a recording."""
    lines = (RECORDINGS / f"{recording}.ansi").read_text(encoding="utf-8").splitlines()[:MAX_LINES]
    texts = [Text.from_ansi(line) for line in lines]
    width, height = 2 * EDGE + COLUMNS * LETTER, TOP + len(texts) * LINE + EDGE
    rows = [_row(text, TOP + (number + 0.75) * LINE) for number, text in enumerate(texts)]
    dots = [
        f'<circle cx="{EDGE + 4 + 16 * n:g}" cy="17" r="5" fill="{colour}"/>' for n, colour in enumerate(DOTS)
    ]
    style = "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    name = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="{name}"><title>{name}</title><style>{style}</style>'
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{BACK}"/>{"".join(dots)}\n'
        + "\n".join(rows)
        + "</svg>\n"
    )


def _row(text: Text, y: float) -> str:
    """Return a line. Every part has its own position, so that a reader's font may be wider or narrower."""
    parts = []
    ends = sorted({0, len(text), *(edge for span in text.spans for edge in (span.start, span.end))})
    for start, end in pairwise(ends):
        shown = text.plain[start:end]
        if not shown.strip():
            continue
        spans = [span.style for span in text.spans if span.start <= start and span.end >= end]
        style = Style.combine(
            [Style(), *(Style.parse(one) if isinstance(one, str) else one for one in spans)]
        )
        lead = len(shown) - len(shown.lstrip())
        shown = shown.strip()
        length = (
            f' textLength="{len(shown) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
            if len(shown) > 1
            else ""
        )
        weight = ' font-weight="700"' if style.bold else ""
        x, words = EDGE + (start + lead) * LETTER, escape(shown.replace(" ", BLANK), quote=False)
        parts.append(f'<tspan x="{x:.1f}"{length}{weight} fill="{_ink(style)}">{words}</tspan>')
    return f'<text y="{y:.1f}">{"".join(parts)}</text>' if parts else ""


def _ink(style: Style) -> str:
    if style.color is None or style.color.type == ColorType.DEFAULT:
        return DIM if style.dim else INK
    return style.color.get_truecolor(DIMMED_MONOKAI).hex
