"""Commands that train, and the one that shows everything at once."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Session, stage_command
from pipelines import pretrain, quickstart
from pipelines.stage import Result


@stage_command(
    "pretrain",
    pretrain.Config,
    group="Train",
    examples=[
        "guide pretrain wiki-128 --plan preset:ag --size mini --steps 5000",
        "guide pretrain wiki-128 --layers 8 --hidden 128 --heads 4 --learning-rate 1e-3 --schedule constant",
        "guide pretrain wiki-128 --init ./roberta-base --plan my-plan.toml",
        "torchrun --nproc-per-node 2 --no-python guide pretrain wiki-128 --plan preset:ag",
        "guide pretrain wiki-128 --steps 9000 --resume model/1f0c --allow-change steps",
    ],
    next_command="guide show {}",
)
def pretrain_command(
    session: Session,
    config: pretrain.Config,
    sequences: Annotated[str, typer.Argument(help="Sequences: a name, name@n, an id, or a path.", show_default=False)],
    resume: Annotated[
        str | None, typer.Option(help="The unfinished run that this must be, model/ID; other settings are refused.")
    ] = None,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A setting that may differ from those of --resume (repeatable).")
    ] = None,
) -> Result | None:
    """Pre-train a masked language model, with or without guided heads.

    Ctrl-C or SIGTERM finishes the step and saves; the same command continues the run, bit for bit.
    """
    return pretrain.run(sequences, config, resume=resume, allow_change=allow_change or (), **session.options())


@stage_command(
    "quickstart",
    quickstart.Config,
    group="Start",
    examples=[
        "guide quickstart",
        "guide quickstart --corpus novel.txt",
        "guide quickstart --corpus text/*.txt --steps 300",
    ],
    next_command="guide lineage {}",
)
def quickstart_command(
    session: Session,
    config: quickstart.Config,
    more: Annotated[list[str] | None, typer.Argument(help="Further files of --corpus.", show_default=False)] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Your own text, as build-corpus takes it, instead of Python's documentation."),
    ] = None,
) -> Result:
    """See attention guidance at work: the same small model with and without guided heads, in a few minutes."""
    result = quickstart.run([*(corpus or []), *(more or [])], config, **session.options())
    folder = result.artifact.path
    session.tell(result.artifact.counts["table"])
    session.tell(f"learning curves: {folder / 'learning.png'}\nattention of guided heads: {folder / 'attention.png'}")
    return result
