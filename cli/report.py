"""``guide report``: runs as one page that can be read, printed and cited."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from cli.completion import artifacts
from cli.options import DRY_RUN, Session, command, dry_report
from pipelines.storage.names import check_name


@command(
    "report",
    group="Train",
    shared=DRY_RUN,
    examples=[
        "guide report plain-0 plain-1 plain-2 guided-0 guided-1 guided-2",
        "guide report plain-0 guided-0 --paper a-table3 --name ag   # the paper's numbers beside ours",
        "guide report plain-0 guided-0 --paper a-table6 --row 'plain-*=ELECTRA' --row 'guided-*=ELECTRA-AG'",
        "guide report evaluation/58a1 evaluation/9c0e probe/71f0 --out results",
        "guide report plain guided --json | jq .training",
    ],
)
def report_command(
    session: Session,
    runs: Annotated[
        list[str],
        Argument(
            metavar="RUN...",
            help="Models, searches, evaluations and probes: names, ids or paths.  Of several that are compared the first is the "
            "baseline.",
            autocompletion=artifacts("model", "search", "evaluation", "probe"),
        ),
    ],
    paper: Annotated[
        str | None, Option(metavar="TABLE", help="Table of a paper to put beside ours, such as a-table3 or e-table1.")
    ] = None,
    row: Annotated[
        list[str] | None,
        Option(
            metavar="PATTERN=ROW",
            help="Row of that table beside which the runs stand whose names the pattern fits, such as '*-plain-*=RoBERTa-8-MLM' "
            "(repeatable; the first that fits counts).",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        Option(
            metavar="PATTERN=COLUMN", help="Column of that table, likewise; not needed if it has only one (repeatable)."
        ),
    ] = None,
    name: Annotated[
        str | None, Option(metavar="NAME", help="Name of the page; by default that of the table, or report.")
    ] = None,
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder of the page.")] = Path("reports"),
    title: Annotated[str, Option(metavar="TEXT", help="Title of the page.")] = "",
    text: Annotated[
        str | None,
        Option(metavar="TEXT", help="Text whose attention is drawn; by default the beginning of the validation text."),
    ] = None,
) -> None:
    """Write a page about runs: what was run on what, results with tests, figures, cost, commands, methods and references.

    The page, NAME.html, loads nothing and prints on A4.  Beside it are NAME.md, the same as Markdown, and a folder NAME: tables as CSV
    and LaTeX, figures as SVG and PDF, the commands and their plans, the BibTeX of what was used.

    Models that differ only in their seed are summarised as mean and sample standard deviation, and compared with the first ones by a
    paired t-test, as in guide compare --group; p-values are also corrected for the number of comparisons (Holm).  Evaluations of one
    test set, and searches over the same data, are compared likewise.  With --paper the numbers of a published table stand beside ours:
    cell by cell where --row and --column say which runs are which row and column, and else one table below the other.  A setting of a
    search is called NAME: SETTING, and an evaluation also by the name of its model.
    """
    from pipelines.report import make
    from pipelines.report.given import KINDS

    name = check_name(name or paper or "report")
    if session.dry_run:
        make.beside(paper, row or (), column or ())
        return dry_report(session, runs, *KINDS)
    report, plans = make.make(
        runs,
        session.store,
        paper=paper,
        rows=row or (),
        columns=column or (),
        text=text,
        title=title,
        progress=session.progress,
    )
    page = make.write(report, plans, out, name)
    for note in report.facts["notes"]:
        session.tell(f"note: {note}")
    session.tell(f"written: {page}, {page.with_suffix('.md')} and the folder {page.with_suffix('')}")
    facts = {**report.facts, "page": os.fspath(page), "markdown": os.fspath(page.with_suffix(".md"))}
    session.answer({**facts, "folder": os.fspath(page.with_suffix(""))}, [page])
