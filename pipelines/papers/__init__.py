"""The tables of the five papers as data, and the papers to cite.

    papers.table("a-table3").numbers

``tables/NAME.csv`` holds every cell of a table as it is printed, one number a line; ``tables.toml`` says what each table shows, which
paper it is from, and which of its rows are the same model without and with guidance.  ``references.bib`` has the papers that `source`
of patterns, mechanisms, objectives and probes name.
"""

from __future__ import annotations

import csv
import functools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guidance.errors import UnknownName

FOLDER = Path(__file__).parent

_CITED = re.compile(r"([A-Z][a-z]+(?:-[A-Z][a-z]+)?)(?: & [A-Z]\w+| et al\.)? (\d{4})")


@dataclass(frozen=True)
class Number:
    """One cell of a table.

    Attributes:
        row: method or model; ``column``: data set or setting; ``metric``: what the number is.
        value: its digits as printed; empty where the paper prints a dash.
        deviation: what the paper prints after ±, if it does.
        unit: percent (also F1, ROUGE and correlations times 100), fraction, nats, BLEU, count, …
        mark: what a sign beside the number means, such as ``significant p<.05``.
        note: a slip or a doubt about the number.
    """

    row: str
    column: str
    metric: str
    value: str
    deviation: str
    unit: str
    mark: str
    note: str

    @property
    def number(self) -> float | None:
        """The value as a number; None if it is a text, or is not given."""
        try:
            return float(re.sub(r"[, ]", "", self.value))
        except ValueError:
            return None


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper.

    Attributes:
        name: ``a-table3``, as recipes call it.
        paper: the key of the paper in ``references.bib``.
        source: paper and table as a text names them.
        shows: what it shows.
        pairs: rows of the same model without and with the method of the paper.
        numbers: its cells, in the order of the table.
    """

    name: str
    paper: str
    source: str
    shows: str
    pairs: tuple[tuple[str, str], ...]
    numbers: tuple[Number, ...]


@functools.cache
def _index() -> dict[str, dict[str, Any]]:
    return tomllib.loads((FOLDER / "tables.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """The names of all tables, in order."""
    return list(_index())


def table(name: str) -> PaperTable:
    """A table by its name.  Raises UnknownName, with near names, if there is none."""
    if name not in _index():
        raise UnknownName("table of a paper", name, names())
    about = _index()[name]
    with open(FOLDER / "tables" / f"{name}.csv", encoding="utf-8", newline="") as file:
        numbers = tuple(Number(**row) for row in csv.DictReader(file))
    pairs = tuple((one, other) for one, other in about.get("pairs", ()))
    return PaperTable(name, about["paper"], about["source"], about["shows"], pairs, numbers)


def cited(sources: Iterable[str]) -> list[str]:
    """The keys of the papers that some sources name, such as ``Wang et al. 2020, eq. 2``, in their order; papers that
    ``references.bib`` does not have are left out."""
    found = (f"{name}{year}".lower() for source in sources for name, year in _CITED.findall(source))
    known = entries()
    return [key for key in dict.fromkeys(found) if key in known]


@functools.cache
def entries() -> dict[str, str]:
    """The BibTeX entries, by key."""
    text = (FOLDER / "references.bib").read_text(encoding="utf-8")
    return {match[1]: match[0].strip() for match in re.finditer(r"^@\w+\{([\w-]+),\n(?:  .*\n)+\}$", text, re.M)}
