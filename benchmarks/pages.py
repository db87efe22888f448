"""What benchmarks share that keep their figures in JSON and make a page of them."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

import torch

from pipelines.metrics.significance import Difference, detectable, holm, paired_t
from pipelines.views.comparison_tables import Table, markdown_table, p_value, reached
from pipelines.views.figures import Summary
from pipelines.views.learning_curves import draw_floors

Row = Mapping[str, Any]
TESTED = ("difference", "95 % interval", "p", "corrected p", "could have been found")


def known(path: Path) -> dict[str, Any]:
    """The figures of a file; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def command(doc: str | None) -> argparse.ArgumentParser:
    """The flags of a benchmark that has runs in a store, and a page."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    return parser


def save(path: Path, found: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What figures were measured with."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}


def add_row(path: Path, found: dict[str, Any], names: Row, settings: str, measure: Callable[[], Row]) -> None:
    """Measure the row that has these names, and save it, unless the figures have it.

    Raises:
        SystemExit: they have it, but it was made with other settings.
    """
    rows, named = found.setdefault("rows", []), ", ".join(map(str, names.values()))
    old = next((row for row in rows if names.items() <= row.items()), None)
    if old is None:
        rows.append(measure())
        found |= machine()
        save(path, found)
        print(f"{named}: {rows[-1].get('loss') or rows[-1]['runs']}", flush=True)
    elif old["settings"] != settings:
        raise SystemExit(f"{path}: {named} was trained with other settings; remove its entry")


def by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows in groups, in the order of their first ones."""
    labels = dict.fromkeys(row["label"] for row in rows)
    return {label: [row for row in rows if row["label"] == label] for label in labels}


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(markdown_table(Table("", list(titles), [list(row) for row in rows])))


def cell(values: Sequence[float | None], form: str = ".3f") -> str:
    """Mean and deviation, or how many of the values are known."""
    return reached(Summary.of(values), form, "never")


def effect(difference: Difference) -> list[str]:
    """A difference and its interval."""
    return [f"{difference.effect:+.3f}", f"{difference.low:+.3f} to {difference.high:+.3f}"]


def cells_of_tests(gains: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
    """The cells of `TESTED`, by label, of the differences of pairs; p-values are corrected by Holm's method.

    The last one is the true difference that so many pairs show with a probability of 0.8 at a level of 0.05 divided by the number of
    labels, if differences vary as they did.
    """
    tests = {label: paired_t(values) for label, values in gains.items()}
    corrected, level = holm([test.p for test in tests.values()]), 0.05 / max(len(tests), 1)
    return {
        label: [
            *(*effect(test), p_value(test.p), p_value(p)),
            f"{detectable(stdev(gains[label]), test.n, level=level):.3f}",
        ]
        for (label, test), p in zip(tests.items(), corrected, strict=True)
    }


def finish(axes: Any, rows: Sequence[Row], floors: Mapping[str, float], title: str, window: int) -> None:
    """Add what all pictures of training losses have: floors, names of the axes, a legend."""
    draw_floors(axes, floors, min(loss for row in rows for _, loss in row["curve"]))
    axes.set(xlabel="optimizer steps", ylabel=f"training loss, mean of {window} steps (nats)", title=title)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
