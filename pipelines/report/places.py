"""Which cells of a paper's table our runs stand beside.

    places(table, ["*-none-*=RoBERTa-8-MLM", "*-ag-*=RoBERTa-8-AG"], ["*=English"])

Patterns are those of a shell (``*``, ``?``, ``[abc]``); the first that fits a name counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from guidance.errors import InputError, UnknownName
from pipelines.papers import PaperTable

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TablePlaces:
    """Patterns of names, each with its row, and with its column, of a table."""

    rows: Pairs = ()
    columns: Pairs = ()

    def of(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Row and column of runs that have these names; None unless both are given."""
        names = list(names)
        row, column = (_first(pairs, names) for pairs in (self.rows, self.columns))
        return None if row is None or column is None else (row, column)

    def unused(self, names: Iterable[str]) -> list[str]:
        """The flags whose pattern fits none of these names."""
        names = list(names)
        flags = [("--row", pair) for pair in self.rows] + [("--column", pair) for pair in self.columns]
        return [f"{flag} {pair[0]}={pair[1]}" for flag, pair in flags if _first([pair], names) is None]


def places(table: PaperTable, rows: Sequence[str], columns: Sequence[str]) -> TablePlaces:
    """What ``--row`` and ``--column`` say, each ``PATTERN=NAME``.  Where a table has one column, all runs are of it.

    Raises:
        InputError: no ``=``.
        UnknownName: the table has no such row or column.
    """
    every = {
        "row": list(dict.fromkeys(number.row for number in table.numbers)),
        "column": list(dict.fromkeys(number.column for number in table.numbers)),
    }
    found = {
        what: tuple(_pair(table, what, each, every[what]) for each in given)
        for what, given in (("row", rows), ("column", columns))
    }
    if not columns and len(every["column"]) == 1:
        found["column"] = (("*", every["column"][0]),)
    return TablePlaces(found["row"], found["column"])


def _pair(table: PaperTable, what: str, given: str, known: Sequence[str]) -> tuple[str, str]:
    pattern, sign, name = given.partition("=")
    if not sign or not pattern:
        raise InputError(
            f"--{what} {given!r} is not a pattern of names of runs, and a {what} of {table.name}",
            hint=f"--{what} '*-plain-*={known[0]}'",
        )
    if name not in known:
        raise UnknownName(f"{what} of {table.name}", name, known)
    return pattern, name


def _first(pairs: Iterable[tuple[str, str]], names: Sequence[str]) -> str | None:
    return next((place for pattern, place in pairs if any(fnmatchcase(name, pattern) for name in names)), None)
