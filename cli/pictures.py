"""Pictures made of characters: a matrix over tokens, or over layers and heads, as lines of text.

Shades are block characters (``░▒▓█``), or digits and ``#`` in ASCII; neither needs colour.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from cli.output import escape
from cli.tables import cells, padded

LONGEST_ROW_LABEL = 16
LONGEST_COLUMN_LABEL = 12
SHADES = "░▒▓█"
ASCII_SHADES = "0123456789#"
WIDEST_BAR = 20


def square(weights_QK: Any, labels: Sequence[str], *, ascii: bool) -> list[str]:
    """A matrix over the tokens of a text as lines that fit the terminal."""
    return matrix_lines(weights_QK.tolist(), labels, labels, width=shutil.get_terminal_size().columns, ascii=ascii)


def bar(value: float | None, *, ascii: bool) -> str:
    """A number from 0 to 1 as a bar, which is visible for every number above 0."""
    eighths = math.ceil((value or 0) * WIDEST_BAR * 8)
    if ascii:
        return "#" * math.ceil(eighths / 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def matrix_lines(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], *, width: int, ascii: bool = False
) -> list[str]:
    """A matrix of numbers, usually between 0 and 1, as lines at most ``width`` characters wide.

    Column labels run downwards.  A cell is two characters wide if that fits, so that it looks square, otherwise one.  A
    matrix that is still too wide is split into blocks of columns, one below the other.
    """
    shown_rows = [_cut(label, LONGEST_ROW_LABEL, ascii) for label in rows]
    shown_columns = [list(_clusters(_cut(label, LONGEST_COLUMN_LABEL, ascii))) for label in columns]
    margin = max(map(cells, shown_rows), default=0) + 1
    wide = any(cells(cluster) > 1 for column in shown_columns for cluster in column)
    cell = 2 if wide or margin + 2 * len(columns) <= width else 1
    most = max(1, (width - margin) // cell)
    lines: list[str] = []
    for start in range(0, len(columns), most):
        block = slice(start, start + most)
        if len(columns) > most:
            lines += [""] * bool(lines)
            lines.append(f"columns {start + 1} to {min(start + most, len(columns))} of {len(columns)}")
        depth = max(map(len, shown_columns[block]))
        for level in range(depth):
            tops = ([""] * (depth - len(column)) + column for column in shown_columns[block])
            lines.append((" " * margin + "".join(padded(column[level], cell) for column in tops)).rstrip())
        for label, row in zip(shown_rows, values, strict=True):
            drawn = "".join(shade(value, cell, ascii=ascii) for value in row[block])
            lines.append((padded(label, margin) + drawn).rstrip())
    return lines


def shade(value: float, cell: int = 1, *, ascii: bool = False) -> str:
    """A number as a cell; only 0 looks empty, and only 1 or more looks full."""
    if value <= 0:
        return padded("." if ascii else "·", cell)
    shades = ASCII_SHADES if ascii else SHADES
    index = len(shades) - 1 if value >= 1 else int(value * (len(shades) - 1))
    return padded(shades[index], cell) if ascii else shades[index] * cell


def legend(*, weighted: bool, ascii: bool = False) -> str:
    """One line that explains the shades."""
    if not weighted:
        return f"{shade(1, 2, ascii=ascii).strip()} looked at   {shade(0, 1, ascii=ascii)} not"
    if ascii:
        return "weights: . nothing   0 to 9 tenths   # 1 and more"
    thirds = len(SHADES) - 1
    steps = (f"{shades * 2} below {(i + 1) / thirds:.2f}" for i, shades in enumerate(SHADES[:-1]))
    return f"weights: · nothing   {'   '.join(steps)}   {SHADES[-1] * 2} 1 and more"


def _clusters(text: str) -> Iterator[str]:
    """Characters, each with its combining marks."""
    cluster = ""
    for character in text:
        if cluster and cells(character):
            yield cluster
            cluster = ""
        cluster += character
    if cluster:
        yield cluster


def _cut(text: str, most: int, ascii: bool) -> str:
    text = escape(text)
    if ascii:
        text = text.encode("ascii", "backslashreplace").decode()
    if cells(text) <= most:
        return text
    mark = "~" if ascii else "…"
    kept = ""
    for cluster in _clusters(text):
        if cells(kept + cluster) >= most:
            break
        kept += cluster
    return kept + mark
