"""One command for each stage, made from what the stage declares."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Any

import typer

from cli.completion import artifacts
from cli.flags import typer_parameter
from cli.options import Session, stage_command
from cli.output import escape
from cli.tables import folded
from pipelines.engine.command import Table
from pipelines.engine.declaration import Stage, Take
from pipelines.engine.stage import Result
from pipelines.stages import STAGES


def register(stage: Stage[Any, Any]) -> None:
    """Make the command of a stage: its inputs are arguments and flags, its settings flags."""
    about = stage.command
    assert about is not None, f"{stage.name} has no command"

    def run(session: Session, config: Any, **references: Any) -> Result | None:
        given = {role: references[take.argument or role] for role, take in stage.takes.items()}
        given |= {name: references[name] for name in stage.options}
        result: Result | None = stage.run(config, stdin=sys.stdin.buffer, **given, **session.options())
        if result is not None:
            tell_table(session, about.show(result.artifact, config))
        return result

    run.__doc__ = about.help
    own = [parameter(take.argument or role, take) for role, take in stage.takes.items()]
    own += [
        typer_parameter(name, list[str] | None if option.many else str | None, typer.Option(help=option.help), None)
        for name, option in stage.options.items()
    ]
    topics = {title: tuple(names) for title, names in about.topics.items()}
    decorate = stage_command(
        about.name,
        stage.config,
        examples=about.examples,
        group=about.group,
        next_command=about.next,
        topics=topics,
        own=own,
    )
    decorate(run)


def tell_table(session: Session, table: Table) -> None:
    """Print the table of a result on stderr, for people."""
    for line in folded(table.titles, table.rows, None) if table.titles else ():
        session.tell(line)
    for note in table.notes:
        session.tell(escape(note))


def parameter(name: str, take: Take) -> inspect.Parameter:
    """The argument or flag of one input."""
    kind: Any = list[str] if take.many else str
    if take.optional:
        kind = kind | None
    more: dict[str, Any] = {"autocompletion": artifacts(*take.kinds)} if take.kinds else {}
    if take.option:
        info = typer.Option(*([f"--{take.flag}"] if take.flag else []), help=take.help, **more)
    else:
        info = typer.Argument(help=take.help, show_default=False, **more)
    return typer_parameter(name, kind, info, None if take.optional else inspect.Parameter.empty)


for place in STAGES:
    module, name = place.split(":")
    register(getattr(import_module(module), name))
