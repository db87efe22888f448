"""``guide discover``: find patterns in heads, and turn them into plans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from cli.options import Session, command, stage_command
from cli.output import check_output_path, escape, say, say_json, tell
from cli.tables import folded
from guidance.errors import InputError
from pipelines.engine.stage import Result, check_working_folder
from pipelines.probing.sequences import SequencesConfig
from pipelines.stages import discover_accept, discover_score

SHOWN_HEADS = 6

Model = Annotated[str, typer.Argument(help="A model: a name, name@n, an id, or a folder.", show_default=False)]
Data = Annotated[
    str,
    typer.Argument(
        help="Sequences of its tokenizer, a dataset or a corpus, or a text file.", show_default=False, metavar="DATA"
    ),
]


class PageConfig(SequencesConfig):
    """What the page reads."""

    patterns: list[str] = Field(
        [], description="a pattern (repeatable) to begin with; by default all that the data have the features for"
    )


@stage_command(
    "discover score",
    discover_score.Config,
    examples=[
        "guide discover score segmenter topics",
        "guide discover score segmenter topics --masks topics-masks --deviations 2",
        "guide discover score ./bert-base text.txt --patterns 'matching_token and not self' --patterns previous",
    ],
    next_command="guide discover accept {}",
)
def discover_score_command(session: Session, config: discover_score.Config, model: Model, data: Data) -> Result:
    """Score every head: its importance, and how much it looks at each pattern; and propose a plan.

    A pattern is a candidate if some head looks at it far more than the mean of all heads, on every other example, and again on
    the rest.  The plan that is proposed injects the best candidates; those where heads rest, such as the first token, and those
    that a better one covers are left out.
    """
    from guidance.probes.discovery import SINKS

    result = discover_score.run(model, data, config, **session.options())
    counts = result.artifact.counts
    rows = []
    for each in counts["candidates"]:
        names = [f"{layer}-{head}" for layer, head in each["heads"]]
        shown = ", ".join(names[:SHOWN_HEADS]) + (" …" if len(names) > SHOWN_HEADS else "")
        if each["pattern"] in counts["proposed"]:
            note = "proposed"
        elif each["pattern"] in SINKS:
            note = "not proposed: heads rest there"
        elif each["covered_by"]:
            note = f"not proposed: {each['covered_by']} has the same heads"
        else:
            note = f"not proposed: --most {config.most}"
        important = "–" if each["important"] is None else str(each["important"])
        relevance = f"{100 * each['relevance']:.1f} %"
        rows.append(
            (each["pattern"], shown, relevance, f"{each['lift']:.1f}", f"{each['deviations']:.1f}", important, note)
        )
    for line in folded(("pattern", "heads", "relevance", "× chance", "deviations", "important", ""), rows, None):
        session.tell(escape(line))
    if not rows:
        session.tell(
            f"no head stands out on a pattern by {config.deviations:g} standard deviations"
            + (": of ten heads or fewer none can by three" if counts["heads"] <= 10 else "")
        )
    return result


@stage_command(
    "discover accept",
    discover_accept.Config,
    examples=[
        "guide discover accept discovery/58a1 --to plan.toml",
        "guide discover accept discovery/58a1 --patterns matching_token --into found",
        "guide discover accept discovery/58a1 --heads 0-3=previous --heads 2-1='distance == 2'",
    ],
)
def discover_accept_command(
    session: Session,
    config: discover_accept.Config,
    discovery: Annotated[str, typer.Argument(help="What `guide discover score` wrote.", show_default=False)],
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Also write the plan to this file.")] = None,
) -> Result:
    """Turn what was found into a plan, which `finetune` and `pretrain` take."""
    from pipelines.explorer.accepting import command_for
    from pipelines.storage.files import write_file

    if to is not None:
        check_output_path(to, "--to", ".toml")
    result = discover_accept.run(discovery, config, **session.options())
    with result.artifact.open(discover_score.PLAN) as file:
        plan = file.read()
    if to is not None:
        write_file(to, plan)
    for line in plan.decode().splitlines():
        session.tell(escape(line))
    command = command_for(result.artifact, session.store, to)
    session.tell(escape(f"next: {command}{session.store_flag}"))
    return result


@command(
    "discover serve",
    config=PageConfig,
    examples=[
        "guide discover serve segmenter topics",
        "guide discover serve segmenter topics --beside guided-segmenter --port 8080",
        "guide discover serve ./bert-base text.txt --open",
    ],
)
def serve_command(
    session: Session,
    config: PageConfig,
    model: Model,
    data: Data,
    beside: Annotated[str | None, typer.Option(help="A second model, to compare head by head.")] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address of this machine to listen on; with the default, only this machine can open the page."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes the first free one from 8765.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show all heads on a local page, on which patterns are found, tried and accepted.

    The address, with a token, is the only line on stdout.  Ctrl-C ends it, with exit code 130.  Nothing leaves this machine.
    """
    from pipelines.explorer.server import serving

    with _workspace(session, config, model, data, beside, is_writable=True) as workspace:
        with serving(workspace, host, port) as (address, serve):
            if host not in ("127.0.0.1", "::1", "localhost"):
                tell("warning: others on the network can reach this page; it asks them for the token")
            if session.json:
                say_json({"schema": 1, "address": address})
            else:
                say(address)
            workspace.start()
            if open_:
                import webbrowser

                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
            serve()


@command(
    "discover export",
    config=PageConfig,
    examples=[
        "guide discover export segmenter topics --to heads.html",
        "guide discover export ./bert-base text.txt --to heads.html --examples 1",
    ],
)
def export_command(
    session: Session,
    config: PageConfig,
    model: Model,
    data: Data,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The HTML file.", show_default=False)],
    beside: Annotated[str | None, typer.Option(help="A second model, to compare head by head.")] = None,
    examples: Annotated[
        int, typer.Option(min=1, max=100, help="How many examples to save, with the maps of all heads.")
    ] = 3,
) -> None:
    """Save the page to one HTML file, which opens without a server and without a network."""
    from pipelines.explorer.export import one_file
    from pipelines.storage.files import write_file

    check_output_path(to, "--to", ".html")
    with _workspace(session, config, model, data, beside, is_writable=False) as workspace:
        workspace.start()
        workspace.wait(session.progress)
        page = one_file(workspace, examples)
    write_file(to, page)
    if session.json:
        say_json({"schema": 1, "path": str(to), "bytes": len(page)})
    else:
        say(escape(to))


@contextlib.contextmanager
def _workspace(
    session: Session, config: PageConfig, model: str, data: str, beside: str | None, *, is_writable: bool
) -> Iterator[Any]:
    from pipelines.explorer.workspace import Workspace
    from pipelines.probing.patterns import read_written

    check_working_folder()
    for name in config.patterns:
        read_written(name)
    if beside == model:
        raise InputError("--beside names the same model")
    names = [model, *([beside] if beside else [])]
    for name in names:
        _check_exists(name, session.store)
    if not Path(data).is_file():
        session.store.find(data)
    settings = discover_score.Config(**config.model_dump())
    workspace = Workspace({name: name for name in names}, data, settings, session.store, can_accept=is_writable)
    try:
        yield workspace
    finally:
        workspace.close()


def _check_exists(model: str, store: Any) -> None:
    """Raises InputError for a model that is not there, without the imports that open one and keep the page waiting."""
    if not (Path(model) / "config.json").is_file():
        with store.load(model, kind="model", verify=False):
            pass
