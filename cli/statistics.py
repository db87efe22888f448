"""Commands that show and export co-occurrence."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.options import Session, command
from cli.output import check_output_path, escape, human_size, say, say_json, speaks_unicode
from cli.tables import say_table

WIDEST_BAR = 20


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
