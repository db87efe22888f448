"""Tables for people: columns as wide as needed, wrapped to fit the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

from cli.output import escape, say

NARROWEST = 12


def say_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Collection[str] = ()) -> None:
    """Print a table on stdout.  In a file or a pipe every row is one line; on a terminal long cells are wrapped.

    Args:
        whole: titles of columns whose cells are never broken, such as ids.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in folded(titles, rows, width, whole=whole):
        say(line)


def folded(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, *, whole: Collection[str] = ()
) -> list[str]:
    """The lines of a table, with two spaces between columns; the widest columns are narrowed to fit ``width``."""
    lines = [[escape(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    narrow = [place for place, title in enumerate(titles) if title not in whole]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(narrow, key=lambda place: widths[place], default=None)
        if widest is None or widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    shown = []
    for line in lines:
        cells = [(cell and textwrap.wrap(cell, wide)) or [""] for cell, wide in zip(line, widths, strict=True)]
        for level in range(max(map(len, cells))):
            parts = ((cell[level] if level < len(cell) else "").ljust(w) for cell, w in zip(cells, widths, strict=True))
            shown.append("  ".join(parts).rstrip())
    return shown
