"""The command, and the page of a table."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import benchmarks.finetuning
from benchmarks import pages
from benchmarks.finetuning.runs import Table, evidence, figures_of, settings_digest
from benchmarks.finetuning.tables import TABLES
from benchmarks.pages import TESTED, Row, cell, cells_of_tests
from pipelines.storage.store import Store
from pipelines.views.comparison_tables import MISSING

NOTE = (
    "Corrected: by Holm's method over the rows of a data set.  *Could have been found*: the true gain that so many seeds show "
    "with a probability of 0.8 at a level of 0.05 divided by the number of rows, if gains vary over seeds as they did here."
)
SEEN = "\\*: the published model may have been trained on these texts."


def as_markdown(table: Table, rows: Sequence[Row]) -> str:
    """One line for each row and data set: mean and deviation, and a paired test against the first row of the table."""
    lines, notes = [], [NOTE]
    for name, data in table.data.items():
        own = {row["label"]: row for row in rows if row["data"] == name}
        mark = "\\*" if data.maybe_seen else ""
        lines += lines_of(table, name + mark, own, {label: row["runs"] for label, row in own.items()})
        for other in data.also:
            scores = {label: row["also"][other] for label, row in own.items()}
            lines += lines_of(table, f"{other}{mark}, models of {name}", own, scores)
        if lead := next((row["lead"] for row in own.values() if "lead" in row), None):
            notes.append(f"{name}: the first sentences of each document have {lead:.3f}.")
        if mark and own and SEEN not in notes:
            notes.append(SEEN)
    titles = ["data", "row", "metric", "runs", "mean", *TESTED, "rates"]
    return "\n\n".join([pages.table(titles, lines), *notes])


def lines_of(
    table: Table, name: str, rows: Mapping[str, Row], scores: Mapping[str, Sequence[float]]
) -> list[list[str]]:
    """The lines of one data set.

    Args:
        rows: by label.
        scores: of the runs of each row, by label.
    """
    first = next(iter(table.rows))
    gains = {
        label: [b - a for a, b in zip(scores[first], values, strict=True)]
        for label, values in scores.items()
        if first in scores and label != first
    }
    tested = cells_of_tests(gains)
    lines = []
    for label, row in rows.items():
        cells = [cell(scores[label]), *tested.get(label, [MISSING] * len(TESTED))]
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(row["rates"]))
        lines.append([name, label, row["metric"], f"{len(scores[label])} seeds", *cells, rates])
    return lines


def main() -> None:
    parser = pages.command(benchmarks.finetuning.__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose label contains TEXT")
    parser.add_argument("--data", default="", metavar="TEXT", help="only data sets whose name contains TEXT")
    arguments = parser.parse_args()
    table, path = TABLES[arguments.table], arguments.out / f"finetuning-{arguments.table}.json"
    store = Store(arguments.store)
    known = {**pages.known(path), "title": table.title, "rates": list(table.rates), "common": dict(table.settings)}
    before = len(known.get("rows", []))
    for name in table.data:
        for label in table.rows:
            if arguments.only in label and arguments.data in name:
                row = (table, label, name)
                names = {"label": label, "data": name}
                measure = functools.partial(figures_of, *row, known.get("rows", []), store)
                pages.add_row(path, known, names, settings_digest(*row), measure)
    rows = known.get("rows", [])
    if "evidence" not in known or len(rows) > before:
        known["evidence"] = evidence(table, {row["label"] for row in rows}, store)
        pages.save(path, known)
    text = as_markdown(table, rows)
    path.with_suffix(".md").write_text(
        f"# {table.title}\n\n`python -m benchmarks.finetuning {arguments.table}`\n\n{text}\n", encoding="utf-8"
    )
    print(text)


if __name__ == "__main__":
    main()
