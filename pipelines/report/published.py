"""The numbers of a paper beside ours."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.papers import Number, PaperTable
from pipelines.report.blocks import Block, Grid, Items, Prose, Section
from pipelines.report.given import Runs
from pipelines.report.places import TablePlaces
from pipelines.report.results import Scored
from pipelines.views.comparison import Comparison
from pipelines.views.comparison_tables import MISSING, Table, p_value, rounded
from pipelines.views.evaluations import Tested
from pipelines.views.figures import Summary

OURS: Mapping[str, tuple[str, ...]] = {
    "train loss, final": ("final",),
    "train NLL": ("final",),
    "validation loss, final": ("valid", "validation loss"),
    "validation NLL": ("valid",),
    "MLM loss (valid)": ("mlm: valid",),
    "train loss, average over training": ("average",),
    "train loss, average": ("average",),
    "average train NLL": ("average",),
    "loss without the pattern": ("validation loss", "final"),
    "accuracy": ("accuracy",),
    "F1": ("f1",),
    "F-1": ("f1",),
    "P": ("precision",),
    "R": ("recall",),
    "R-1": ("rouge1",),
    "R-2": ("rouge2",),
    "R-L": ("rougeLsum",),
    "BLEU": ("bleu",),
    "Matthews correlation x100": ("matthews",),
    "Pearson correlation x100": ("pearson",),
    "Spearman x100": ("spearman",),
    "antecedent selection accuracy, best head, ALL": ("best head: accuracy",),
    **{
        f"antecedent selection accuracy, best head, {kind.upper()}": (f"best head: {kind}",)
        for kind in ("nominal", "pronominal", "proper")
    },
}
"""What our figures call the metrics of the papers, by their names in the tables; shares and ROUGE of ours are from 0 to 1."""

LOSSES = ("final", "valid", "average")


@dataclass(frozen=True)
class Ours:
    """Our figures of a group of runs.

    Attributes:
        data: what they were measured on; ``size``: of the models.
        figures: means and deviations over seeds.
        gains: differences from the baseline over pairs of seeds, each with its p-value; empty for the baseline.
        baseline: the label of the group that the gains are over.
        names: of its runs, by which `TablePlaces` finds their row and column.
    """

    label: str
    data: str
    size: str
    figures: Mapping[str, Summary]
    gains: Mapping[str, tuple[Summary, float | None]]
    baseline: str = ""
    names: Sequence[str] = ()


def of_training(compared: Comparison, data: str, sizes: Mapping[str, str]) -> list[Ours]:
    """Our losses; ``sizes``: of the models, by the label of a run."""
    base = compared.rows[0].group.label
    losses = {**{name: name for name in LOSSES}, f"{compared.loss}: valid": "valid"}
    return [
        Ours(
            row.group.label,
            data,
            sizes.get(row.group.curves[0].label, ""),
            {ours: row.summary[name] for ours, name in losses.items()},
            {ours: (row.difference[name], row.p[name]) for ours, name in losses.items()}
            if row.group.label != base
            else {},
            base,
            [curve.label for curve in row.group.curves],
        )
        for row in compared.rows
    ]


def of_scores(scored: Sequence[Scored], tests: Sequence[Tested], data: str) -> list[Ours]:
    """Our metrics of evaluations or searches."""
    found = []
    for each in scored:
        gains = {
            tested.metric: (
                Summary((tested.difference.effect,), tested.difference.effect),
                None if math.isnan(tested.difference.p) else tested.difference.p,  # of one pair there is none
            )
            for tested in tests
            if tested.other == each.label and tested.baseline == scored[0].label
        }
        figures = {name: each.summary(name) for name in each.metrics}
        found.append(Ours(each.label, data, "", figures, gains, scored[0].label, each.names))
    return found


def of_probes(runs: Runs) -> list[Ours]:
    """What the best heads found, in probes that ask a question."""
    found = []
    for each in runs.of("probe"):
        counts = each.artifact.counts
        best = {"accuracy": counts.get("best"), **counts.get("best_by", {})}
        figures = {
            f"best head: {name}": Summary.of([head[name]])
            for name, head in best.items()
            if head and head.get(name) is not None
        }
        found.append(Ours(each.label, f"probe {counts.get('probe', '')}", "", figures, {}, "", [each.label]))
    return found


def section(table: PaperTable, ours: Sequence[Ours], places: TablePlaces = TablePlaces()) -> Section:
    """Our figures in the rows of the paper's that they correspond to, with what the method changes there and here; then the whole
    table of the paper, and below it our figures that have no such row."""
    metrics = list(dict.fromkeys(number.metric for number in table.numbers))
    numeric = [name for name in metrics if any(n.number is not None for n in table.numbers if n.metric == name)]
    measured = {name: figure for name in numeric if (figure := _figure(name, ours))}
    shown = [each for each in ours if any(name in each.figures for name in measured.values())]
    placed: dict[tuple[str, str], list[Ours]] = {}
    for each in shown:
        if (place := places.of(each.names)) is not None:
            placed.setdefault(place, []).append(each)
    beside = _beside(table, placed, measured)
    blocks: list[Block] = []
    if beside.cells:
        blocks.append(Grid("paper-beside-ours", beside))
        if (gains := _gains_beside(table, placed, measured)).cells:
            blocks.append(Grid("paper-gains", gains))
        if "p" not in gains.titles:
            blocks.append(Prose(UNTESTED, note=True))
    others = [each for each in shown if places.of(each.names) is None]
    whole, caution = _whole(table, others, measured, metrics), Prose(_caution(table, shown), note=True)
    if beside.cells:
        blocks += [caution, whole]
    elif shown:
        blocks += [whole, caution]
    else:
        blocks.append(whole)
        blocks.append(
            Prose(
                f"None of these runs has a figure of this table, which measures {', '.join(metrics[:6])}; only the paper's numbers stand "
                "here.",
                note=True,
            )
        )
    if table.pairs and others:
        tested = any(p is not None for each in others for _, p in each.gains.values())
        caption = f"what the method of {table.source} changes: there, and here" + ", with p-values" * tested
        rows = _gains(table, others, measured)
        if rows:
            marked = [number for number, row in enumerate(rows) if row[0] == "ours"]
            titles = ["", "from", "to", "data", *measured]
            blocks.append(Grid("paper-other-gains", Table(caption, titles, rows), marked))
            if not tested and not beside.cells:
                blocks.append(Prose(UNTESTED, note=True))
    notes: dict[str, list[str]] = {}
    for number in table.numbers:
        if number.note:
            notes.setdefault(number.note, []).append(f"{number.row}, {number.column}")
    said = [f"{note} ({'; '.join(dict.fromkeys(where))})" for note, where in notes.items()]
    if said:
        blocks.append(Items("About the paper's numbers:", [f"{each[:1].upper()}{each[1:]}." for each in said]))
    return Section("paper", "The paper beside ours", blocks)


UNTESTED = "None of our differences is tested: that takes several seeds of each."

Placed = Mapping[tuple[str, str], Sequence[Ours]]
"""Our figures by the row and the column of the paper's table that they stand beside."""


def _beside(table: PaperTable, placed: Placed, measured: Mapping[str, str]) -> Table:
    """Each number of the paper that we have measured too, with ours beside it."""
    rows = []
    for number in table.numbers:
        for each in placed.get((number.row, number.column), ()):
            summary = each.figures.get(measured.get(number.metric, ""))
            if summary is not None and number.number is not None:
                own = _scaled(summary, _scale(number.metric, table)) or MISSING
                rows.append([number.row, number.column, number.metric, _printed(number), own, each.label, each.data])
    caption = f"{table.source}: {table.shows} ({_units(table)}), and ours in the same rows; ± standard deviation where there is one"
    return Table(caption, ["model or method", "data", "measure", "paper", "ours", "our runs", "our data"], rows)


def _gains_beside(table: PaperTable, placed: Placed, measured: Mapping[str, str]) -> Table:
    """What the method changes in the paper, and in our runs that stand beside both rows: those on the same data."""
    values = {(n.row, n.column, n.metric): n for n in table.numbers if n.number is not None}
    rows = []
    for one, other in table.pairs:
        for column in dict.fromkeys(number.column for number in table.numbers):
            for first in placed.get((one, column), ()):
                for second in placed.get((other, column), ()):
                    if first.data != second.data:
                        continue
                    for metric, name in measured.items():
                        before, after = (values.get((row, column, metric)) for row in (one, other))
                        change = values.get((other, column, f"change in {metric}"))
                        theirs = change.value if change else _minus(after, before)
                        summary, p = _change(first, second, name)
                        if theirs and summary.mean is not None:
                            scale = _scale(metric, table)
                            own = _scaled(summary, scale, "+")
                            digits = len(theirs.partition(".")[2])
                            apart = rounded(scale * summary.mean - float(theirs), f"+.{digits}f")
                            rows.append(
                                [one, other, column, metric, theirs, own, apart, "" if p is None else p_value(p)]
                            )
    titles = ["from", "to", "data", "measure", "paper", "ours", "ours − paper", "p"]
    if not any(row[-1] for row in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    tested = ", with the p-values of ours" if titles[-1] == "p" else ""
    return Table(f"what the method of {table.source} changes: there, and here{tested}", titles, rows)


def _change(first: Ours, second: Ours, name: str) -> tuple[Summary, float | None]:
    """The mean difference of a figure between two groups of runs, with its p-value where it was tested."""
    if second.baseline == first.label and name in second.gains:
        return second.gains[name]
    before, after = (each.figures.get(name, Summary(())).mean for each in (first, second))
    return Summary((), None if before is None or after is None else after - before), None


def _whole(table: PaperTable, others: Sequence[Ours], measured: Mapping[str, str], metrics: Sequence[str]) -> Grid:
    """All numbers of the paper, and below them our figures that stand beside none of them."""
    rows: list[list[str]] = []
    for row, column in dict.fromkeys((number.row, number.column) for number in table.numbers):
        cells = {n.metric: n for n in table.numbers if (n.row, n.column) == (row, column)}
        rows.append(["paper", row, column, *(_printed(cells[name]) if name in cells else "" for name in metrics)])
    for each in others:
        cells_of_ours = [
            _scaled(each.figures.get(measured.get(name, ""), Summary(())), _scale(name, table)) for name in metrics
        ]
        rows.append(["ours", each.label, _measured_on(each), *cells_of_ours])
    caption = f"{table.source}: {table.shows} ({_units(table)}), the whole table" + (
        ", and ours; ± standard deviation where there is one" if others else ""
    )
    marked = [number for number, row in enumerate(rows) if row[0] == "ours"]
    return Grid("paper-table", Table(caption, ["", "model or method", "data", *metrics], rows), marked)


def _units(table: PaperTable) -> str:
    return ", ".join(dict.fromkeys(n.unit for n in table.numbers if n.unit and n.unit not in ("label", "formula")))


def _measured_on(each: Ours) -> str:
    return ", ".join(filter(None, (each.data, each.size)))


def _caution(table: PaperTable, shown: Sequence[Ours]) -> str:
    theirs = ", ".join(dict.fromkeys(number.column for number in table.numbers))
    own = "; ".join(dict.fromkeys(map(_measured_on, shown)))
    return (
        f"The paper measured models of its own size on its own data ({theirs}). Ours were measured on: {own or 'data that are not named'}. "
        "Unless data, size and steps are the same, values of the two cannot be compared; look at the sign and the size of the differences."
    )


def _figure(metric: str, ours: Sequence[Ours]) -> str | None:
    return next((name for name in OURS.get(metric, ()) if any(name in each.figures for each in ours)), None)


def _scale(metric: str, table: PaperTable) -> float:
    """The factor that converts our figures to the unit of the paper."""
    unit = next((number.unit for number in table.numbers if number.metric == metric), "")
    return 100.0 if unit == "percent" or metric.endswith("x100") else 1.0


def _printed(number: Number) -> str:
    marks = [number.mark] if re.search("significant|quoted|not given", number.mark) else []
    spread = f" ± {number.deviation}" if number.deviation else ""
    return f"{number.value}{spread}" + "".join(f" ({mark})" for mark in marks)


def _scaled(summary: Summary, scale: float, sign: str = "") -> str:
    """A mean and its deviation in the unit of the paper; empty if there is none."""
    if summary.mean is None:
        return ""
    form = ".1f" if scale == 100 else ".3f"
    return rounded(scale * summary.mean, sign + form) + (
        "" if summary.sd is None else f" ± {scale * summary.sd:{form}}"
    )


def _gains(table: PaperTable, ours: Sequence[Ours], measured: Mapping[str, str]) -> list[list[str]]:
    """Differences of the rows of a paper that are one model without and with its method, and of ours from their baseline."""
    values = {(n.row, n.column, n.metric): n for n in table.numbers if n.number is not None}
    rows = []
    for one, other in table.pairs:
        for column in dict.fromkeys(column for row, column, _ in values if row == one):
            cells = [_minus(values.get((other, column, name)), values.get((one, column, name))) for name in measured]
            if any(cells):
                rows.append(["paper", one, other, column, *cells])
    for each in ours:
        if any(name in each.gains for name in measured.values()):
            cells = [_gain(each, name, _scale(metric, table)) for metric, name in measured.items()]
            rows.append(["ours", each.baseline, each.label, each.data, *cells])
    return rows


def _minus(second: Number | None, first: Number | None) -> str:
    if first is None or second is None:
        return ""
    places = max(len(number.value.partition(".")[2]) for number in (first, second))
    return rounded((second.number or 0) - (first.number or 0), f"+.{places}f")


def _gain(each: Ours, name: str, scale: float) -> str:
    summary, p = each.gains.get(name, (Summary(()), None))
    return _scaled(summary, scale, "+") + ("" if p is None else f" (p {p_value(p)})")
