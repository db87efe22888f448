"""Commands from text to sequences of token ids."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli.options import Session, stage_command
from guidance.errors import InputError
from pipelines.engine.stage import Result
from pipelines.stages import dataset


@stage_command(
    "build-dataset",
    dataset.Config,
    examples=[
        "guide build-dataset reviews.csv --text-column review --label-column stars --name reviews",
        "guide build-dataset --train train.tsv --valid dev.tsv --test test.tsv --text-column sentence1 --pair-column sentence2",
        "guide build-dataset --train in_domain_train.tsv --no-header --text-column 4 --label-column 2",
        "guide build-dataset rt-polarity.all --format label-text --encoding latin-1 --test-fraction 0.1",
        "guide build-dataset --train train.de.gz --train-pair train.en.gz --valid val.de --valid-pair val.en",
        "guide build-dataset papers.jsonl --summary-column summary --test-fraction 0.2",
        "guide build-dataset texts/ --format choi --test-fraction 0.2 --drop-shared --name topics",
    ],
    next_command=lambda made, _: (
        "guide finetune {}" if made.counts.get("labels") or made.counts.get("shape") else "guide build-tokenizer {}"
    ),
)
def build_dataset(
    session: Session,
    config: dataset.Config,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files of training examples; --valid-fraction and --test-fraction hold some of them out.",
            show_default=False,
        ),
    ] = None,
    train: Annotated[list[str] | None, typer.Option(help="File of training examples (repeatable).")] = None,
    valid: Annotated[list[str] | None, typer.Option(help="File of validation examples (repeatable).")] = None,
    test: Annotated[list[str] | None, typer.Option(help="File of test examples (repeatable).")] = None,
    train_pair: Annotated[
        list[str] | None,
        typer.Option(help="Translations of --train, line by line (repeatable, in the same order)."),
    ] = None,
    valid_pair: Annotated[list[str] | None, typer.Option(help="Translations of --valid, likewise.")] = None,
    test_pair: Annotated[list[str] | None, typer.Option(help="Translations of --test, likewise.")] = None,
) -> Result:
    """Read the labelled examples of a task, each with one or two texts and perhaps a label; or parallel text.

    Documents with summaries or topic segments are examples too.  The result is a corpus, which every command for a corpus accepts.  Each example is a document.
    """
    if files and train:
        raise InputError(
            "training examples are given twice: as arguments and with --train", hint="leave out one of the two"
        )
    given = {"train": files or train or [], "valid": valid or [], "test": test or []}
    pairs = {"train": train_pair or [], "valid": valid_pair or [], "test": test_pair or []}
    return dataset.run(given, config, pairs=pairs, stdin=sys.stdin.buffer, **session.options())
