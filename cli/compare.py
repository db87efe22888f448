"""``guide compare``: how much faster a guided run learns than its baseline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Annotated

import typer

from cli.options import Session, command
from cli.output import check_output_path, escape, say, say_json, speaks_unicode
from cli.tables import say_table
from guidance.errors import InputError

PICTURES = (".png", ".svg")


@command(
    "compare",
    group="Train",
    examples=[
        "guide compare plain guided",
        "guide compare plain guided --plot curves.svg --csv runs.csv",
        "guide compare plain guided --at 6.0,5.5 --timed",
        "guide compare plain-0 plain-1 plain-2 guided-0 guided-1 guided-2 --group --power 0.05",
        "guide compare plain model/1f0c   # a run that has not finished",
        "guide compare plain guided --markdown > results.md",
        "guide compare evaluation/58a1 evaluation/9c0e   # the predictions of two models for the same examples",
        "guide compare plain-folds guided-folds   # two searches over the same seeds or folds",
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
    at: Annotated[
        str | None,
        typer.Option(metavar="LOSSES", help="When has each run reached these losses?  In nats, such as 6.0,5.5."),
    ] = None,
    power: Annotated[
        float | None,
        typer.Option(metavar="NATS", help="How many seeds would find a difference of this size?", min=1e-9),
    ] = None,
    timed: Annotated[
        bool, typer.Option("--timed", help="Time steps of every run now, and compare losses at equal seconds.")
    ] = False,
    floors: Annotated[
        bool, typer.Option("--floors/--no-floors", help="Show what n-grams reach; counting them takes seconds, once.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw losses over steps and seconds as PNG or SVG.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write all figures as CSV, one row per run.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables in Markdown.")] = False,
) -> None:
    """Compare finished or running training runs: loss at equal steps, steps to given losses, n-gram floors, speed.

    Losses exclude those of guides.  A masked language model that is not below the floors has learned less than counts of
    neighbouring tokens tell.  With --group, seeds are summarised as mean and sample standard deviation, and
    tested against those of the baseline with a two-sided paired t-test.

    Evaluations of the same examples are compared example by example: accuracies by McNemar's test, BLEU and chrF by
    approximate randomisation, other metrics by a paired bootstrap with a 95 % interval.  Searches over the same seeds or
    folds are compared by a paired t-test, which is corrected for folds; those along pre-training also by when they have the
    last score of the baseline.  The last column has p-values corrected for the
    number of comparisons (Holm).
    """
    from pipelines.storage.files import write_file
    from pipelines.views import comparison, comparison_tables

    if markdown and session.json:
        raise InputError("--markdown and --json exclude each other", hint="leave one of them out")
    for flag, path, endings in (("--plot", plot, PICTURES), ("--csv", csv_file, (".csv",))):
        if path is not None:
            check_output_path(path, flag, *endings)
    kind = _kind(session, baseline)
    if kind in ("evaluation", "search"):
        return _compare_results(session, kind, [baseline, *(runs or [])])
    found = comparison.run(
        [baseline, *(runs or [])],
        session.store,
        loss=loss,
        score=score,
        group=group,
        window=window,
        at=_losses(at),
        power=power,
        timed=timed,
        with_floors=floors,
        progress=session.progress,
    )
    if plot is not None:
        from pipelines.views.learning_curves import run_curves

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


def _losses(text: str | None) -> list[float]:
    """The numbers of a list with commas."""
    try:
        found = [float(each) for each in text.split(",")] if text else []
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise InputError(f"--at {text}: not numbers with commas between them", hint="--at 6.0,5.5")
    return found


def _kind(session: Session, reference: str) -> str:
    """The kind of an artifact; "" of an unfinished run."""
    with contextlib.suppress(InputError):
        return session.store.find(reference).parent.name
    return ""


def _compare_results(session: Session, kind: str, references: list[str]) -> None:
    """Compare evaluations, or searches."""
    from pipelines.views.evaluations import compare_evaluations
    from pipelines.views.searches import compare_searches, equal_scores

    if len(references) < 2:
        raise InputError(f"one {kind} has nothing to be compared with", hint=f"guide compare {kind.upper()} OTHER")
    with contextlib.ExitStack() as opened:
        results = [opened.enter_context(session.store.load(each, kind=kind)) for each in references]
        found = (compare_searches if kind == "search" else compare_evaluations)(results, references)
        reached = equal_scores(results, references) if kind == "search" else []
    if session.json:
        along = {"equal_scores": [dataclasses.asdict(each) for each in reached]} if reached else {}
        return say_json({"comparisons": [dataclasses.asdict(tested) for tested in found], **along})
    titles = (
        "metric",
        "baseline",
        "other",
        "value",
        "value",
        "difference",
        "95 % interval",
        "p",
        "corrected p",
        "test",
    )
    rows = [
        (
            tested.metric,
            tested.baseline,
            tested.other,
            f"{tested.first:.4f}",
            f"{tested.second:.4f}",
            f"{tested.difference.effect:+.4f}",
            ""
            if math.isnan(tested.difference.low)
            else f"{tested.difference.low:+.4f} to {tested.difference.high:+.4f}",
            f"{tested.difference.p:.4f}",
            f"{tested.corrected:.4f}",
            f"{tested.difference.test}, {tested.difference.n:,} {tested.unit}",
        )
        for tested in found
    ]
    say_table(titles, rows, whole=("baseline", "other"))
    if reached:
        say()
        say_table(
            ("metric", "baseline", "other", "last score", "steps to it", "of", "seconds to it", "of"),
            [
                (
                    each.metric,
                    each.baseline,
                    each.other,
                    f"{each.score:.4f}",
                    "never" if each.steps is None else f"{each.steps:,.0f}",
                    f"{each.all_steps:,}",
                    "never" if each.seconds is None else f"{each.seconds:,.0f}",
                    f"{each.all_seconds:,.0f}",
                )
                for each in reached
            ],
            whole=("baseline", "other"),
        )
