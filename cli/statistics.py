"""Commands for statistics: idf, dependency trees and co-occurrence."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.arguments import Corpus, Tokenizer
from cli.next_commands import SEQUENCES_FIRST
from cli.options import Session, command, stage_command
from cli.output import check_output_path, escape, human_size, say, say_json, speaks_unicode
from cli.tables import say_table
from pipelines.engine.stage import Result
from pipelines.stages import cooccurrence, dependencies, idf
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

WIDEST_BAR = 20


def after_idf(made: Artifact, store: Store) -> tuple[str, ...]:
    """The commands to suggest after `build-idf`: masks need the idf of words."""
    if "tokenizer" in made.manifest["inputs"]:
        return ("guide show {}",)
    masks = "guide build-masks {sequences} --idf {}"
    return (f"{masks} --deps {{deps}}", masks, *SEQUENCES_FIRST)


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
    next_command=after_idf,
)
def build_idf(
    session: Session,
    config: idf.Config,
    corpus: Corpus,
    tokenizer: Annotated[
        str | None, typer.Argument(help="Count this tokenizer's tokens instead of words.", show_default=False)
    ] = None,
) -> Result | None:
    """Compute the idf of each word or token in the training text of a corpus."""
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
    next_command=(
        "guide build-masks {sequences} --idf {idf} --deps {}",
        "guide build-masks {sequences} --deps {}",
        *SEQUENCES_FIRST,
    ),
)
def build_deps(
    session: Session,
    config: dependencies.Config,
    corpus: Corpus,
) -> Result | None:
    """Parse the sentences of a corpus into words, heads and relations."""
    return dependencies.run(corpus, config, **session.options())


@stage_command(
    "build-cooccur",
    cooccurrence.Config,
    examples=[
        "guide build-cooccur wiki bpe --name wiki-pairs",
        "guide build-cooccur wiki bpe --top 10000 --window 15",
        "guide build-cooccur wiki ./my-model --jobs 8   # a folder with tokenizer.json",
        "guide build-cooccur wiki bpe --shard 3/64   # one of 64 jobs; run all twice (encode, count), then without --shard",
    ],
    next_command='guide cooccur show WORD --text "WORDS" --cooccur {}',
)
def build_cooccur(
    session: Session,
    config: cooccurrence.Config,
    corpus: Corpus,
    tokenizer: Tokenizer,
) -> Result | None:
    """Count how often frequent tokens occur together in the training text of a corpus."""
    return cooccurrence.run(corpus, tokenizer, config, **session.options())


Totals = Annotated[
    Literal["pairs", "tokens"],
    typer.Option(help="What to divide the count of a pair by: the pairs of its tokens, or their occurrences."),
]


@command(
    "cooccur show",
    examples=[
        'guide cooccur show is --text "he is swimming yesterday"',
        'guide cooccur show dog --text "the dog barked" --cooccur wiki-pairs@2',
    ],
)
def show_context(
    session: Session,
    word: Annotated[str, typer.Argument(metavar="WORD", help="A word.", show_default=False)],
    text: Annotated[str, typer.Option(help="A sentence, with or without the word.", show_default=False)],
    cooccur: Annotated[
        str | None, typer.Option(metavar="REF", help="Artifact of build-cooccur; by default the newest.")
    ] = None,
    totals: Totals = "pairs",
    only_ascii: Annotated[bool, typer.Option("--ascii", help="Draw only with ASCII characters.")] = False,
) -> None:
    """Show how strongly a word expects each token of a sentence, from 0 to 1.

    The pattern `conflict` uses these scores as weights: they weigh the word's attention to these tokens when the word is a
    wrong prediction.
    """
    from pipelines.views.contexts import contexts_of, newest

    artifact = newest(session.store) if cooccur is None else session.store.load(cooccur, kind="cooccur")
    contexts = contexts_of(artifact, word, text, totals=totals)
    if session.json:
        found = [
            {
                "token": context.token,
                "known": context.known,
                "keys": [{"text": t, "token": token, "coefficient": value} for t, token, value in context.keys],
            }
            for context in contexts
        ]
        say_json({"schema": 1, "cooccur": artifact.reference, "word": word, "text": text, "contexts": found})
        return
    number = artifact.counts["vocabulary"]
    for place, context in enumerate(contexts):
        if place:
            say()
        name = context.text if len(contexts) == 1 else f"{context.text} (a piece of {word.strip()})"
        if not context.known:
            say(f"{escape(name)} is not among the {number:,} tokens that were counted: it expects nothing")
            continue
        say(f"{escape(name)} expects")
        say_table(
            ("TOKEN", "FROM 0 TO 1", ""),
            [
                (key, "-" if value is None else f"{value:.4f}", _bar(value, only_ascii))
                for key, _, value in context.keys
            ],
        )
    if any(value is None for context in contexts if context.known for *_, value in context.keys):
        session.tell(f"- marks tokens that are not among the {number:,} counted tokens")


def _bar(value: float | None, only_ascii: bool) -> str:
    """A number from 0 to 1 as a bar, which is visible for every number above 0."""
    eighths = math.ceil((value or 0) * WIDEST_BAR * 8)
    if only_ascii or not speaks_unicode():
        return "#" * math.ceil(eighths / 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


@command(
    "cooccur export",
    examples=[
        "guide cooccur export wiki-pairs --dense scores.safetensors",
        "guide cooccur export wiki-pairs --dense scores.safetensors --half --totals tokens",
    ],
)
def export_cooccurrence(
    session: Session,
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="Artifact of build-cooccur: a name, name@n, an id, or a path.", show_default=False
        ),
    ],
    dense: Annotated[
        Path, typer.Option(metavar="FILE", help="Write all scores as a matrix into this file.", show_default=False)
    ],
    half: Annotated[bool, typer.Option("--half", help="Write float16 instead of float32.")] = False,
    totals: Totals = "pairs",
) -> None:
    """Write the matrix of scores for other tools, as a safetensors file with `scores` and `ids`.

    A score says how strongly the token of the row expects the token of the column; `ids` has the token ids of rows and
    columns.  The counts themselves are in the artifact's Parquet files.
    """
    from pipelines.storage.files import write_file
    from pipelines.views import contexts

    check_output_path(dense, "--dense", ".safetensors")
    artifact = session.store.load(reference, kind="cooccur")
    data = contexts.dense(artifact, half=half, totals=totals)
    write_file(dense, data)
    number = artifact.counts["vocabulary"]
    if session.json:
        about = {"path": os.fspath(dense), "bytes": len(data), "rows": number, "dtype": "F16" if half else "F32"}
        say_json({"schema": 1, "cooccur": artifact.reference, **about})
        return
    say(escape(dense))
    session.tell(f"{number:,} × {number:,} scores, {human_size(len(data))}")
