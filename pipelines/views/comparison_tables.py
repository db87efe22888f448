"""A comparison of runs as tables for people, and as JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.metrics import lower_is_better
from pipelines.training.tasks import TASKS
from pipelines.views.comparison import Comparison, Row
from pipelines.views.figures import MOST_PAIRS, Summary, seeds_needed, steps_to

WIDTH = 120
"""Maximum number of characters per line of text."""

MISSING = "–"
"""Shown for a figure that is not defined."""

_NO_FIGURE = ("", MISSING, "never", "nan")

FLOORS = {
    "unigram": "word frequencies",
    "previous": "the previous token",
    "neighbours": "both neighbours",
    "ngrams": "up to five tokens",
}
"""The n-gram floors, as tables and pictures call them."""

POWERED = {"average": "all steps", "final": "final", "valid": "validation"}
"""The figures whose differences are shown, and for which the number of seeds is worked out, with their titles."""

Cell = Callable[[Row], str]
Column = tuple[str, Cell]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All figures, for programs."""
    return {
        "schema": 2,
        "loss": comparison.loss,
        "steps": comparison.steps,
        "window": comparison.window,
        "score": comparison.score,
        "at": comparison.at,
        "floors": dict(comparison.floors),
        "definitions": comparison.figures,
        "groups": [_group(row, comparison.power) for row in comparison.rows],
        "notes": comparison.notes,
    }


def _group(row: Row, power: float | None) -> dict[str, Any]:
    runs = []
    for curve, figures in zip(row.group.curves, row.runs, strict=True):
        about = {"run": curve.label, "artifact": curve.origin.reference}
        runs.append({**about, "seed": curve.seed, "finished": curve.origin.finished, **figures})
    difference = {name: {"mean": s.mean, "sd": s.sd, "p": row.p[name]} for name, s in row.difference.items()}
    return {
        "run": row.group.label,
        "runs": runs,
        "n": len(runs),
        "pairs": row.num_pairs,
        "differs": row.differs,
        "figures": {name: {"mean": s.mean, "sd": s.sd} for name, s in row.summary.items()},
        "difference": difference,
        **({"seeds_needed": _seeds(row, power)} if power is not None else {}),
    }


def as_csv(comparison: Comparison) -> str:
    """One row per run: group, seed and every figure; a figure that is not defined is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["group", "run", "artifact", "seed", "loss_name", "score_name", "steps", "window", *comparison.figures]
    )
    for row in comparison.rows:
        for curve, figures in zip(row.group.curves, row.runs, strict=True):
            about = [row.group.label, curve.label, curve.origin.reference, curve.seed]
            settings = [comparison.loss, comparison.score, comparison.steps, comparison.window]
            writer.writerow([*about, *settings, *(figures[name] for name in comparison.figures)])
    return text.getvalue()


@dataclass(frozen=True)
class Table:
    """One table of a comparison; the first column names the runs.

    Attributes:
        name: a word for its subject, of which names of files are made.
    """

    caption: str
    titles: list[str]
    cells: list[list[str]]
    name: str = ""


def unit_of(loss: str) -> str:
    """The unit of a loss of training, by the name of its objective or task."""
    return TASKS[loss].unit if loss in TASKS else "nats"


def tables(comparison: Comparison) -> list[Table]:
    """The comparison as several tables, one per subject."""
    rows, steps, window = comparison.rows, comparison.steps, comparison.window
    base, others = rows[0].group.label, rows[1:]
    many = any(len(row.group.curves) > 1 for row in rows)
    count: list[Column] = [("n", lambda row: str(len(row.group.curves)))] if many else []
    quarters = f"; quarters and final are means of {window} steps" if window > 1 else ""
    spread = "; ± sample standard deviation over n seeds" if many else ""
    never = f">{steps:,}"
    losses = {"all steps": "average", "25 %": "loss_25", "50 %": "loss_50", "75 %": "loss_75", "final": "final"}
    loss = _table(
        "losses",
        f"training loss {comparison.loss} ({unit_of(comparison.loss)}, guides left out) of {steps:,} steps{quarters}{spread}",
        rows,
        *count,
        *((title, _mean(name, ".3f")) for title, name in {**losses, "validation": "valid"}.items()),
    )
    blank = [MISSING] * (len(loss.titles) - 2)
    loss.cells.extend([f"floor: {FLOORS[name]}", *blank, f"{nats:.3f}"] for name, nats in comparison.floors.items())
    reached = _table(
        "steps",
        f"first step at which the training loss{f' (mean of {window} steps)' if window > 1 else ''} is at or below these values",
        rows,
        *count,
        *((f"{loss:g}", _reached(steps_to(loss), never)) for loss in comparison.at),
    )
    speed = _table(
        "speed",
        "speed while training, whatever else the machine did",
        rows,
        *count,
        ("tokens/s", _mean("tokens_per_second", ",.0f")),
        ("seconds", _mean("seconds", ",.1f")),
    )
    shown = [loss, reached, speed]
    if any(row.summary["step_seconds"].known for row in rows):
        timed = _table(
            "equal-seconds",
            f"loss at equal seconds, with steps that were timed in turn: when the first of the run and {base} ends",
            rows,
            *count,
            ("seconds a step", _mean("step_seconds", ".4f")),
            ("seconds", _mean("equal_seconds", ",.1f")),
            ("loss", _mean("loss_at_equal_seconds", ".3f")),
            ("the baseline's", _mean("baseline_at_equal_seconds", ".3f")),
        )
        shown.append(timed)
    if comparison.score:
        better = "lower" if lower_is_better(comparison.score) else "higher"
        score = _table(
            "score",
            f"{comparison.score} ({better} is better)",
            rows,
            *count,
            ("last", _mean("score", ".4g")),
            ("best", _mean("best_score", ".4g")),
            (
                "steps to equal score",
                _reached("steps_to_equal_score", never if rows[0].summary["score"].known else MISSING),
            ),
        )
        shown.append(score)
    if others:
        pairs: list[Column] = [("pairs", lambda row: str(row.num_pairs))] if many else []
        tested = POWERED | ({"score": "score"} if comparison.score else {})
        columns = [column for name, title in tested.items() for column in _difference(name, title)]
        test = " (p: two-sided t-test of pairs, which have the same seed)" if many else ""
        shown.append(_table("differences", f"difference from {base}{test}", others, *pairs, *columns))
    if others and comparison.power is not None:
        effect = f"a difference of {comparison.power:g} nats with 80 % probability (p < 0.05)"
        caption = f"pairs of seeds that find {effect}, by the spread of the pairs that there are"
        seeds = [(title, _needed(name, comparison.power)) for name, title in POWERED.items()]
        shown.append(_table("power", caption, others, *seeds))
    return shown


def _needed(name: str, effect: float) -> Cell:
    def cell(row: Row) -> str:
        seeds, few = _seeds(row, effect)[name], row.difference[name].sd is None
        return str(seeds) if seeds is not None else MISSING if few else f">{MOST_PAIRS:,}"

    return cell


def _seeds(row: Row, effect: float) -> dict[str, int | None]:
    return {name: seeds_needed(row.difference[name], effect) for name in POWERED}


def _table(name: str, caption: str, rows: Sequence[Row], *columns: Column) -> Table:
    cells = [[row.group.label, *(cell(row) for _, cell in columns)] for row in rows]
    return Table(caption, ["run", *(title for title, _ in columns)], cells, name)


def _mean(name: str, form: str) -> Cell:
    return lambda row: with_spread(row.summary[name], form)


def _difference(name: str, title: str) -> list[Column]:
    return [(title, lambda row: with_spread(row.difference[name], "+.3f")), ("p", lambda row: p_value(row.p[name]))]


def rounded(value: float, form: str) -> str:
    """A number as tables show it: without a sign if it rounds to zero."""
    text = f"{value:{form}}"
    return text if re.search("[1-9a-z]", text) else text.lstrip("+-")


def p_value(p: float | None) -> str:
    """A p-value as tables show it."""
    return MISSING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _reached(name: str, never: str) -> Cell:
    """The mean step, or how many of the runs reached the goal."""
    return lambda row: reached(row.summary[name], ",.0f", never)


def reached(summary: Summary, form: str, never: str) -> str:
    """A mean with its deviation; if not all runs have a value, how many do, or ``never`` if none has."""
    if summary.mean is not None:
        return with_spread(summary, form)
    if summary.known:
        return f"{summary.known} of {len(summary.values)}"
    return never if summary.values else MISSING


def with_spread(summary: Summary, form: str) -> str:
    """A mean and, after ±, its standard deviation, as tables show them."""
    if summary.mean is None:
        return MISSING
    return rounded(summary.mean, form) + ("" if summary.sd is None else f" ± {summary.sd:{form.removeprefix('+')}}")


def as_text(comparison: Comparison) -> list[str]:
    """Lines of plain text, at most `WIDTH` characters wide; long labels are shortened in the middle."""
    lines: list[str] = []
    for table in tables(comparison):
        grid = [table.titles, *table.cells]
        widths = [max(len(line[i]) for line in grid) for i in range(len(table.titles))]
        widths[0] = min(widths[0], max(12, WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
        lines += [""] * bool(lines) + textwrap.wrap(table.caption, WIDTH)
        for label, *numbers in grid:
            right = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join((_cut(label, widths[0]).ljust(widths[0]), *right)))
    return lines


def _cut(text: str, width: int) -> str:
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - half]}…{text[-half:]}"


def as_markdown(comparison: Comparison) -> list[str]:
    """The same tables for a document."""
    lines: list[str] = []
    for table in tables(comparison):
        lines += [""] * bool(lines) + [table.caption, "", *markdown_table(table)]
    return lines


def markdown_table(table: Table) -> list[str]:
    """The lines of a table in Markdown, without its caption."""
    marks = ["---:" if numeric else "---" for numeric in numeric_columns(table)]
    rows = [table.titles, marks, *table.cells]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


_NUMBER = re.compile(r"[-+<>]?\d[\d.,]*(e[-+]?\d+)?(\s(?![A-Z][a-z])|$)")


def numeric_columns(table: Table) -> list[bool]:
    """Whether each column holds numbers, which are aligned right; the first one names the rows.

    A column is numeric if at least half of its cells begin with a number; cells without a figure do not count.
    """

    def is_numeric(cells: Sequence[str]) -> bool:
        known = [bool(_NUMBER.match(cell)) for cell in cells if cell not in _NO_FIGURE]
        return 2 * sum(known) >= len(known)

    columns = [is_numeric([row[number] for row in table.cells]) for number in range(1, len(table.titles))]
    return [False, *columns]
