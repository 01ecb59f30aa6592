"""A picture as SVG, small and the same each time: shapes are gathered by colour into one path each, text stays text.

A picture is 480 units wide, so that a phone shows its 12-unit letters at about nine pixels. It has no background, and
its ink follows the page: a reader's browser asks the picture for dark or light ink, as it does of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 480
SCALE = 1.4  # of a wide page, where there is room
COLOURS = {  # class: on both white and black, with dark letters on it
    "r0": "#74a9e8",
    "r1": "#f0a35e",
    "r2": "#7fc48d",
    "r3": "#c99be0",
    "r4": "#e58b8b",
    "r5": "#c9b458",
    "b0": "#4d86cc",  # the same rank's second chunk
    "b1": "#d07f35",
    "grey": "#b4bac2",
}
RANKS = ("r0", "r1", "r2", "r3")
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#333a44}"
    ".h{font-weight:600;font-size:13px}.s{font-size:11px}.t{font-size:8.5px}.e{text-anchor:end}.m{text-anchor:middle}"
    ".line{fill:none;stroke:#8a929d}.head{fill:#8a929d}.void{fill:#8a929d;fill-opacity:.16}"
    "@media(prefers-color-scheme:dark){text{fill:#d5dae1}}.on{fill:#10151c}"
)


def number(value: float) -> str:
    return f"{round(value, 1):g}"


class Picture:
    """Shapes and text of one picture; `svg` is the file."""

    def __init__(self, title: str):
        self.title = title
        self._paths: dict[str, list[str]] = {}
        self._text: list[str] = []
        self.bottom = 0.0

    def box(self, colour: str, x: float, y: float, width: float, height: float) -> None:
        """A filled rectangle: a name of COLOURS, `void` for what is not there, `line` for an outline."""
        if width > 0 and height > 0:
            path = f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z"
            self._paths.setdefault(colour, []).append(path)
            self.bottom = max(self.bottom, y + height)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Words from x on, above the line y. Kinds: `h` a heading, `s` small, `m` around x, `e` up to x, `on` a box."""
        kind = f' class="{kind}"' if kind else ""
        self._text.append(f'<text x="{number(x)}" y="{number(y)}"{kind}>{escape(words, quote=False)}</text>')
        self.bottom = max(self.bottom, y + 3)

    def letters(self, places: Sequence[float], y: float, letters: Sequence[str]) -> None:
        """One tiny letter on a box at each place of a line."""
        if letters:
            at, words = " ".join(map(number, places)), "".join(letters)
            self._text.append(f'<text x="{at}" y="{number(y)}" class="t m on">{words}</text>')

    def lines(self, y: float, words: str, width: int = 74, x: float = 0, kind: str = "") -> float:
        """Words in as many lines as they take, of at most `width` letters, the first above y; the next line's y."""
        line = ""
        for word in words.split():
            if line and len(line) + 1 + len(word) > width:
                self.text(x, y, line, kind)
                line, y = "", y + 16
            line = f"{line} {word}".strip()
        self.text(x, y, line, kind)
        return y + 16

    def legend(self, y: float, *items: tuple[str, str]) -> None:
        """Colours and what they stand for, in a line."""
        x = 0.0
        for colour, words in items:
            self.box(colour, x, y, 12, 12)
            self.text(x + 16, y + 10, words, "s")
            x += 26 + 5.8 * len(words) + 4 * sum(map(words.count, "mw"))

    def labelled(self, colour: str, x: float, y: float, width: float, height: float, *words: str) -> None:
        """A box with a line of words, or several, in its middle."""
        self.box(colour, x, y, width, height)
        middle = y + height / 2 + 4 - 7 * (len(words) - 1)
        for place, line in enumerate(words):
            self.text(x + width / 2, middle + 14 * place, line, "s m on")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Through these points, with its head at the last."""
        route = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._paths.setdefault("line", []).append(f"M{route}")
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        head = [
            (x + dx, y + dy),
            (x - 6 * dx + 4 * dy, y - 6 * dy + 4 * dx),
            (x - 6 * dx - 4 * dy, y - 6 * dy - 4 * dx),
        ]
        self._paths.setdefault("head", []).append(
            "M" + "L".join(f"{number(a)} {number(b)}" for a, b in head) + "z"
        )
        self.bottom = max(self.bottom, *(y for _, y in points))

    def svg(self) -> str:
        height = round(self.bottom + 6)
        used = "".join(f".{name}{{fill:{colour}}}" for name, colour in COLOURS.items() if name in self._paths)
        drawn = sorted(
            self._paths.items(), key=lambda path: ("void", *COLOURS, "line", "head").index(path[0])
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                f'width="{WIDTH * SCALE:g}" height="{number(height * SCALE)}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}{used}</style>",
                *(f'<path class="{name}" d="{"".join(paths)}"/>' for name, paths in drawn),
                *self._text,
                "</svg>\n",
            ]
        )
