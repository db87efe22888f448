"""Commands for role masks: draw them and export them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.options import Session, command
from cli.output import check_output_path, escape, say, say_json, speaks_unicode
from guidance.errors import InputError
from pipelines.probing.patterns import spec_of

LONG = 64
"""Of a sequence with more tokens only one sentence is shown, unless --whole is given."""


_ROLE = typer.Option(
    metavar="PATTERN", help="A role, written like a pattern in a plan (repeatable); by default those of preset:roles."
)


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
    masks: Annotated[str, typer.Argument(metavar="ARTIFACT", help="Artifact of build-masks.", show_default=False)],
    example: Annotated[int, typer.Option(help="Number of the sequence, from 0.")] = 0,
    split: Annotated[Literal["train", "valid", "test"], typer.Option(help="Split of the sequence.")] = "train",
    sentence: Annotated[int | None, typer.Option(help="Show only this sentence, from 0.")] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help=f"Show the whole sequence, even if it has more than {LONG} tokens.")
    ] = False,
    role: Annotated[list[str] | None, _ROLE] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the masks into this PNG file.")] = None,
    only_ascii: Annotated[bool, typer.Option("--ascii", help="Draw only with ASCII characters.")] = False,
) -> None:
    """Draw the role masks of one sequence or of one of its sentences; rows are queries, columns are keys.

    The masks of a sentence are cut out of the masks of its sequence.
    """
    from pipelines.storage.files import write_file
    from pipelines.views import role_masks
    from pipelines.views.one_text import MOST_TOKENS
    from pipelines.views.pictures import legend, matrix_lines

    if png is not None:
        check_output_path(png, "--png", ".png")
    with session.store.load(masks, kind="masks") as artifact, role_masks.Opened(artifact, session.store) as opened:
        roles = role_masks.choose(artifact, [spec_of(text) for text in role or ()])
        found = opened.example(split, example, roles.found, sentence)
        if sentence is None and not whole and len(found.labels) > LONG and found.sentences > 1:
            session.tell(
                f"showing sentence 0 of {found.sentences}; "
                f"--sentence N shows another, --whole shows all {len(found.labels)} tokens"
            )
            sentence = 0
            found = opened.example(split, example, roles.found, sentence)
    if len(found.labels) > MOST_TOKENS:
        raise InputError(
            f"{len(found.labels)} tokens are too many for a picture, which shows at most {MOST_TOKENS}",
            hint="show one sentence with --sentence N",
        )
    for name, why in roles.missing.items():
        session.tell(escape(f"left out: {name} ({why})"))
    title = f"{artifact.reference}, {split} {example}" + (f", sentence {sentence}" if sentence is not None else "")
    if png is not None:
        from pipelines.drawing import pattern_grid

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
    masks: Annotated[str, typer.Argument(metavar="ARTIFACT", help="Artifact of build-masks.", show_default=False)],
    dense: Annotated[Path, typer.Option(metavar="DIR", help="New folder, which gets a Parquet file for each split.")],
    role: Annotated[list[str] | None, _ROLE] = None,
) -> None:
    """Write an n x n mask for every role and sequence, for tools that cannot compute masks from role columns.

    There is one row per sequence; each mask is a list of n x n booleans, row by row.  Uncompressed that is n bytes per token
    and role.
    """
    from pipelines.views import role_masks

    with session.store.load(masks, kind="masks") as artifact, role_masks.Opened(artifact, session.store) as opened:
        roles = role_masks.choose(artifact, [spec_of(text) for text in role or ()])
        rows = role_masks.export(opened, roles, dense, session.progress)
    for name, why in roles.missing.items():
        session.tell(escape(f"left out: {name} ({why})"))
    if session.json:
        say_json({"schema": 1, "path": dense, "rows": rows, "roles": list(roles.found), "missing": roles.missing})
        return
    say(escape(dense))
