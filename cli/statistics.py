"""Commands that count: what is rare, what depends on what, what occurs together."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Session, stage_command
from pipelines import dependencies, idf
from pipelines.stage import Result


@stage_command(
    "build-idf",
    idf.Config,
    examples=[
        "guide build-idf wiki --name wiki-idf",
        "guide build-idf wiki bpe --unit sentence",
        "guide build-idf wiki --jobs 8",
        "guide build-idf wiki --executor dask --scheduler tcp://10.0.0.1:8786",
        "guide build-idf wiki --shard 3/64   # one of 64 jobs; afterwards, without --shard, it merges",
    ],
    next_command="guide build-masks SEQUENCES --idf {}",
)
def build_idf(
    session: Session,
    config: idf.Config,
    corpus: Annotated[str, typer.Argument(help="A corpus: a name, name@n, an id, or a path.", show_default=False)],
    tokenizer: Annotated[
        str | None, typer.Argument(help="Count this tokenizer's tokens instead of words.", show_default=False)
    ] = None,
) -> Result | None:
    """Count how rare each word, or token, is in the training text of a corpus."""
    return idf.run(corpus, tokenizer, config, **session.options())


@stage_command(
    "build-deps",
    dependencies.Config,
    examples=[
        "guide build-deps wiki --parser spacy:en_core_web_sm --name wiki-deps",
        "guide build-deps wiki --parser stanza:tl --device cuda",
        "guide build-deps ewt --parser 'conllu:ewt/*.conllu.gz'",
        "guide build-deps wiki --parser spacy:en_core_web_sm --jobs 8",
    ],
    next_command="guide build-masks SEQUENCES --deps {}",
)
def build_deps(
    session: Session,
    config: dependencies.Config,
    corpus: Annotated[str, typer.Argument(help="A corpus: a name, name@n, an id, or a path.", show_default=False)],
) -> Result | None:
    """Parse the sentences of a corpus: words, heads, relations."""
    return dependencies.run(corpus, config, **session.options())
