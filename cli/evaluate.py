"""``guide evaluate``."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Session, stage_command
from pipelines.engine.stage import Result
from pipelines.stages import evaluate


@stage_command(
    "evaluate",
    evaluate.Config,
    group="Train",
    examples=[
        "guide evaluate reviews-model reviews",
        "guide evaluate reviews-model other-reviews --split valid --weights best",
        "guide evaluate ./some-classifier reviews",
        "guide evaluate de-en multi30k-pairs",
        "guide evaluate model/1f0c multi30k-pairs --split valid --weights best --beams 1",
        "guide evaluate de-en multi30k-pairs --masks multi30k-masks --json | jq .counts.metrics.bleu",
    ],
    next_command="guide show {}",
)
def evaluate_command(
    session: Session,
    config: evaluate.Config,
    model: Annotated[str, typer.Argument(help="A model: a name, name@n, an id, or a folder.", show_default=False)],
    data: Annotated[
        str,
        typer.Argument(
            help="A dataset of its task, or sequences that were made with its tokenizer.", show_default=False
        ),
    ],
) -> Result:
    """Measure how good a model is at its task.

    Of a dataset the sequences are made with the tokenizer of the model, and the masks that its plan needs.  The metrics are
    printed and stored, and so is the prediction for every example.
    """
    result = evaluate.run(model, data, config, **session.options())
    counts = result.artifact.counts
    for name, value in counts["metrics"].items():
        signature = counts["signatures"].get(name, "nats per token" if name == "nll" else "")
        session.tell(f"{name} {value:.4f}" + (f"  ({signature})" if signature else ""))
    return result
