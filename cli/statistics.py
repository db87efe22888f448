"""Commands that show and export co-occurrence."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from cli.arguments import Ascii
from cli.completion import artifacts
from cli.options import Session, command
from cli.output import check_output_path, human_size
from cli.pictures import bar
from cli.tables import table

if TYPE_CHECKING:
    from pipelines.views.contexts import Context

Totals = Annotated[
    Literal["pairs", "tokens"],
    Option(help="Divisor of the count of a pair: the pairs of its tokens, or their occurrences."),
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
    word: Annotated[str, Argument(metavar="WORD", help="A word.")],
    text: Annotated[str, Option(help="A sentence, with or without the word.")],
    cooccur: Annotated[
        str | None,
        Option(
            metavar="REF", help="Artifact of build-cooccur; by default the newest.", autocompletion=artifacts("cooccur")
        ),
    ] = None,
    totals: Totals = "pairs",
    only_ascii: Ascii = False,
) -> None:
    """Show how strongly a word expects each token of a sentence, from 0 to 1.

    The pattern `conflict` uses these scores as weights: they weigh the word's attention to these tokens when the word is a
    wrong prediction.
    """
    from pipelines.views.contexts import contexts_of, newest

    artifact = newest(session.store) if cooccur is None else session.store.load(cooccur, kind="cooccur")
    contexts = contexts_of(artifact, word, text, totals=totals)
    number = artifact.counts["vocabulary"]
    facts = [
        {
            "token": context.token,
            "known": context.known,
            "keys": [{"text": text, "token": token, "coefficient": value} for text, token, value in context.keys],
        }
        for context in contexts
    ]
    session.answer(
        {"cooccur": artifact.reference, "word": word, "text": text, "contexts": facts},
        _lines(contexts, word.strip(), number, only_ascii),
    )
    if any(value is None for context in contexts if context.known for *_, value in context.keys):
        session.tell(f"- marks tokens that are not among the {number:,} counted tokens")


def _lines(contexts: Sequence[Context], word: str, number: int, ascii: bool) -> Iterator[str]:
    for context in contexts:
        if context is not contexts[0]:
            yield ""
        name = context.text if len(contexts) == 1 else f"{context.text} (a piece of {word})"
        if not context.known:
            yield f"{name} is not among the {number:,} tokens that were counted: it expects nothing"
            continue
        yield f"{name} expects"
        rows = [
            (key, "-" if value is None else f"{value:.4f}", bar(value, ascii=ascii)) for key, _, value in context.keys
        ]
        yield from table(("TOKEN", "FROM 0 TO 1", ""), rows)


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
        Argument(
            metavar="REF",
            help="Artifact of build-cooccur: a name, name@n, an id, or a path.",
            autocompletion=artifacts("cooccur"),
        ),
    ],
    dense: Annotated[Path, Option(metavar="FILE", help="File for the matrix of all scores.")],
    half: Annotated[bool, Option("--half", help="Write float16 instead of float32.")] = False,
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
    about = {"path": os.fspath(dense), "bytes": len(data), "rows": number, "dtype": "F16" if half else "F32"}
    session.answer({"cooccur": artifact.reference, **about}, [dense])
    session.tell(f"{number:,} × {number:,} scores, {human_size(len(data))}")
