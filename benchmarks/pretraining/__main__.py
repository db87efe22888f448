"""The command."""

from __future__ import annotations

import functools

import benchmarks.pretraining
from benchmarks import pages
from benchmarks.pretraining.page import as_markdown, draw, said_of_floors
from benchmarks.pretraining.runs import figures_of, floors_of, settings_of
from benchmarks.pretraining.tables import TABLES
from pipelines.storage.store import Store


def main() -> None:
    parser = pages.command(benchmarks.pretraining.__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="only settings whose label contains TEXT")
    parser.add_argument("--steps", type=int, help="steps of each run, instead of those of the table")
    arguments = parser.parse_args()
    table, path, store = TABLES[arguments.table], arguments.out / f"{arguments.table}.json", Store(arguments.store)
    known = {**pages.known(path), "title": table.title, "common": dict(table.common)}
    for seed in range(arguments.seeds):
        for setting in table.rows:
            if arguments.only in setting.label:
                run = (table, setting, seed, arguments.steps)
                names = {"label": setting.label, "seed": seed}
                pages.add_row(path, known, names, settings_of(*run), functools.partial(figures_of, *run, store))
    rows = known.get("rows", [])
    if "floors" not in known:
        known["floors"] = floors_of(table, store)
        pages.save(path, known)
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
