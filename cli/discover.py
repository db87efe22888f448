"""``guide discover``: find patterns in heads, and turn them into plans."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typer import Argument, Option

from cli.arguments import Model
from cli.completion import artifacts
from cli.options import Session, command, stage_command
from cli.output import check_output_path, tell
from guidance.errors import InputError
from pipelines.engine.stage import Result, check_working_folder
from pipelines.probing.probe import SequencesConfig
from pipelines.stages import discover_accept, discover_score
from pipelines.stages.discover_score import PLAN

Data = Annotated[
    str,
    Argument(
        metavar="DATA",
        help="Sequences of its tokenizer, a dataset or a corpus, or a text file.",
        autocompletion=artifacts("sequences", "corpus"),
    ),
]
Beside = Annotated[
    str | None, Option(help="A second model, to compare head by head.", autocompletion=artifacts("model"))
]


class PageConfig(SequencesConfig):
    """What the page reads."""

    patterns: list[str] = Field(
        [], description="A pattern (repeatable) to begin with; by default all that the data have the features for."
    )


@stage_command(
    "discover accept",
    discover_accept.Config,
    kind=discover_accept.STAGE.kind,
    examples=[
        "guide discover accept discovery/58a1 --to plan.toml",
        "guide discover accept discovery/58a1 --patterns matching_token --into found",
        "guide discover accept discovery/58a1 --heads 0-3=previous --heads 2-1='distance == 2'",
    ],
)
def discover_accept_command(
    session: Session,
    config: discover_accept.Config,
    discovery: Annotated[
        str, Argument(help="Artifact of `guide discover score`.", autocompletion=artifacts("discovery"))
    ],
    to: Annotated[Path | None, Option("--to", metavar="FILE", help="File for a copy of the plan.")] = None,
) -> Result:
    """Turn what was found into a plan, which `finetune` and `pretrain` take."""
    from pipelines.explorer.accepting import command_for
    from pipelines.storage.files import write_file

    check_output_path(to, "--to", ".toml")
    result = discover_accept.run(discovery, config, **session.options())
    if session.dry_run:
        return result
    plan = result.artifact.read(PLAN)
    if to is not None:
        write_file(to, plan)
    for line in plan.decode().splitlines():
        session.tell(line)
    session.suggest(command_for(result.artifact, session.store, to))
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
    beside: Beside = None,
    host: Annotated[
        str, Option(help="Address of this machine to listen on; with the default, only this machine can open the page.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="The port; 0 takes the first free one from 8765.")] = 0,
    open_: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show all heads on a local page, on which patterns are found, tried and accepted.

    The address, with a token, is the only line on stdout.  Ctrl-C ends it, with exit code 130.  Nothing leaves this machine.
    """
    from pipelines.explorer.server import serving

    with closing(_workspace(session, config, model, data, beside, is_writable=True)) as workspace:
        with serving(workspace, host, port) as (address, serve):
            if host not in ("127.0.0.1", "::1", "localhost"):
                tell("warning: others on the network can reach this page; it asks them for the token")
            session.answer({"address": address}, [address])
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
    to: Annotated[Path, Option("--to", metavar="FILE", help="The HTML file.")],
    beside: Beside = None,
    examples: Annotated[
        int, Option(min=1, max=100, help="Number of examples to save, with the maps of all heads.")
    ] = 3,
) -> None:
    """Save the page to one HTML file, which opens without a server and without a network."""
    from pipelines.explorer.export import one_file
    from pipelines.storage.files import write_file

    check_output_path(to, "--to", ".html")
    with closing(_workspace(session, config, model, data, beside, is_writable=False)) as workspace:
        workspace.finish(session.progress)
        page = one_file(workspace, examples)
    write_file(to, page)
    session.answer({"path": str(to), "bytes": len(page)}, [to])


def _workspace(
    session: Session, config: PageConfig, model: str, data: str, beside: str | None, *, is_writable: bool
) -> Any:
    """What the page shows, to be closed in the end.  Raises InputError if there is no such pattern, model or data."""
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
    sides = {name: name for name in names}
    return Workspace(sides, data, settings, session.store, can_accept=is_writable, store_flag=session.store_flag)


def _check_exists(model: str, store: Any) -> None:
    """Raises InputError for a model that is not there, without the imports that open one and keep the page waiting."""
    if not (Path(model) / "config.json").is_file():
        with store.load(model, kind="model", verify=False):
            pass
