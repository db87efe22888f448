"""Commands from text to sequences of token ids."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from cli.arguments import Corpus, Tokenizer
from cli.options import Session, stage_command
from guidance.errors import InputError
from pipelines.engine.stage import Result
from pipelines.stages import corpus, dataset, folds, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store


@stage_command(
    "build-corpus",
    corpus.Config,
    examples=[
        "guide build-corpus text/*.txt --name wiki",
        "zcat news.jsonl.gz | guide build-corpus - --format jsonl",
        "guide build-corpus builtin:python-docs --name docs",
        "guide build-corpus wiki.jsonl --text-field page.text --jobs 8",
        "guide build-corpus text/ --shard 3/64   # one of 64 jobs; afterwards, without --shard, it joins them",
    ],
    next_command="guide build-tokenizer {}",
)
def build_corpus(
    session: Session,
    config: corpus.Config,
    sources: Annotated[
        list[str],
        typer.Argument(help="Files, folders, patterns, - for stdin, or builtin:python-docs.", show_default=False),
    ],
) -> Result | None:
    """Read text into a corpus of documents, sentences and splits."""
    return corpus.run(sources, config, stdin=sys.stdin.buffer, **session.options())


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


@stage_command(
    "build-fold",
    folds.Config,
    examples=[
        "guide build-fold reviews --folds 10 --fold 3",
        "for f in $(seq 0 9); do guide finetune $(guide build-fold reviews --fold $f); done",
    ],
    next_command="guide finetune {}",
)
def build_fold(
    session: Session,
    config: folds.Config,
    data: Annotated[
        str, typer.Argument(metavar="DATASET", help="A dataset: a name, name@n, an id, or a path.", show_default=False)
    ],
) -> Result:
    """Take one fold of a cross-validation as test split, a tenth of the other folds for validation, and the rest to train.

    The fold of an example depends on its text alone: examples with the same text share a fold, and no example moves when
    others are added.  `guide search --folds` trains and tests on all folds.
    """
    return folds.run(data, config, **session.options())


def after_tokenizer(made: Artifact, store: Store) -> str:
    """The command to suggest after `build-tokenizer`."""
    command = "guide build-sequences {corpus} {}"
    with contextlib.suppress(InputError), store.load_input(made, "corpus", verify=False) as text:
        command += " --packing pairs" if dataset.is_parallel(text) else ""
    return command


@stage_command(
    "build-tokenizer",
    tokenizer.Config,
    examples=[
        "guide build-tokenizer wiki --name bpe",
        "T=$(guide build-tokenizer $(guide build-corpus *.txt))",
        "guide build-tokenizer multi30k --column pair --name english",
    ],
    next_command=after_tokenizer,
)
def build_tokenizer(
    session: Session,
    config: tokenizer.Config,
    corpus: Corpus,
) -> Result:
    """Train a tokenizer on a corpus."""
    return tokenizer.run(corpus, config, **session.options())


@stage_command(
    "build-sequences",
    sequences.Config,
    examples=[
        "guide build-sequences wiki bpe",
        "guide build-sequences wiki@2 bpe --max-length 128 --name wiki-128",
        "guide build-sequences wiki ./bert-base --max-length 128 --name wiki-128-of-bert   # the tokenizer of a model",
        "guide build-sequences multi30k german --target-tokenizer english --packing pairs --name multi30k-pairs",
        "guide build-sequences reviews ./bert-base --packing examples",
    ],
    next_command=lambda made, _: (
        "guide pretrain {}" + (" --objective translation" if made.manifest["config"]["packing"] == "pairs" else "")
    ),
)
def build_sequences(
    session: Session,
    config: sequences.Config,
    corpus: Corpus,
    tokenizer: Tokenizer,
    target_tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for the second text of each pair; by default the same.")
    ] = None,
) -> Result:
    """Pack the sentences of a corpus into sequences of token ids, or write pairs of texts as source and target."""
    return sequences.run(corpus, tokenizer, config, target_tokenizer=target_tokenizer, **session.options())
