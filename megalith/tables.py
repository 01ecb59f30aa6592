"""Plain-text tables, paragraphs and numbers for the terminal, at most 100 columns wide."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from megalith.errors import LINES, printable

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 100  # columns in a file or a pipe, and the maximum on a terminal
MIN_WIDTH = 20  # columns that lines are wrapped for


def columns() -> int:
    """Return the width of standard output, at most WIDTH; a file or a pipe has WIDTH columns."""
    wide = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    return min(max(wide, MIN_WIDTH), WIDTH)


def render(table: Table) -> str:
    """Return the table as plain text, at most WIDTH wide.

    If the terminal is too narrow for it, each row becomes `heading value, heading value, …`.
    """
    heading, rows = render_lines(table)
    return "\n".join([*heading, *rows])


def render_lines(table: Table) -> tuple[list[str], list[str]]:
    """Return the lines of the heading and the lines of the rows, formatted as in `render`."""
    from rich.console import Console

    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    width = columns()
    if width < WIDTH and console.measure(table).maximum > width:
        headings = [str(column.header) for column in table.columns]
        return [], [
            _row_as_text(headings, row, width) for row in zip(*(column.cells for column in table.columns))
        ]
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return (lines[:2], lines[2:]) if table.show_header else ([], lines)


def _row_as_text(headings: Sequence[str], row: Sequence[object], width: int) -> str:
    pairs = [f"{heading} {cell}".strip() for heading, cell in zip(headings, row) if str(cell)]
    return fill(", ".join(pairs), width, subsequent_indent="  ", break_on_hyphens=False)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of texts as columns: the first aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, *cells in rows:
        print(name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:])), sep="  ")


def counted(number: int, noun: str) -> str:
    """Return the number with the noun in singular or plural: `1 rank`, `2 micro-batches`, `4,096 samples`."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def format_si(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits and an SI suffix: 81200 → `81.2k`, 124439808 → `124M`."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if float(f"{value:.{digits}g}") >= factor:
            scaled = value / factor
            return f"{scaled:.{max(0, digits - len(str(int(scaled))))}f}{suffix}"
    return f"{value:.{digits}g}"


def format_bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def memory_unit(totals: Iterable[int]) -> tuple[str, float]:
    """Return the unit to print these sizes in, GB or MB, and the number of bytes in it."""
    return ("GB", 1e9) if max(totals) >= 1e9 else ("MB", 1e6)


def format_amount(size: float, unit: float) -> str:
    """Return `size / unit` with up to two decimals, without the unit."""
    return f"{size / unit:.{2 if size < 9.995 * unit else 1 if size < 99.95 * unit else 0}f}"


def wrap_paragraph(text: str) -> str:
    """Wrap the text to WIDTH, or to the terminal if it is narrower."""
    return fill(printable(text, LINES), columns(), subsequent_indent="  ", break_on_hyphens=False)


def plain_table(*headings: str, left: int = 1) -> Table:
    """Return a table without borders. The first `left` columns are aligned left, the others right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    return table
