"""Tables and nested values for people: columns as wide as needed, wrapped to fit the terminal."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cli.output import escape

NARROWEST = 12


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, whole: Collection[str] = ()) -> list[str]:
    """The lines of a table on stdout.  In a file or a pipe every row is one line; on a terminal long cells are wrapped,
    except in the columns with the titles ``whole``, such as those of ids."""
    return folded(titles, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None, whole=whole)


def folded(
    titles: Sequence[str], rows: Iterable[Sequence[str]], width: int | None, *, whole: Collection[str] = ()
) -> list[str]:
    """The lines of a table, with two spaces between columns; the widest columns are narrowed to fit ``width``."""
    lines = [[escape(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(map(cells, column)) for column in zip(*lines, strict=True)]
    narrow = [column for column, title in enumerate(titles) if title not in whole]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(narrow, key=lambda column: widths[column], default=None)
        if widest is None or widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    shown = []
    for line in lines:
        wrapped = [_wrapped(cell, wide) for cell, wide in zip(line, widths, strict=True)]
        for parts in itertools.zip_longest(*wrapped, fillvalue=""):
            shown.append("  ".join(map(padded, parts, widths)).rstrip())
    return shown


def cells(text: str) -> int:
    """The width of a text on a terminal, where letters of Chinese or Japanese take two cells and combining marks none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def padded(text: str, width: int) -> str:
    """A text with spaces behind it, as wide as ``width`` cells."""
    return text + " " * (width - cells(text))


def _wrapped(text: str, width: int) -> list[str]:
    if not text.strip():
        return [""]  # of columns that are empty, which have no width
    lines = textwrap.wrap(text, width)
    if not text.isascii():
        from rich.cells import chop_cells

        lines = [part for line in lines for part in chop_cells(line, width) or [""]]
    return lines


def nested(key: str, value: Any) -> Iterator[str]:
    """A key and its value as lines for people: a mapping of mappings has one line for each, a plain one is one line."""
    if not isinstance(value, Mapping) or not value:
        yield f"{key}: {plain(value)}"
    elif any(isinstance(item, Mapping) and item for item in value.values()):
        yield f"{key}:"
        for name, item in value.items():
            yield from (f"  {line}" for line in nested(str(name), item))
    else:
        yield f"{key}: " + ", ".join(f"{name} {_number(item)}" for name, item in value.items())


def plain(value: Any) -> str:
    """A text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: Any) -> str:
    return f"{value:,}" if type(value) is int else plain(value)
