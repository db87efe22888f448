"""``guide compare``: how much faster a guided run learns than its baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.options import Session, command
from cli.output import check_output_path, escape, say, say_json, speaks_unicode
from guidance.errors import InputError

PICTURES = (".png", ".svg")


@command(
    "compare",
    group="Train",
    examples=[
        "guide compare plain guided",
        "guide compare plain guided --plot curves.svg --csv runs.csv",
        "guide compare plain-0 plain-1 plain-2 guided-0 guided-1 guided-2 --group",
        "guide compare plain model/1f0c   # a run that has not finished",
        "guide compare plain guided --markdown > results.md",
    ],
)
def compare_runs(
    session: Session,
    baseline: Annotated[
        str,
        typer.Argument(metavar="BASELINE", help="A run: a name, name@n, an id, or a path.", show_default=False),
    ],
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Runs to compare with it.", show_default=False)
    ] = None,
    group: Annotated[bool, typer.Option("--group", help="Group runs that differ only in their seed.")] = False,
    loss: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare this loss instead of the first logged one.")
    ] = None,
    score: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also compare this score: eval/TASK/METRIC.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Steps to average training losses over, at most a quarter of the run; 50 by default."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw losses over steps and seconds as PNG or SVG.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write all figures as CSV, one row per run.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables in Markdown.")] = False,
) -> None:
    """Compare finished or running training runs: loss at equal steps, steps and seconds to equal loss, speed.

    Losses exclude those of guides.  With --group, seeds are summarised as mean and sample standard deviation, and
    tested against those of the baseline with a two-sided paired t-test.
    """
    from pipelines.storage.files import write_file
    from pipelines.views import comparison, comparison_tables

    if markdown and session.json:
        raise InputError("--markdown and --json exclude each other", hint="leave one of them out")
    for flag, path, endings in (("--plot", plot, PICTURES), ("--csv", csv_file, (".csv",))):
        if path is not None:
            check_output_path(path, flag, *endings)
    found = comparison.run([baseline, *(runs or [])], session.store, loss=loss, score=score, group=group, window=window)
    if plot is not None:
        from pipelines.views.drawing import run_curves

        write_file(plot, run_curves(found, form=plot.suffix.lower().removeprefix(".")))
    if csv_file is not None:
        write_file(csv_file, comparison_tables.as_csv(found).encode())
    if session.json:
        say_json(comparison_tables.as_json(found) | {"plot": plot, "csv": csv_file})
    else:
        lines = comparison_tables.as_markdown(found) if markdown else comparison_tables.as_text(found)
        for line in lines:
            say(escape(line if speaks_unicode() else line.replace("±", "+-").replace("–", "-").replace("…", "~")))
    for note in found.notes:
        session.tell(f"note: {escape(note)}")
    for path in (plot, csv_file):
        if path is not None:
            session.tell(f"written: {escape(path)}")
