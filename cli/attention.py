"""``guide attention``: where a trained model looks on one text."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import Session, command
from cli.output import check_output_path, escape, say, say_json, speaks_unicode, tell
from cli.tables import say_table
from guidance.errors import InputError
from pipelines.engine.stage import check_working_folder

SHOWN = 3
"""Patterns in the line of a head."""


@command(
    "attention",
    group="Understand",
    examples=[
        'guide attention guided --text "The dog saw the man, and it barked."',
        'guide attention ./bert-base --text "The dog saw the man." --layer 3 --head 5',
        'guide attention guided --text "The dog saw the man." --png heads.png',
        "echo 'The dog saw the man.' | guide attention guided --json | jq '.heads[0]'",
    ],
)
def attention_command(
    session: Session,
    model: Annotated[str, typer.Argument(help="A model: a name, name@n, an id, or a folder.", show_default=False)],
    text: Annotated[str | None, typer.Option(help="The text; by default stdin.", show_default=False)] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Show only this layer, from 0.")] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Show this head of --layer in full, from 0.")] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw all heads, or only --head, to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also save the page of `guide discover` with this text.")
    ] = None,
    sinks: Annotated[
        bool,
        typer.Option("--sinks", help="Also list the patterns where heads rest: first, delimiter, separator, self."),
    ] = False,
    only_ascii: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters only.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes a GPU if there is one.")] = "auto",
) -> None:
    """Show where the heads of a model look on one text, and which patterns each of them follows most.

    "next 62 % (12 ×)" means: 62 % of the attention of a head is on the next token, 12 times as much as uniform attention has there.
    Words and sentences are found by rules, so patterns of syntax are not among them.  Patterns where heads rest that do nothing else,
    such as the first token, are left out, unless --sinks is given.
    """
    from pipelines.probing import one_text
    from pipelines.training.opening import find_folder

    check_working_folder()
    for path, flag, ending in ((png, "--png", ".png"), (html, "--html", ".html")):
        if path is not None:
            check_output_path(path, flag, ending)
    if head is not None and layer is None:
        raise InputError("--head without --layer", hint="--layer 3 --head 5")
    given = (sys.stdin.read(1 << 20) if text is None else text).strip()
    folder = find_folder(model, session.store)
    found = one_text.look(folder, given, device=device)
    if found.cut:
        tell("warning: the text was longer than the model reads, and was cut")
    chosen = [one for one in found.heads if layer in (None, one.layer) and head in (None, one.head)]
    if not chosen:
        found.map(layer or 0, head or 0)
    if png is not None:
        _draw(png, found, layer, head, model)
        session.tell(f"drawn: {escape(png)}")
    if html is not None:
        _save_page(html, folder, given, device)
        session.tell(f"written: {escape(html)}")
    if session.json:
        rows = [
            {
                "layer": one.layer,
                "head": one.head,
                "kind": one.kind,
                "entropy": one.entropy,
                "closest": [{"pattern": name, "share": share, "lift": lift} for name, share, lift in one.closest],
                **({"attention": found.map(one.layer, one.head, one.kind).tolist()} if head is not None else {}),
            }
            for one in chosen
        ]
        say_json({"schema": 1, "tokens": list(found.labels), "heads": rows})
        return
    if head is None:
        _list(chosen, sinks)
        return
    for one in chosen:
        _show(found, one, ascii=only_ascii or not speaks_unicode())


def _list(chosen: list[Any], sinks: bool) -> None:
    from guidance.probes.discovery import SINKS

    rows = []
    for one in chosen:
        name = f"{one.layer}-{one.head}" + ("" if one.kind == "self" else f" ({one.kind})")
        shown = [each for each in one.closest if sinks or each[0] not in SINKS]
        close = [f"{pattern} {100 * share:.0f} % ({lift:.1f} ×)" for pattern, share, lift in shown if lift > 1.2]
        rows.append((name, f"{100 * one.entropy:.0f} %", ", ".join(close[:SHOWN]) or "–"))
    say_table(("HEAD", "ENTROPY", "CLOSEST PATTERNS"), rows)


def _show(found: Any, one: Any, *, ascii: bool) -> None:
    from pipelines.views.pictures import matrix_lines

    weights = found.map(one.layer, one.head, one.kind)
    highest = float(weights.max()) or 1.0
    labels = [escape(label) for label in found.labels]
    say(f"layer {one.layer}, head {one.head}" + ("" if one.kind == "self" else f" ({one.kind})"))
    width = shutil.get_terminal_size().columns
    # a tenth of the highest attention is nothing to see
    shown = [[value / highest if value > highest / 10 else 0.0 for value in row] for row in weights.tolist()]
    for line in matrix_lines(shown, labels, labels, width=width, ascii=ascii):
        say(line)
    say()
    say(
        f"queries go down, keys across; the darkest is {100 * highest:.0f} %, and below {10 * highest:.0f} % nothing is drawn"
    )


def _draw(path: Path, found: Any, layer: int | None, head: int | None, model: str) -> None:
    from pipelines.drawing import attention_grid, pattern_picture
    from pipelines.storage.files import write_file

    if head is not None and layer is not None:
        picture = pattern_picture(
            found.map(layer, head),
            found.labels,
            title=f"{model}: layer {layer}, head {head}",
            unit="attention probability",
        )
    else:
        sites = [site for site in found.maps if layer in (None, site.layer) and site.attention == "self"]
        rows = {
            f"layer {site.layer}": {f"head {n}": maps for n, maps in enumerate(found.maps[site])}
            for site in sorted(sites, key=lambda site: site.layer)
        }
        picture = attention_grid(rows, found.labels, title=f"Attention of {model}")
    write_file(path, picture)


def _save_page(path: Path, folder: Path, text: str, device: str) -> None:
    import tempfile

    from pipelines.explorer.export import one_file
    from pipelines.explorer.workspace import Workspace
    from pipelines.stages import discover_score
    from pipelines.storage.files import write_file
    from pipelines.storage.store import Store

    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "text.txt"
        source.write_text(text, encoding="utf-8")
        config = discover_score.Config(device=device, sequence_length=512)
        store = Store(Path(scratch) / "artifacts")
        workspace = Workspace({folder.name: str(folder)}, str(source), config, store, title="one text")
        workspace.start()
        try:
            workspace.wait()
            write_file(path, one_file(workspace, 1))
        finally:
            workspace.close()
