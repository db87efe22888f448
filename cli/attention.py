"""``guide attention``: where a trained model looks on one text."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from cli.arguments import Ascii, Model, Pdf, Png, Svg
from cli.options import Session, command
from cli.output import check_output_path, tell
from cli.pictures import square
from cli.tables import table
from guidance.errors import InputError
from pipelines.engine.stage import check_working_folder

if TYPE_CHECKING:
    from pipelines.probing.one_text import HeadOnText, TextAttention
    from pipelines.storage.store import Store

SHOWN = 3
"""Patterns in the line of a head."""


@command(
    "attention",
    group="Understand",
    examples=[
        'guide attention guided --text "The dog saw the man, and it barked."',
        'guide attention ./bert-base --text "The dog saw the man." --layer 3 --head 5',
        'guide attention guided --text "The dog saw the man." --png heads.png --pdf heads.pdf',
        "echo 'The dog saw the man.' | guide attention guided --json | jq '.heads[0]'",
    ],
)
def attention_command(
    session: Session,
    model: Model,
    text: Annotated[str | None, Option(help="The text; by default stdin.")] = None,
    layer: Annotated[int | None, Option(min=0, help="The only layer to show, from 0.")] = None,
    head: Annotated[int | None, Option(min=0, help="The only head of --layer, shown in full, from 0.")] = None,
    png: Png = None,
    svg: Svg = None,
    pdf: Pdf = None,
    html: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="HTML file for the page of `guide discover` with this text.  For a plan that reads words, the text and its masks go "
            "into the store.",
        ),
    ] = None,
    sinks: Annotated[
        bool,
        Option("--sinks", help="Also list the patterns where heads rest: first, sink, delimiter, separator, self."),
    ] = False,
    only_ascii: Ascii = False,
    parser: Annotated[
        str,
        Option(help="A parser, as in `guide build-deps --parser`: for patterns of syntax, and for plans that read it."),
    ] = "",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Option(help="Device to compute on; auto takes a GPU if there is one.")
    ] = "auto",
) -> None:
    """Show where the heads of a model look on one text, and which patterns each of them follows most.

    "next 62 % (12 ×)" means: 62 % of the attention of a head is on the next token, 12 times as much as uniform attention has there.
    ENTROPY is 100 % for a head that looks alike at all tokens that it may see, and 0 % for one that looks at a single token.
    Words and sentences are found by rules, so patterns of syntax are not among them without a --parser.  Attention sinks, such as
    the first token, are left out, unless --sinks is given.  Pictures are at most seven inches wide; where maps are too small for
    their tokens, choose a --layer, or a --layer and a --head.  A text is cut after 512 tokens, or after as many as the model reads.
    Special tokens such as [MASK] are read as the characters that they are written with.
    """
    check_working_folder()
    pictures = {"png": png, "svg": svg, "pdf": pdf}
    for kind, path in pictures.items():
        check_output_path(path, f"--{kind}", f".{kind}")
    check_output_path(html, "--html", ".html")
    if head is not None and layer is None:
        raise InputError("--head without --layer", hint="--layer 3 --head 5")
    if text is None and sys.stdin.isatty():
        session.tell("reading the text from the terminal; Ctrl-D ends")
    if text is None:
        # bytes that are not UTF-8 are kept for now, and refused as those of --text are
        stdin = io.TextIOWrapper(sys.stdin.buffer, "utf-8", "surrogateescape")
        text = stdin.read(1 << 20)
        stdin.detach()
    text = text.strip()
    if not text:
        raise InputError("the text is empty", hint='for example: --text "The dog saw the man, and it barked."')
    from pipelines.probing import one_text
    from pipelines.probing.heads import no_such_head
    from pipelines.stages.missing import text_words
    from pipelines.storage.files import write_file
    from pipelines.training.opening import find_folder

    folder = find_folder(model, session.store)
    words = text_words(model, folder, parser, device, session.store, parses=True)
    looked = one_text.look(folder, text, device=device, words=words)
    if looked.cut:
        tell(f"warning: the text was cut after {len(looked.labels)} tokens")
    chosen = [one for one in looked.heads if layer in (None, one.layer) and head in (None, one.head)]
    if not chosen and layer is not None:
        raise no_such_head(layer, head, [(one.layer, one.head) for one in looked.heads])
    model_name = os.path.basename(os.path.abspath(model)) if Path(model).is_dir() else model
    for kind, path in pictures.items():
        if path is not None:
            write_file(path, _picture(looked, chosen, layer, head, sinks, name=model_name, text=text, kind=kind))
            session.tell(f"drawn: {path}")
    if html is not None:
        write_file(html, _page(model_name, folder, text, device, parser, session.store))
        session.tell(f"written: {html}")
    rows = [
        {
            "layer": one.layer,
            "head": one.head,
            "kind": one.kind,
            "entropy": one.entropy,
            "closest": [{"pattern": name, "share": share, "lift": lift} for name, share, lift in one.closest],
            **({"attention": looked.map(one.layer, one.head, one.kind).tolist()} if head is not None else {}),
        }
        for one in chosen
    ]
    lines = _list(chosen, sinks) if head is None or sinks else []
    if head is not None:
        lines += [line for one in chosen for line in (*[""] * sinks, *_map(looked, one, only_ascii))]
    session.answer({"tokens": list(looked.labels), "heads": rows}, lines)


def _list(chosen: Sequence[HeadOnText], sinks: bool) -> list[str]:
    from guidance.probes.discovery import SINKS

    rows = []
    for one in chosen:
        name = f"{one.layer}-{one.head}" + ("" if one.kind == "self" else f" ({one.kind})")
        shown = [each for each in one.closest if sinks or each[0] not in SINKS]
        close = [f"{pattern} {100 * share:.0f} % ({lift:.1f} ×)" for pattern, share, lift in shown if lift > 1.2]
        rows.append((name, f"{100 * one.entropy:.0f} %", ", ".join(close[:SHOWN]) or "–"))
    return table(("HEAD", "ENTROPY", "CLOSEST PATTERNS"), rows)


def _map(looked: TextAttention, one: HeadOnText, ascii: bool) -> Iterator[str]:
    """The attention of one head as lines; below a tenth of its highest value nothing is drawn."""
    weights = looked.map(one.layer, one.head, one.kind)
    highest = float(weights.max()) or 1.0
    yield f"layer {one.layer}, head {one.head}" + ("" if one.kind == "self" else f" ({one.kind})")
    yield from square(weights / highest * (weights > highest / 10), looked.labels, ascii=ascii)
    yield ""
    yield (
        f"queries go down, keys across; the darkest is {100 * highest:.0f} %, and below {10 * highest:.0f} % nothing is drawn"
    )


MOST_PATTERNS = 5
"""Patterns below a picture."""

MOST_BESIDE = 3
"""Maps beside each other, if only one layer is drawn."""


def _picture(
    looked: TextAttention,
    chosen: Sequence[HeadOnText],
    layer: int | None,
    head: int | None,
    sinks: bool,
    *,
    name: str,
    text: str,
    kind: str,
) -> bytes:
    """The maps of the model's own heads, of one layer, or of one head, on a page, with what they follow most."""
    from pipelines.drawing import PAGE_WIDTH, attention_grid

    own = [one for one in chosen if one.kind == "self"]
    maps = {(one.layer, one.head): looked.map(one.layer, one.head) for one in own}
    if layer is None:
        layers = sorted({number for number, _ in maps})
        rows = {f"layer {n}": {f"head {h}": each for (at, h), each in maps.items() if at == n} for n in layers}
        title = f"Attention of {name}"
    else:
        heads = [(f"head {number}" if head is None else "", each) for (_, number), each in maps.items()]
        starts = range(0, len(heads), MOST_BESIDE)
        rows = {" " * n: dict(heads[start : start + MOST_BESIDE]) for n, start in enumerate(starts)}
        title = f"Attention of {name}: layer {layer}" + ("" if head is None else f", head {head}")
    # the mark lets the caption run from left to right, whatever the text is written in
    caption = f"\u200e“{textwrap.shorten(text, 300, placeholder=' …')}” {_followed(own, sinks)}"
    return attention_grid(rows, looked.labels, title=title, caption=caption, width=PAGE_WIDTH, kind=kind)


def _followed(heads: Sequence[HeadOnText], sinks: bool) -> str:
    """The patterns that a head follows most; of many heads, which of them spends most on each pattern."""
    from guidance.probes.discovery import SINKS

    highest: dict[str, tuple[float, float, str]] = {}
    for one in heads:
        for pattern, share, lift in one.closest:
            if sinks or pattern not in SINKS:
                highest[pattern] = max(highest.get(pattern, (0.0, 0.0, "")), (lift, share, f"{one.layer}-{one.head}"))
    first = sorted(highest.items(), key=lambda item: -item[1][0])[:MOST_PATTERNS]
    if len(heads) == 1:
        return "On " + ", ".join(f"{pattern} {100 * share:.0f}\u00a0%" for pattern, (_, share, _) in first)
    return "Most on " + ", ".join(
        f"{pattern}: {name} ({100 * share:.0f}\u00a0%)" for pattern, (_, share, name) in first
    )


def _page(name: str, folder: Path, text: str, device: str, parser: str, store: Store) -> bytes:
    """The page of `guide discover` on this text alone.

    Args:
        name: of the model, for people.
        store: has the idf or the counts that a plan with words learned with, and takes the masks of the text for it; of other models
            nothing is kept.
    """
    import tempfile
    from contextlib import closing

    from guidance.checkpoint import find_plan
    from guidance.plan import Plan
    from pipelines.explorer.export import one_file
    from pipelines.explorer.workspace import Workspace
    from pipelines.progress import warnings_only
    from pipelines.stages import discover_score
    from pipelines.storage.store import Store
    from pipelines.training.plan_inputs import features

    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "text.txt"
        source.write_text(" ".join(text.split()), encoding="utf-8")  # on one line, so that it is one example
        config = discover_score.Config(device=device, sequence_length=512, parser=parser)
        plan = find_plan(folder) or Plan()
        if not ({*features(plan, training=False)} - {"segment"} or plan.tables(training=False)):
            store = Store(Path(scratch) / "artifacts")
        with (
            warnings_only(),
            closing(Workspace({name: str(folder)}, str(source), config, store, title="one text")) as workspace,
        ):
            workspace.finish()
            return one_file(workspace, 1)
