"""Terminals of recorded commands (record.py) as SVG: text in a window, with the colours of the recording.

`draw` shows a screen. `play` animates a long recording; readers who have asked for less motion see its last screen.
"""

from __future__ import annotations

from collections.abc import Sequence
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
ROWS = 26  # of a screen that scrolls
COMMAND, OUTPUT, END = (
    1.6,
    0.18,
    9.0,
)  # seconds: before and after a command's lines, per line of output, at the end
PROMPT = "\x1b[1m"


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


def first_hour() -> str:
    return play(
        "first_hour",
        "The first hour in a terminal: install, train, fine-tune from a folder, GRPO, and answers of the result",
    )


def draw(recording: str, title: str) -> str:
    """Return the SVG of a recording."""
    texts = [Text.from_ansi(line) for line in _lines(recording)[:MAX_LINES]]
    return _window(title, len(texts), "\n".join(_rows(texts)))


def play(recording: str, title: str) -> str:
    """Return the SVG of a recording whose lines appear one by one and scroll. It starts again after its end."""
    lines = _lines(recording)
    texts = [Text.from_ansi(line) for line in lines]
    seconds, times = 0.0, [0.0]  # at which so many lines are visible
    for line, text, after in zip(lines, texts, [*lines[1:], ""]):
        seconds += COMMAND if text.plain.startswith("$ ") else OUTPUT
        times.append(seconds)
        seconds += COMMAND * (line.startswith(PROMPT) and not after.startswith(PROMPT))
    total = seconds + END
    covered = [(time, count) for count, time in enumerate(times[: ROWS + 1])]
    scrolled = [(0.0, 0), *((time, -count) for count, time in enumerate(times[ROWS + 1 :], 1))]
    style = (
        _motion("s", scrolled, total)
        + _motion("c", covered, total)
        + f"@media(prefers-reduced-motion:no-preference){{.s,.c{{animation:s {total:.1f}s step-end infinite}}"
        + ".c{animation-name:c}}"
    )
    width, height = _width(), ROWS * LINE
    screen = f'<rect y="{TOP:g}" width="{width:g}" height="{height:g}"'
    return _window(
        title,
        ROWS,
        f'<clipPath id="v">{screen}/></clipPath><g clip-path="url(#v)"><g class="s">'
        + "\n".join(_rows(texts))
        + f'</g>{screen} class="c" fill="{BACK}"/></g>',
        style,
    )


def _motion(name: str, steps: Sequence[tuple[float, int]], total: float) -> str:
    """Return the CSS of a class that is moved down by so many rows at each time. Without motion it is at the end."""
    move = "transform:translateY({:g}px)".format
    frames = "".join(f"{100 * time / total:.2f}%{{{move(rows * LINE)}}}" for time, rows in steps)
    return f".{name}{{{move(steps[-1][1] * LINE)}}}@keyframes {name}{{{frames}}}"


def _lines(recording: str) -> list[str]:
    return (RECORDINGS / f"{recording}.ansi").read_text(encoding="utf-8").splitlines()


def _rows(texts: Sequence[Text]) -> list[str]:
    return [_row(text, TOP + (number + 0.75) * LINE) for number, text in enumerate(texts)]


def _width() -> float:
    return 2 * EDGE + COLUMNS * LETTER


def _window(title: str, rows: int, content: str, more_style: str = "") -> str:
    """Return a window of so many rows with its content."""
    width, height = _width(), TOP + rows * LINE + EDGE
    dots = [
        f'<circle cx="{EDGE + 4 + 16 * n:g}" cy="17" r="5" fill="{colour}"/>' for n, colour in enumerate(DOTS)
    ]
    style = f"{more_style}text{{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}}"
    name = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="{name}"><title>{name}</title><style>{style}</style>'
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{BACK}"/>{"".join(dots)}\n'
        f"{content}</svg>\n"
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
