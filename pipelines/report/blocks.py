"""What a report consists of: sections of sentences, tables, pictures and listings, before they become a page."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.views.comparison_tables import Table, markdown_table, numeric_columns
from pipelines.views.evaluations import Tested
from pipelines.views.tested_tables import tables_of_tests


@dataclass(frozen=True)
class Prose:
    """A paragraph; with ``note`` it is a warning, which stands out on the page."""

    text: str
    note: bool = False


@dataclass(frozen=True)
class Items:
    """A sentence that introduces a list, and the list."""

    text: str
    items: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table, the name of its files, and the numbers of the rows that stand out on the page."""

    name: str
    table: Table
    marked: Sequence[int] = ()


@dataclass(frozen=True)
class Picture:
    """A figure as SVG and PDF, and the name of its files; ``says`` describes it to readers who cannot see it."""

    name: str
    caption: str
    says: str
    svg: bytes
    pdf: bytes


@dataclass(frozen=True)
class Listing:
    """Lines of code, and the name of the file in which they are also written."""

    name: str
    text: str


def notes_of(texts: Iterable[str]) -> list[Prose]:
    """Remarks, as `guide compare` makes them, as paragraphs of their own."""
    return [Prose(f"Note: {text}.", note=True) for text in texts]


def grids_of_tests(name: str, tests: Sequence[Tested]) -> list[Grid]:
    """The tables of some tests; their files are called ``NAME-test-1`` and so on."""
    return [Grid(f"{name}-test-{n}", table) for n, table in enumerate(tables_of_tests(tests), 1)]


Block = Prose | Items | Grid | Picture | Listing


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it; ``name`` is its anchor."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        lead: what stands below the title.
        facts: all figures, as ``--json`` prints them.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    facts: dict[str, Any] = field(default_factory=dict)

    def files(self) -> Iterator[tuple[str, bytes]]:
        """The files beside the page: every table as CSV and LaTeX, every picture as SVG and PDF, every listing."""
        for block in (block for section in self.sections for block in section.blocks):
            if isinstance(block, Grid):
                yield f"tables/{block.name}.csv", as_csv(block.table).encode()
                yield f"tables/{block.name}.tex", as_latex(block.table, block.name).encode()
            elif isinstance(block, Picture):
                yield f"figures/{block.name}.svg", block.svg
                yield f"figures/{block.name}.pdf", block.pdf
            elif isinstance(block, Listing):
                yield block.name, block.text.encode()


def file_name(text: str) -> str:
    """A text as a part of a file name and of an anchor: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "x"


def as_csv(table: Table) -> str:
    """A table as CSV, with the cells that the page shows."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.titles, *table.cells])
    return text.getvalue()


_LATEX = {
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "<": r"$<$",
    ">": r"$>$",
    "×": r"$\times$",
    "†": r"$\dagger$",
    "λ": r"$\lambda$",
    "ρ": r"$\rho$",
    "→": r"$\rightarrow$",
    "−": r"$-$",
}


def as_latex(table: Table, name: str) -> str:
    """A table for a paper, with the lines of the package booktabs."""

    def row(cells: Sequence[str]) -> str:
        return " & ".join("".join(_LATEX.get(sign, sign) for sign in cell) for cell in cells) + r" \\"

    caption = "".join(_LATEX.get(sign, sign) for sign in table.caption)
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        rf"\caption{{{caption}}}\label{{tab:{name}}}",
        r"\begin{tabular}{" + "".join("r" if numeric else "l" for numeric in numeric_columns(table)) + "}",
        r"\toprule",
        row(table.titles),
        r"\midrule",
        *map(row, table.cells),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def as_markdown(report: Report, folder: str) -> str:
    """A report as Markdown; its pictures are the files in ``folder``."""
    lines = [f"# {_plain(report.title)}", "", _plain(report.lead)]
    for section in report.sections:
        lines += ["", f"## {_plain(section.title)}"]
        for block in section.blocks:
            lines.append("")
            if isinstance(block, Prose):
                lines.append(f"> {_plain(block.text)}" if block.note else _plain(block.text))
            elif isinstance(block, Items):
                lines += [_plain(block.text), "", *(f"- {_plain(item)}" for item in block.items)]
            elif isinstance(block, Grid):
                lines += [f"*{_plain(block.table.caption)}*", "", *markdown_table(block.table)]
            elif isinstance(block, Picture):
                lines += [
                    f"![{_plain(block.says)}]({folder}/figures/{block.name}.svg)",
                    "",
                    f"*{_plain(block.caption)}*",
                ]
            else:
                lines += ["```" + block.name.rpartition(".")[2], block.text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """A text on one line with the special characters of Markdown escaped; an ampersand is escaped only where it would begin an entity."""
    return re.sub(r"([\\`*_<>\[\]|]|&(?=#?\w+;))", r"\\\1", " ".join(text.split()))


def data_uri(svg: bytes) -> str:
    """An SVG picture as an address that holds the picture itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
