"""Commands for role masks: join what is known about words with sequences, draw masks, write them out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.options import Session, command, stage_command
from cli.output import check_output_path, escape, say, say_json, speaks_unicode
from cli.patterns import inline
from guidance.errors import InputError
from pipelines.engine.stage import Result
from pipelines.stages import masks

LONG = 64
"""A sequence of more tokens is shown sentence by sentence, unless all of it is asked for."""

_ROLE = typer.Option(
    metavar="PATTERN", help="A role, as plans write patterns (repeatable); by default those of preset:roles."
)


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


@command(
    "masks show",
    examples=[
        "guide masks show wiki-masks --example 3",
        "guide masks show wiki-masks --split valid --example 0 --sentence 2 --png roles.png",
        "guide masks show wiki-masks --role dependency --role '{ name = \"window\", words = true, size = 5 }'",
    ],
)
def show_masks(
    session: Session,
    masks: Annotated[str, typer.Argument(metavar="ARTIFACT", help="What build-masks has made.", show_default=False)],
    example: Annotated[int, typer.Option(help="The sequence, by its number from 0.")] = 0,
    split: Annotated[Literal["train", "valid", "test"], typer.Option(help="The split that it is in.")] = "train",
    sentence: Annotated[int | None, typer.Option(help="Only this sentence of it, from 0.")] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help=f"All of it, also where it has more than {LONG} tokens.")
    ] = False,
    role: Annotated[list[str] | None, _ROLE] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw them into this file.")] = None,
    only_ascii: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters alone.")] = False,
) -> None:
    """Draw the role masks of one sequence, or of a sentence of it: queries go down, keys across.

    A sentence is cut out of the masks of its whole sequence.
    """
    from pipelines.storage.files import write_file
    from pipelines.views import role_masks
    from pipelines.views.one_text import MOST_TOKENS
    from pipelines.views.pictures import legend, matrix_lines

    if png is not None:
        check_output_path(png, "--png", ".png")
    with session.store.load(masks, kind="masks") as artifact, role_masks.Opened(artifact, session.store) as opened:
        roles = role_masks.choose(artifact, [inline(text) for text in role or ()])
        found = opened.example(split, example, roles.found, sentence)
        if sentence is None and not whole and len(found.labels) > LONG and found.sentences > 1:
            session.tell(
                f"sentence 0 of 0 to {found.sentences - 1}; --sentence N shows another, --whole all {len(found.labels)} tokens"
            )
            sentence = 0
            found = opened.example(split, example, roles.found, sentence)
    if len(found.labels) > MOST_TOKENS:
        raise InputError(
            f"there are {len(found.labels)} tokens; a picture holds {MOST_TOKENS}", hint="--sentence N shows a part"
        )
    for name, why in roles.missing.items():
        session.tell(escape(f"not there: {name} ({why})"))
    title = f"{artifact.reference}, {split} {example}" + (f", sentence {sentence}" if sentence is not None else "")
    if png is not None:
        from pipelines.views.drawing import pattern_grid

        write_file(png, pattern_grid(found.masks, found.labels, title=title))
    if session.json:
        drawn = {name: mask.astype(int).tolist() for name, mask in found.masks.items()}
        about = {"schema": 1, "masks": artifact.reference, "split": split, "example": example, "sentence": sentence}
        say_json({**about, "tokens": found.labels, "roles": drawn, "missing": roles.missing, "png": png})
        return
    plain = only_ascii or not speaks_unicode()
    width = shutil.get_terminal_size().columns
    say(escape(title))
    for name, mask in found.masks.items():
        say()
        say(escape(name))
        for line in matrix_lines(mask.tolist(), found.labels, found.labels, width=width, ascii=plain):
            say(line)
    say()
    say(legend(weighted=False, ascii=plain))
    if png is not None:
        session.tell(f"drawn: {escape(png)}")


@command(
    "masks export",
    examples=[
        "guide masks export wiki-masks --dense dense-masks",
        "guide masks export wiki-masks --dense dense-masks --role dependency",
    ],
)
def export_masks(
    session: Session,
    masks: Annotated[str, typer.Argument(metavar="ARTIFACT", help="What build-masks has made.", show_default=False)],
    dense: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for a Parquet file of each split.")],
    role: Annotated[list[str] | None, _ROLE] = None,
) -> None:
    """Write an n x n mask for every role and sequence, for tools that do not make them from columns.

    One row a sequence; each mask is a list of n x n booleans, query after query.  Unpacked, that is n bytes for every token
    and role.
    """
    from pipelines.views import role_masks

    with session.store.load(masks, kind="masks") as artifact, role_masks.Opened(artifact, session.store) as opened:
        roles = role_masks.choose(artifact, [inline(text) for text in role or ()])
        rows = role_masks.export(opened, roles, dense, session.progress)
    for name, why in roles.missing.items():
        session.tell(escape(f"not there: {name} ({why})"))
    if session.json:
        say_json({"schema": 1, "path": dense, "rows": rows, "roles": list(roles.found), "missing": roles.missing})
        return
    say(escape(dense))
