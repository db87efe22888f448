"""``guide compare``: how much faster a guided run learns than its baseline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from cli.completion import artifacts
from cli.options import DRY_RUN, Session, command, dry_report
from cli.output import check_output_path, say_json, speaks_unicode
from cli.tables import table
from guidance.errors import InputError

PICTURES = (".png", ".svg")
COMPARED = artifacts("model", "evaluation", "search", unfinished=True)


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
        "guide compare without-rows   # one search: its settings, and how they differ from the first",
    ],
    shared=DRY_RUN,
)
def compare_runs(
    session: Session,
    baseline: Annotated[
        str, Argument(metavar="BASELINE", help="A run: a name, name@n, an id, or a path.", autocompletion=COMPARED)
    ],
    runs: Annotated[
        list[str] | None, Argument(metavar="RUN", help="Runs to compare with it.", autocompletion=COMPARED)
    ] = None,
    group: Annotated[bool, Option("--group", help="Group runs that differ only in their seed.")] = False,
    loss: Annotated[str | None, Option(metavar="NAME", help="Loss to compare; by default the first logged.")] = None,
    score: Annotated[str | None, Option(metavar="NAME", help="Score to compare, too: eval/TASK/METRIC.")] = None,
    window: Annotated[
        int | None,
        Option(min=1, help="Steps to average training losses over, at most a quarter of the run; 50 by default."),
    ] = None,
    at: Annotated[
        str | None, Option(metavar="LOSSES", help="Losses in nats, such as 6.0,5.5: when has each run reached them?")
    ] = None,
    power: Annotated[
        float | None, Option(metavar="NATS", help="Size of a difference: how many seeds would find it?", min=1e-9)
    ] = None,
    timed: Annotated[
        bool, Option("--timed", help="Time steps of every run now, and compare losses at equal seconds.")
    ] = False,
    floors: Annotated[
        bool, Option("--floors/--no-floors", help="Show what n-grams reach; counting them takes seconds, once.")
    ] = True,
    plot: Annotated[
        Path | None, Option(metavar="FILE", help="PNG or SVG file for a picture of losses over steps and seconds.")
    ] = None,
    csv_file: Annotated[
        Path | None, Option("--csv", metavar="FILE", help="CSV file for all figures, one row per run.")
    ] = None,
    markdown: Annotated[bool, Option("--markdown", help="Print tables in Markdown.")] = False,
) -> None:
    """Compare finished or running training runs: loss at equal steps, steps to given losses, n-gram floors, speed.

    Losses exclude those of guides.  A masked language model that is not below the floors has learned less than counts of
    neighbouring tokens tell.  With --group, seeds are summarised as mean and sample standard deviation, and
    tested against those of the baseline with a two-sided paired t-test.

    Evaluations of the same examples are compared example by example: accuracies by McNemar's test, BLEU and chrF by
    approximate randomisation, other metrics by a paired bootstrap.  Searches over the same seeds or folds are compared by a
    paired t-test, which is corrected for folds; those along pre-training also by when they reach the last score of the
    baseline.  With one search alone, the settings that it tested are compared with the first of them.
    The last column has p-values corrected for the number of comparisons (Holm).
    """
    from pipelines.storage.files import write_file
    from pipelines.views import comparison, comparison_tables

    if markdown and session.json:
        raise InputError("--markdown and --json exclude each other", hint="leave one of them out")
    check_output_path(plot, "--plot", *PICTURES)
    check_output_path(csv_file, "--csv", ".csv")
    references = [baseline, *(runs or [])]
    if session.dry_run:
        return dry_report(session, references, "model", "evaluation", "search", is_of_one_kind=True)
    kind = ""  # that of an unfinished run
    with contextlib.suppress(InputError):
        kind = session.store.find(baseline).parent.name
    if kind in ("evaluation", "search"):
        if group:
            raise InputError(
                f"--group is for training runs, not for a {kind}",
                hint="guide report groups what differs in its seed alone",
            )
        return _compare_results(session, kind, references)
    compared = comparison.run(
        references,
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

        write_file(plot, run_curves(compared, form=plot.suffix.lower().removeprefix(".")))
    if csv_file is not None:
        write_file(csv_file, comparison_tables.as_csv(compared).encode())
    lines = comparison_tables.as_markdown(compared) if markdown else comparison_tables.as_text(compared)
    if not speaks_unicode():
        lines = [line.replace("±", "+-").replace("–", "-").replace("…", "~") for line in lines]
    session.answer({**comparison_tables.as_json(compared), "plot": plot, "csv": csv_file}, lines)
    for note in compared.notes:
        session.tell(f"note: {note}")
    for path in filter(None, (plot, csv_file)):
        session.tell(f"written: {path}")


def _losses(text: str | None) -> list[float]:
    """The numbers of a list with commas."""
    try:
        losses = [float(each) for each in text.split(",")] if text else []
    except ValueError:
        losses = [math.nan]
    if not all(map(math.isfinite, losses)):
        raise InputError(f"--at {text}: not numbers with commas between them", hint="--at 6.0,5.5")
    return losses


def _compare_settings(session: Session, reference: str) -> None:
    """What one search has found, and how the settings that it tested differ from the first."""
    from pipelines.views.search_tables import search_tables
    from pipelines.views.searches import compare_settings
    from pipelines.views.tested_tables import as_json, tables_of_tests

    with session.store.load(reference, kind="search") as search:
        found, tests = search_tables(search), compare_settings(search)
        facts = {"settings": search.counts["settings"], "comparisons": [as_json(tested) for tested in tests]}
    lines: list[str] = []
    for each in found:
        lines += [""] * bool(lines) + table(each.titles, each.rows)
    for pair in tables_of_tests(tests):
        lines += ["", *table(pair.titles, pair.cells)]
    session.answer(facts, lines)
    if not tests:
        session.tell(
            "differences are tested where several settings have several seeds and were measured on the test split:"
            " guide search --seeds 3 --test-every"
        )


def _compare_results(session: Session, kind: str, references: list[str]) -> None:
    """Compare evaluations, or searches."""
    from pipelines.views.evaluations import compare_evaluations, labels_of
    from pipelines.views.searches import compare_searches, equal_scores
    from pipelines.views.tested_tables import as_json, reached_tables, tables_of_tests

    if len(references) < 2 and kind == "search":
        return _compare_settings(session, references[0])
    if len(references) < 2:
        raise InputError(f"one {kind} has nothing to be compared with", hint=f"guide compare {kind.upper()} OTHER")
    with contextlib.ExitStack() as opened:
        results = [opened.enter_context(session.store.load(each, kind=kind)) for each in references]
        label = dict(zip(references, labels_of(results, references, session.store), strict=True))
        tests = (compare_searches if kind == "search" else compare_evaluations)(results, references)
        reached = equal_scores(results, references) if kind == "search" else []
    if session.json:
        along = {"equal_scores": [dataclasses.asdict(each) for each in reached]} if reached else {}
        return say_json({"comparisons": [as_json(tested) for tested in tests], **along})
    lines: list[str] = []
    for each in (*tables_of_tests(tests, label), *reached_tables(reached, label)):
        lines += [""] * bool(lines) + table(each.titles, each.cells, whole=("baseline", "other"))
    session.answer({}, lines)
