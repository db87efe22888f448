"""``guide glue``."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from cli.options import Session, command
from cli.output import escape, say_json
from cli.tables import say_table


@command(
    "glue",
    group="Train",
    examples=[
        "guide glue evaluation/58a1 evaluation/9c0e",
        "for t in cola rte mrpc; do guide evaluate $t-model $t; done | xargs guide glue",
        "guide glue evaluation/58a1 --scores asa --json | jq .average",
    ],
)
def glue_command(
    session: Session,
    evaluations: Annotated[
        list[str], typer.Argument(help="Evaluations on tasks of GLUE: names, ids or paths.", show_default=False)
    ],
    scores: Annotated[
        Literal["glue", "mcmisp", "asa"],
        typer.Option(
            help="What the score of a task is. glue: accuracy, with F1 for MRPC and QQP; both correlations for STS-B; "
            "Matthews for CoLA. mcmisp: accuracy, Pearson, Matthews. asa: accuracy, F1 for QQP, Spearman, Matthews."
        ),
    ] = "glue",
) -> None:
    """Score evaluations on tasks of GLUE, and average them: over all eight tasks, if they are there.

    The datasets must have been read by `guide build-dataset --format glue-…`.  MNLI counts once, as the mean of its matched
    and mismatched part.
    """
    from pipelines.views.glue import EIGHT, average, score

    found = []
    with contextlib.ExitStack() as opened:
        for reference in evaluations:
            artifact = opened.enter_context(session.store.load(reference, kind="evaluation"))
            found.append(score(artifact, reference, session.store, scores))
    mean, tasks = average(found)
    missing = [task for task in EIGHT if task not in {each.task for each in found}]
    if session.json:
        about = {"scores": scores, "average": mean, "tasks": tasks, "missing": missing}
        return say_json({"schema": 1, **about, "evaluations": [asdict(each) for each in found]})
    rows = [
        (each.task, escape(reference), f"{each.value:.4f}", ", ".join(each.metrics), f"{each.examples:,}")
        for each, reference in zip(found, evaluations, strict=True)
    ]
    rows.append(("average", f"{tasks} tasks", f"{mean:.4f}", "", ""))
    say_table(("task", "evaluation", "score", "mean of", "examples"), rows, whole=("task", "evaluation"))
    if missing:
        session.tell(f"not the average of GLUE: {', '.join(missing)} are missing")
