"""The command, and the page of a table."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

import torch

import benchmarks.finetuning
from benchmarks.finetuning.runs import Row, Table, evidence, figures_of, settings_digest
from benchmarks.finetuning.tables import TABLES
from pipelines.metrics.significance import detectable, holm, paired_t
from pipelines.storage.store import Store
from pipelines.views.figures import Summary


def as_markdown(table: Table, rows: Sequence[Row]) -> str:
    """One line for each row and data set: mean and deviation, and a paired test against the first row of the table."""
    lines = [
        "| data | row | metric | runs | mean | difference | 95 % interval | p | corrected p | could have been found | rates |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, data in table.data.items():
        own = {row["label"]: row for row in rows if row["data"] == name}
        base = own.get(next(iter(table.rows)))
        gains = {
            label: [b - a for a, b in zip(base["runs"], row["runs"], strict=True)]
            for label, row in own.items()
            if base is not None and row is not base
        }
        tests = {label: paired_t(values, shared_folds=data.folds) for label, values in gains.items()}
        corrected = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
        for label, row in own.items():
            cells = [name, label, row["metric"], f"{len(row['runs'])} {'folds' if data.folds else 'seeds'}"]
            cells.append(_mean(row["runs"], "{:.3f}"))
            if test := tests.get(label):
                cells += [
                    f"{test.effect:+.3f}",
                    f"{test.low:+.3f} to {test.high:+.3f}",
                    f"{test.p:.3f}",
                    f"{corrected[label]:.3f}",
                    "–" if data.folds else f"{detectable(stdev(gains[label]), test.n, level=0.05 / len(tests)):.3f}",
                ]
            else:
                cells += ["–"] * 5
            rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(row["rates"]))
            lines.append(f"| {' | '.join([*cells, rates])} |")
    note = (
        "Corrected: by Holm's method over the rows of a data set.  *Could have been found*: the true gain that so many seeds show "
        "with a probability of 0.8 at a level of 0.05 divided by the number of rows, if gains vary over seeds as they did here."
    )
    return "\n".join([*lines, "", note])


def _mean(values: Sequence[float], form: str) -> str:
    found = Summary.of(values)
    if found.mean is None:
        return "–"
    return form.format(found.mean) + (f" ± {form.format(found.sd)}" if found.sd is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=benchmarks.finetuning.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose label contains TEXT")
    parser.add_argument("--data", default="", metavar="TEXT", help="only data sets whose name contains TEXT")
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    table, path = TABLES[arguments.table], arguments.out / f"finetuning-{arguments.table}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = known.get("rows", [])
    for name in table.data:
        for label in table.rows:
            if arguments.only not in label or arguments.data not in name:
                continue
            old = next((row for row in rows if (row["label"], row["data"]) == (label, name)), None)
            if old is not None:
                if old["settings"] != settings_digest(table, label, name):
                    raise SystemExit(f"{path}: {label} on {name} was trained with other settings; remove its entry")
                continue
            row = figures_of(table, label, name, Store(arguments.store))
            rows.append(row)
            print(f"{name}, {label}: {_mean(row['runs'], '{:.3f}')} {row['metric']}", flush=True)
            about = {"title": table.title, "torch": torch.__version__, "threads": torch.get_num_threads()}
            about |= {"machine": platform.machine(), "rates": list(table.rates), "common": dict(table.settings)}
            known = {**known, **about, "rows": rows}
            path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if "evidence" not in known:
        known = {**known, "evidence": evidence(table, Store(arguments.store))}
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    text = as_markdown(table, rows)
    path.with_suffix(".md").write_text(
        f"# {table.title}\n\n`python -m benchmarks.finetuning {arguments.table}`\n\n{text}\n", encoding="utf-8"
    )
    print(text)


if __name__ == "__main__":
    main()
