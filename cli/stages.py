"""One command for each stage, made from what the stage declares."""

from __future__ import annotations

import inspect
import sys
from pkgutil import resolve_name
from typing import Any

import typer

from cli import completion
from cli.app import parameter
from cli.options import Session, stage_command
from cli.tables import folded
from pipelines.engine.declaration import Stage, Take
from pipelines.engine.stage import Result
from pipelines.stages import STAGES


def register(stage: Stage[Any, Any]) -> None:
    """Make the command of a stage: its inputs are arguments and flags, its settings flags."""
    about = stage.command
    assert about is not None, f"{stage.name} has no command"

    def run(session: Session, config: Any, **references: Any) -> Result | None:
        inputs = {role: references[take.argument or role] for role, take in stage.takes.items()}
        options = {name: references[name] for name in stage.options} | session.options()
        result: Result | None = stage.run(config, stdin=sys.stdin.buffer, **inputs, **options)
        if result is not None and not session.dry_run:
            table = about.show(result.artifact, config)
            for line in (*folded(table.titles, table.rows, None), *table.notes):
                session.tell(line)
        return result

    run.__doc__ = about.help
    own = [_input(take.argument or role, take) for role, take in stage.takes.items()]
    for name, option in stage.options.items():
        info = typer.Option(help=option.help, autocompletion=completion.SETTINGS.get(name))
        own.append(parameter(name, list[str] | None if option.many else str | None, info, None))
    topics = {title: tuple(names) for title, names in about.topics.items()}
    stage_command(
        about.name,
        stage.config,
        kind=stage.kind,
        examples=about.examples,
        group=about.group,
        next_command=about.next,
        topics=topics,
        own=own,
    )(run)


def _input(name: str, take: Take) -> inspect.Parameter:
    """The argument or flag of one input."""
    kind: Any = list[str] if take.many else str
    offered = completion.artifacts(*take.kinds) if take.kinds else None
    info: Any = typer.Argument(help=take.help, autocompletion=offered)
    if take.option:
        info = typer.Option(*([f"--{take.flag}"] if take.flag else []), help=take.help, autocompletion=offered)
    return parameter(name, kind | None, info, None) if take.optional else parameter(name, kind, info)


for path in STAGES:
    register(resolve_name(path))
