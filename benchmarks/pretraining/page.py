"""The page of a table, and its picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
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
    names = ["run", "n", "loss", "average", "validation", *(["test NLL", "BLEU", "chrF"] if table.translates else [])]
    levels = passed_losses(by_label[label_of_base][0])
    names += ["p", *(f"steps to {level:.2f}" for level in levels)]
    lines = []
    for label, runs in by_label.items():
        if not runs:
            continue
        p = paired_t_test(Summary.of(row["loss"] - bases[row["seed"]]["loss"] for row in runs if row["seed"] in bases))
        cells = [cell([row[name] for row in runs]) for name in ("loss", "average", "valid")]
        if table.translates:
            cells += [cell([row["scores"]["metrics"][name] for row in runs], ".2f") for name in ("nll", "bleu", "chrf")]
        cells += [p_value(p), *(cell([steps_to(row, level) for row in runs], ".0f") for level in levels)]
        lines.append([f"**{label}** (baseline)" if label == label_of_base else label, str(len(runs)), *cells])
    return "\n\n".join([pages.table(names, lines), *_spread(table, by_label)])


def _spread(table: Table, by_label: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """A table of the spread of final losses within each group, for the first seed."""
    groups: dict[str, list[float]] = {}
    for setting in table.rows:
        if setting.group and by_label[setting.label]:
            groups.setdefault(setting.group, []).append(by_label[setting.label][0]["loss"])
    if any(len(losses) > 1 for losses in groups.values()):
        yield pages.table(
            ["settings", "n", "lowest loss", "highest", "mean ± deviation"],
            [
                [group, str(len(losses)), f"{min(losses):.3f}", f"{max(losses):.3f}", cell(losses)]
                for group, losses in groups.items()
            ],
        )


def said_of_floors(nats: Mapping[str, float]) -> str:
    """A sentence for people."""
    reached = "; ".join(f"{FLOORS[name]} {value:.2f}" for name, value in nats.items())
    return f"What counts of neighbouring tokens reach in validation, in nats: {reached}."


def draw(table: Table, rows: Sequence[Mapping[str, Any]], path: Path, nats: Mapping[str, float]) -> None:
    """Draw the curves of the first seed; if there are many, with one colour per group."""
    groups = {setting.label: setting.group for setting in table.rows}
    colours = {group: f"C{number}" for number, group in enumerate(dict.fromkeys(groups.values()))}
    is_full, named = len({row["label"] for row in rows}) > 8, set[str]()
    figure, ((axes,),) = figure_of(8, 4.5)
    plain = {setting.label for setting in table.rows if setting.plan is None}
    seed = min(row["seed"] for row in rows)
    for number, row in enumerate(row for row in rows if row["seed"] == seed):
        style = ("-", "--", ":", "-.")[number % 4]
        width = 1.3 if row["label"] in plain else 2.4
        points, group = tuple(zip(*row["curve"][1:], strict=True)), groups[row["label"]]
        if is_full and group:
            axes.plot(*points, color=colours[group], linewidth=width / 2, label=None if group in named else group)
            named.add(group)
        else:
            axes.plot(*points, style, linewidth=width, label=row["label"])
    pages.finish(axes, rows, nats, textwrap.fill(table.title, 80), WINDOW)
    path.write_bytes(png(figure))
