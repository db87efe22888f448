"""Commands from text to sequences of token ids."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli.options import Session, stage_command
from pipelines import corpus, sequences, tokenizer
from pipelines.stage import Result


@stage_command(
    "build-corpus",
    corpus.Config,
    examples=[
        "guide build-corpus text/*.txt --name wiki",
        "zcat news.jsonl.gz | guide build-corpus - --format jsonl",
        "guide build-corpus builtin:python-docs --name docs",
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
) -> Result:
    """Read text into a corpus of documents, sentences and splits."""
    return corpus.run(sources, config, stdin=sys.stdin.buffer, **session.options())


@stage_command(
    "build-tokenizer",
    tokenizer.Config,
    examples=["guide build-tokenizer wiki --name bpe", "T=$(guide build-tokenizer $(guide build-corpus *.txt))"],
    next_command="guide build-sequences CORPUS {}",
)
def build_tokenizer(
    session: Session,
    config: tokenizer.Config,
    corpus: Annotated[str, typer.Argument(help="A corpus: a name, name@n, an id, or a path.", show_default=False)],
) -> Result:
    """Train a tokenizer on a corpus."""
    return tokenizer.run(corpus, config, **session.options())


@stage_command(
    "build-sequences",
    sequences.Config,
    examples=["guide build-sequences wiki bpe", "guide build-sequences wiki@2 bpe --max-length 128 --name wiki-128"],
    next_command="guide pretrain {}",
)
def build_sequences(
    session: Session,
    config: sequences.Config,
    corpus: Annotated[str, typer.Argument(help="A corpus: a name, name@n, an id, or a path.", show_default=False)],
    tokenizer: Annotated[str, typer.Argument(help="A tokenizer, likewise.", show_default=False)],
) -> Result:
    """Pack the sentences of a corpus into sequences of token ids."""
    return sequences.run(corpus, tokenizer, config, **session.options())
