"""Commands for role masks: draw them and export them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from cli.arguments import Ascii, Png
from cli.completion import artifacts
from cli.options import Session, command
from cli.output import check_output_path
from cli.pictures import legend, square
from guidance.errors import InputError
from pipelines.probing.patterns import spec_of

if TYPE_CHECKING:
    from pipelines.views.role_masks import Example, Roles

LONG = 64
"""Of a sequence with more tokens only one sentence is shown, unless --whole is given."""

Masks = Annotated[str, Argument(metavar="ARTIFACT", help="Artifact of build-masks.", autocompletion=artifacts("masks"))]
Role = Annotated[
    list[str] | None,
    Option(
        metavar="PATTERN",
        help="A role, written like a pattern in a plan (repeatable); by default those of preset:roles.",
    ),
]


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
    masks: Masks,
    example: Annotated[int, Option(help="Number of the sequence, from 0.")] = 0,
    split: Annotated[Literal["train", "valid", "test"], Option(help="Split of the sequence.")] = "train",
    sentence: Annotated[int | None, Option(help="Number of the only sentence to show, from 0.")] = None,
    whole: Annotated[
        bool, Option("--whole", help=f"Show the whole sequence, even if it has more than {LONG} tokens.")
    ] = False,
    role: Role = None,
    png: Png = None,
    only_ascii: Ascii = False,
) -> None:
    """Draw the role masks of one sequence or of one of its sentences; rows are queries, columns are keys.

    The masks of a sentence are cut out of the masks of its sequence.
    """
    from pipelines.storage.files import write_file
    from pipelines.views import role_masks
    from pipelines.views.one_text import MOST_TOKENS

    check_output_path(png, "--png", ".png")
    with session.store.load(masks, kind="masks") as artifact, role_masks.Opened(artifact, session.store) as opened:
        roles = role_masks.choose(artifact, [spec_of(text) for text in role or ()])
        shown = opened.example(split, example, roles.known, sentence)
        if sentence is None and not whole and len(shown.labels) > LONG and shown.sentences > 1:
            session.tell(
                f"showing sentence 0 of {shown.sentences}; "
                f"--sentence N shows another, --whole shows all {len(shown.labels)} tokens"
            )
            sentence = 0
            shown = opened.example(split, example, roles.known, sentence)
    if len(shown.labels) > MOST_TOKENS:
        raise InputError(
            f"{len(shown.labels)} tokens are too many for a picture, which shows at most {MOST_TOKENS}",
            hint="show one sentence with --sentence N",
        )
    _tell_missing(session, roles)
    title = f"{artifact.reference}, {split} {example}" + (f", sentence {sentence}" if sentence is not None else "")
    if png is not None:
        from pipelines.drawing import pattern_grid

        write_file(png, pattern_grid(shown.masks, shown.labels, title=title))
    about = {"masks": artifact.reference, "split": split, "example": example, "sentence": sentence}
    drawn = {name: mask.astype(int).tolist() for name, mask in shown.masks.items()}
    session.answer(
        {**about, "tokens": shown.labels, "roles": drawn, "missing": roles.missing, "png": png},
        _drawn(title, shown, only_ascii),
    )
    if png is not None:
        session.tell(f"drawn: {png}")


def _drawn(title: str, shown: Example, ascii: bool) -> Iterator[str]:
    yield title
    for name, mask in shown.masks.items():
        yield from ("", name, *square(mask, shown.labels, ascii=ascii))
    yield from ("", legend(weighted=False, ascii=ascii))


def _tell_missing(session: Session, roles: Roles) -> None:
    for name, why in roles.missing.items():
        session.tell(f"left out: {name} ({why})")


@command(
    "masks export",
    examples=[
        "guide masks export wiki-masks --dense dense-masks",
        "guide masks export wiki-masks --dense dense-masks --role dependency",
    ],
)
def export_masks(
    session: Session,
    masks: Masks,
    dense: Annotated[Path, Option(metavar="DIR", help="New folder, which gets a Parquet file for each split.")],
    role: Role = None,
) -> None:
    """Write an n x n mask for every role and sequence, for tools that cannot compute masks from role columns.

    There is one row per sequence; each mask is a list of n x n booleans, row by row.  Uncompressed that is n bytes per token
    and role.
    """
    from pipelines.views import role_masks

    with session.store.load(masks, kind="masks") as artifact, role_masks.Opened(artifact, session.store) as opened:
        roles = role_masks.choose(artifact, [spec_of(text) for text in role or ()])
        rows = role_masks.export(opened, roles, dense, session.progress)
    _tell_missing(session, roles)
    session.answer({"path": dense, "rows": rows, "roles": list(roles.known), "missing": roles.missing}, [dense])
