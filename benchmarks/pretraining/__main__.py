"""The command."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

import benchmarks.pretraining
from benchmarks.pretraining.page import as_markdown, draw, said_of_floors
from benchmarks.pretraining.runs import figures_of, floors_of, settings_of
from benchmarks.pretraining.tables import TABLES
from pipelines.storage.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(
        description=benchmarks.pretraining.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="only settings whose label contains TEXT")
    parser.add_argument("--steps", type=int, help="steps of each run, instead of those of the table")
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    table, path = TABLES[arguments.table], arguments.out / f"{arguments.table}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = known.get("rows", [])
    for seed in range(arguments.seeds):
        for setting in table.rows:
            if arguments.only not in setting.label:
                continue
            old = next((row for row in rows if (row["label"], row["seed"]) == (setting.label, seed)), None)
            if old is not None:
                if old["settings"] != settings_of(table, setting, seed, arguments.steps):
                    raise SystemExit(
                        f"{path}: {setting.label}, seed {seed}, was trained with other settings; remove its entry"
                    )
                continue
            row = figures_of(table, setting, seed, arguments.steps, Store(arguments.store))
            rows.append(row)
            print(f"{row['label']:45s} seed {seed}: loss {row['loss']:.3f}, {row['seconds']:.0f} s", flush=True)
            about = {"title": table.title, "torch": torch.__version__, "threads": torch.get_num_threads()}
            known = about | {"machine": platform.machine(), "common": dict(table.common), "rows": rows}
            path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if "floors" not in known:
        known = {**known, "floors": floors_of(table, Store(arguments.store))}
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    draw(table, rows, path.with_suffix(".png"), known["floors"])
    if not any(row["label"] == setting.label for row in rows for setting in table.rows if setting.plan is None):
        raise SystemExit("no run without a plan exists yet, so there is no baseline")
    text = as_markdown(table, rows)
    if known["floors"]:
        text += "\n\n" + said_of_floors(known["floors"])
    path.with_suffix(".md").write_text(
        f"# {table.title}\n\n`python -m benchmarks.pretraining {arguments.table}`\n\n{text}\n\n"
        f"![Training loss over steps]({arguments.table}.png)\n",
        encoding="utf-8",
    )
    print(text)


if __name__ == "__main__":
    main()
