"""Commands for role masks: join what is known about words with sequences, draw masks, write them out."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Session, stage_command
from pipelines import masks
from pipelines.stage import Result


@stage_command(
    "build-masks",
    masks.Config,
    examples=[
        "guide build-masks wiki-128 --idf wiki-idf --deps wiki-deps",
        "guide build-masks wiki-128 --idf wiki-idf   # a language without a parser",
        "guide build-masks wiki-128 --idf wiki-idf --deps wiki-deps --jobs 8",
        "guide build-masks wiki-128 --deps wiki-deps --shard 3/64   # one of 64 jobs; without --shard it merges",
    ],
    next_command="guide masks show {}",
)
def build_masks(
    session: Session,
    config: masks.Config,
    sequences: Annotated[str, typer.Argument(help="Sequences: a name, name@n, an id, or a path.", show_default=False)],
) -> Result | None:
    """Say of every token of some sequences what its word is: which, how rare, its head and relation.

    Words and tokens meet by their characters.  Without --deps every role is there but those of grammar.
    """
    return masks.run(sequences, config, **session.options())
