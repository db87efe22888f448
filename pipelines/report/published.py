"""The numbers of a paper beside ours."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.papers import Number, PaperTable
from pipelines.report.blocks import Block, Grid, Items, Prose, Section
from pipelines.report.results import Scored
from pipelines.views.comparison import Comparison
from pipelines.views.comparison_tables import Table, p_value, rounded
from pipelines.views.evaluations import Tested
from pipelines.views.figures import Summary

OURS: Mapping[str, tuple[str, ...]] = {
    "train loss, final": ("final",),
    "train NLL": ("final",),
    "validation loss, final": ("valid", "validation loss"),
    "validation NLL": ("valid",),
    "MLM loss (valid)": ("valid",),
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
    """

    label: str
    data: str
    size: str
    figures: Mapping[str, Summary]
    gains: Mapping[str, tuple[Summary, float | None]]
    baseline: str = ""


def of_training(compared: Comparison, data: str, sizes: Mapping[str, str]) -> list[Ours]:
    """Our losses; ``sizes``: of the models, by the label of a run."""
    base = compared.rows[0].group.label
    return [
        Ours(
            row.group.label,
            data,
            sizes.get(row.group.curves[0].label, ""),
            {name: row.summary[name] for name in LOSSES},
            {name: (row.difference[name], row.p[name]) for name in LOSSES} if row.group.label != base else {},
            base,
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
        found.append(Ours(each.label, data, "", figures, gains, scored[0].label))
    return found


def section(table: PaperTable, ours: Sequence[Ours]) -> Section:
    """The whole table of a paper with our figures below it, and what the method gains there and here."""
    metrics = list(dict.fromkeys(number.metric for number in table.numbers))
    numeric = [name for name in metrics if any(n.number is not None for n in table.numbers if n.metric == name)]
    measured = {name: _figure(name, ours) for name in numeric}
    rows: list[list[str]] = []
    for row, column in dict.fromkeys((number.row, number.column) for number in table.numbers):
        cells = {n.metric: n for n in table.numbers if (n.row, n.column) == (row, column)}
        rows.append(["paper", row, column, *(_printed(cells[name]) if name in cells else "" for name in metrics)])
    blocks: list[Block] = []
    shown = [each for each in ours if any(name in each.figures for name in measured.values() if name)]
    for each in shown:
        cells_of_ours = [
            _scaled(each.figures.get(measured.get(name) or "", Summary(())), _scale(name, table)) for name in metrics
        ]
        rows.append(["ours", each.label, ", ".join(filter(None, (each.data, each.size))), *cells_of_ours])
    units = ", ".join(dict.fromkeys(n.unit for n in table.numbers if n.unit and n.unit not in ("label", "formula")))
    caption = f"{table.source}: {table.shows} ({units}), and ours; ± standard deviation where there is one"
    marked = [number for number, row in enumerate(rows) if row[0] == "ours"]
    blocks.append(Grid("paper-beside-ours", Table(caption, ["", "model or method", "data", *metrics], rows), marked))
    if shown:
        blocks.append(Prose(_caution(table, shown), note=True))
    else:
        blocks.append(
            Prose(
                f"None of these runs has a figure of this table, which measures {', '.join(metrics[:6])}; only the paper's numbers stand "
                "here.",
                note=True,
            )
        )
    if table.pairs and shown:
        tested = any(p is not None for each in shown for _, p in each.gains.values())
        caption = f"what the method of {table.source} changes: there, and here" + ", with p-values" * tested
        titles = ["", "from", "to", "data", *(name for name, ours_too in measured.items() if ours_too)]
        rows = _gains(table, shown, {name: each for name, each in measured.items() if each})
        if rows:
            marked = [number for number, row in enumerate(rows) if row[0] == "ours"]
            blocks.append(Grid("paper-gains", Table(caption, titles, rows), marked))
            if not tested:
                blocks.append(Prose("None of our differences is tested: that takes several seeds of each.", note=True))
    notes: dict[str, list[str]] = {}
    for number in table.numbers:
        if number.note:
            notes.setdefault(number.note, []).append(f"{number.row}, {number.column}")
    said = [f"{note} ({'; '.join(dict.fromkeys(where))})" for note, where in notes.items()]
    if said:
        blocks.append(Items("About the paper's numbers:", [f"{each[:1].upper()}{each[1:]}." for each in said]))
    return Section("paper", "The paper beside ours", blocks)


def _caution(table: PaperTable, shown: Sequence[Ours]) -> str:
    theirs = ", ".join(dict.fromkeys(number.column for number in table.numbers))
    own = "; ".join(dict.fromkeys(", ".join(filter(None, (each.data, each.size))) for each in shown))
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
