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
    test set, and searches over the same data, are compared likewise.  With --paper the numbers of a published table stand beside ours.
    """
    from pipelines import papers
    from pipelines.report import make
    from pipelines.report.given import KINDS

    name = check_name(name or paper or "report")
    if session.dry_run:
        if paper:
            papers.table(paper)
        return dry_report(session, runs, *KINDS)
    report, plans = make.make(runs, session.store, paper=paper, text=text, title=title, progress=session.progress)
    page = make.write(report, plans, out, name)
    for note in report.facts["notes"]:
        session.tell(f"note: {note}")
    session.tell(f"written: {page}, {page.with_suffix('.md')} and the folder {page.with_suffix('')}")
    facts = {**report.facts, "page": os.fspath(page), "markdown": os.fspath(page.with_suffix(".md"))}
    session.answer({**facts, "folder": os.fspath(page.with_suffix(""))}, [page])
