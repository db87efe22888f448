"""The page of a table, and its picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.pages import Row, cell
from benchmarks.pretraining.runs import WINDOW
from benchmarks.pretraining.tables import Table
from pipelines.drawing import figure_of, png
from pipelines.views.comparison_tables import FLOORS, p_value
from pipelines.views.figures import Summary, paired_t_test


def baseline(table: Table, by_label: Mapping[str, Sequence[Row]]) -> str:
    """The label of the setting without a plan that has the lowest final loss for the first seed."""
    plain = [setting.label for setting in table.rows if setting.plan is None and by_label[setting.label]]
    return min(plain, key=lambda label: by_label[label][0]["loss"])


def steps_to(row: Row, loss: float) -> float | None:
    """The step at which a run first has this loss, interpolated between the kept points of its curve; None if never."""
    steps, losses = np.array(row["curve"]).T
    reached_at = np.flatnonzero((steps >= WINDOW) & (losses <= loss))
    if not len(reached_at):
        return None
    last = reached_at[0]
    return float(np.interp(loss, losses[[last, last - 1]], steps[[last, last - 1]])) if last else float(steps[0])


def passed_losses(row: Row) -> list[float]:
    """The losses that a run has after a half and all of its steps, rounded up to hundredths."""
    steps, losses = np.array(row["curve"]).T
    half = float(np.interp(row["steps"] / 2, steps, losses))
    return sorted({math.ceil(100 * loss) / 100 for loss in (half, losses[-1])}, reverse=True)


def as_markdown(table: Table, rows: Sequence[Row]) -> str:
    """The table with one line per setting: mean, standard deviation, and a paired test against the baseline."""
    by_label = {setting.label: [row for row in rows if row["label"] == setting.label] for setting in table.rows}
    label_of_base = baseline(table, by_label)
    bases = {row["seed"]: row for row in by_label[label_of_base]}
    levels = passed_losses(by_label[label_of_base][0])
    names = ["run", "n", "loss", "average", "validation", "p", *(f"steps to {level:.2f}" for level in levels)]
    lines = []
    for label, runs in by_label.items():
        if not runs:
            continue
        p = paired_t_test(Summary.of(row["loss"] - bases[row["seed"]]["loss"] for row in runs if row["seed"] in bases))
        cells = [cell([row[name] for row in runs]) for name in ("loss", "average", "valid")]
        cells += [p_value(p), *(cell([steps_to(row, level) for row in runs], ".0f") for level in levels)]
        lines.append([f"**{label}** (baseline)" if label == label_of_base else label, str(len(runs)), *cells])
    return pages.table(names, lines)


def said_of_floors(nats: Mapping[str, float]) -> str:
    """A sentence for people."""
    reached = "; ".join(f"{FLOORS[name]} {value:.2f}" for name, value in nats.items())
    return f"What counts of neighbouring tokens reach in validation, in nats: {reached}."


def draw(table: Table, rows: Sequence[Mapping[str, Any]], path: Path, nats: Mapping[str, float]) -> None:
    """Draw the curves of the first seed."""
    figure, ((axes,),) = figure_of(8, 4.5)
    plain = {setting.label for setting in table.rows if setting.plan is None}
    seed = min(row["seed"] for row in rows)
    for number, row in enumerate(row for row in rows if row["seed"] == seed):
        style, width = ("-", "--", ":", "-.")[number % 4], 1.3 if row["label"] in plain else 2.4
        axes.plot(*zip(*row["curve"][1:], strict=True), style, linewidth=width, label=row["label"])
    pages.finish(axes, rows, nats, textwrap.fill(table.title, 80), WINDOW)
    path.write_bytes(png(figure))
