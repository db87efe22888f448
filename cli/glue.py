"""``guide glue``."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Annotated, Literal

from typer import Argument, Option

from cli.completion import artifacts
from cli.options import Session, command
from cli.tables import table


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
        list[str],
        Argument(help="Evaluations on tasks of GLUE: names, ids or paths.", autocompletion=artifacts("evaluation")),
    ],
    scores: Annotated[
        Literal["glue", "mcmisp", "asa"],
        Option(
            help="Score of a task. glue: accuracy, with F1 for MRPC and QQP; both correlations for STS-B; "
            "Matthews for CoLA. mcmisp: accuracy, Pearson, Matthews. asa: accuracy, F1 for QQP, Spearman, Matthews."
        ),
    ] = "glue",
) -> None:
    """Score evaluations on tasks of GLUE, and average them: over all eight tasks, if they are there.

    The datasets must have been read by `guide build-dataset --format glue-…`.  MNLI counts once, as the mean of its matched
    and mismatched part.
    """
    from pipelines.views.glue import EIGHT, average, score

    scored = []
    with contextlib.ExitStack() as opened:
        for reference in evaluations:
            artifact = opened.enter_context(session.store.load(reference, kind="evaluation"))
            scored.append(score(artifact, reference, session.store, scores))
    mean, tasks = average(scored)
    missing = [task for task in EIGHT if task not in {each.task for each in scored}]
    rows = [
        (each.task, reference, f"{each.value:.4f}", ", ".join(each.metrics), f"{each.examples:,}")
        for each, reference in zip(scored, evaluations, strict=True)
    ]
    rows.append(("average", f"{tasks} tasks", f"{mean:.4f}", "", ""))
    facts = {"scores": scores, "average": mean, "tasks": tasks, "missing": missing}
    session.answer(
        {**facts, "evaluations": [asdict(each) for each in scored]},
        table(("task", "evaluation", "score", "mean of", "examples"), rows, whole=("task", "evaluation")),
    )
    if missing:
        session.tell(f"not the average of GLUE: {', '.join(missing)} are missing")
