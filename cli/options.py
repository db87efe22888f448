r"""Turn a function into a command and the ``Config`` of a stage into flags, for all commands.

A command file looks like this; this module adds the flags of the configuration, shared flags, output and examples:

    @stage_command("build-sequences", sequences.Config, examples=["guide build-sequences wiki bpe"])
    def build_sequences(
        session: Session,
        config: sequences.Config,
        corpus: Annotated[str, typer.Argument(help="A corpus.")],
    ) -> Result:
        \"\"\"Pack sentences into sequences of token ids.\"\"\"
        return sequences.run(corpus, config, **session.options())
"""

from __future__ import annotations

import copy
import inspect
import os
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from cli import completion
from cli.app import Page, parent_app
from cli.config import DEFAULT_FILE, misspelt, settings_for
from cli.flags import field_parameters, make_config, renamed, typer_parameter
from cli.next_commands import suggestion
from cli.origins import SETTINGS, origin_of, origins_added, source_of, store_path
from cli.output import escape, say, say_json, tell
from cli.progress import ConsoleProgress, set_up_logging
from guidance.errors import InputError
from pipelines.engine.command import Templates
from pipelines.engine.stage import Result
from pipelines.progress import Progress, log
from pipelines.storage.store import Store


@dataclass(frozen=True)
class Session:
    """The values of the shared flags: the store, the progress display, and how to print results."""

    store: Store
    progress: Progress
    name: str | None = None
    force: bool = False
    wait: bool = True
    json: bool = False
    quiet: bool = False
    store_flag: str = ""
    """`` --store FOLDER`` if that was given, for commands to paste."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of every stage's ``run``."""
        return {
            "store": self.store,
            "name": self.name,
            "force": self.force,
            "wait": self.wait,
            "progress": self.progress,
        }

    def tell(self, text: str) -> None:
        """Print a line on stderr, unless --quiet was given."""
        if not self.quiet:
            tell(text)


_SHARED = {
    "store": (
        Path | None,
        typer.Option("--store", envvar="GUIDE_STORE", help="Folder of artifacts; ./artifacts by default."),
        None,
    ),
    "config_file": (
        Path | None,
        typer.Option("--config", envvar="GUIDE_CONFIG", help="Settings file; ./guide.toml by default."),
        None,
    ),
    "json": (bool, typer.Option("--json", help="Print JSON: one object, or one for each line of input."), False),
    "quiet": (bool, typer.Option("--quiet", "-q", help="Print only warnings and errors on stderr."), False),
    "verbose": (bool, typer.Option("--verbose", "-v", help="Print more on stderr."), False),
    "debug": (bool, typer.Option("--debug", help="Show the traceback of errors."), False),
    "no_color": (bool, typer.Option("--no-color", help="Use no colours, as with NO_COLOR."), False),
}

_STAGE = {
    "name": (str | None, typer.Option("--name", help="Also give the artifact a new version of this name."), None),
    "force": (bool, typer.Option("--force", help="Build the artifact again even if it exists."), False),
    "wait": (
        bool,
        typer.Option("--wait/--no-wait", help="Wait for another run that is building the same artifact, or fail."),
        True,
    ),
}


def stage_command(
    name: str,
    config: type[BaseModel],
    *,
    examples: Sequence[str],
    group: str = "Data",
    next_command: Templates | None = None,
    topics: Mapping[str, tuple[str, ...]] | None = None,
    own: Sequence[inspect.Parameter] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that runs a stage.  It returns the `Result`, or None if another process reports it.

    Args:
        config: its fields become flags; the function gets an instance of it as ``config``.
        next_command: the command to suggest afterwards; see `cli.next_commands.Templates`.
        topics: headings for groups of options on the help page; all others are listed under "Options".
        own: the parameters of the function besides these two; by default those of its signature.
    """
    finish = _announce(next_command)
    return command(
        name, examples=examples, group=group, config=config, finish=finish, shared=_STAGE, topics=topics, own=own
    )


def command(
    name: str,
    *,
    examples: Sequence[str],
    group: str = "Help",
    config: type[BaseModel] | None = None,
    finish: Callable[[Session, Any], None] | None = None,
    shared: dict[str, Any] | None = None,
    topics: Mapping[str, tuple[str, ...]] | None = None,
    own: Sequence[inspect.Parameter] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a command and return it unchanged, so that Python code can call it.

    Its first parameter is ``session``, followed by ``config`` if a config is given; all others are Typer parameters.

    Args:
        name: one word, or two words, the first of which is in `cli.app.FAMILIES` and then determines the heading.
    """
    if not examples:
        raise ValueError(f"{name} has no examples")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        declared = _parameters(function) if own is None else list(own)
        fields = field_parameters(config) if config else []
        declared, fields = ([_with_completion(name, found) for found in group] for group in (declared, fields))
        common = [typer_parameter(key, *option) for key, option in {**(shared or {}), **_SHARED}.items()]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

        def call(context: typer.Context, **values: Any) -> None:
            with origins_added(context, values):
                _check_sizes(context, values)
                session = open_session(context, values)
                arguments = {parameter.name: values[parameter.name] for parameter in declared}
                if config:
                    chosen = {p.name: values[p.name] for p in fields if source_of(context, p.name) != "DEFAULT"}
                    arguments["config"] = make_config(config, chosen)
                result = function(session, **arguments)
            if finish:
                finish(session, result)

        parameters = [context, *declared, *fields, *common]
        if len({parameter.name for parameter in parameters}) != len(parameters):
            raise ValueError(f"{name}: two parameters have the same name")
        if unknown := {key for names in (topics or {}).values() for key in names} - {p.name for p in parameters}:
            raise ValueError(f"{name} has no option {min(unknown)}")
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {}
        settings = {p.name for p in (*declared, *fields) if not _is_argument(p)} | {"store", "quiet", "verbose", "wait"}
        parent, word, heading = parent_app(name)
        attributes = {
            "group": heading or group,
            "examples": tuple(examples),
            "shared": frozenset(parameter.name for parameter in common),
            "topics": topics or {},
            "settings": frozenset(settings & {parameter.name for parameter in parameters}),
            "renamed": renamed(config),
        }
        page = type("Page", (Page,), attributes)
        parent.command(word, cls=page, help=inspect.cleandoc(function.__doc__ or ""))(call)
        return function

    return register


# parameters


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a command's function, besides the session and the configuration."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("session", "config")
    ]


def _with_completion(command: str, parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter that the shell completes, if there is something to offer."""
    complete = completion.offer(command, parameter.name)
    annotation, *extras = typing.get_args(parameter.annotation)
    if complete is None or extras[0].autocompletion is not None:
        return parameter
    info = copy.copy(extras[0])
    info.autocompletion = complete
    return parameter.replace(annotation=Annotated[annotation, info])


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(type(extra).__name__ == "ArgumentInfo" for extra in getattr(parameter.annotation, "__metadata__", ()))


# from flags to a session


def _check_sizes(context: Any, values: Mapping[str, Any]) -> None:
    """Raises InputError for a whole number that 64 bits do not hold."""
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                raise InputError(f"{origin_of(context, name)}: the number is too large", hint=f"at most {2**63 - 1}")


def load_settings(context: Any, path: Path | None) -> Path | None:
    """Make ``guide.toml`` the defaults of the command that is being parsed."""
    before = (context.parent.obj or {}) if context.parent else {}
    names: list[str] = []
    top = context
    while top.parent is not None:
        names.insert(0, top.info_name)
        top = top.parent
    context.meta[SETTINGS] = path or before.get("config") or DEFAULT_FILE
    try:
        context.default_map = settings_for(path or before.get("config"), top.command, names)
    except InputError:
        if not context.resilient_parsing:  # completion goes on without the file
            raise
    return path


_SHARED["config_file"][1].callback = load_settings
_SHARED["config_file"][1].is_eager = True


def open_session(context: Any, values: dict[str, Any]) -> Session:
    """The session of one command, from shared flags after the command or else before it."""
    before = (context.parent.obj or {}) if context.parent else {}

    def shared(key: str) -> Any:
        value = values.get(key)
        return before[key] if before.get(key) and source_of(context, key) != "COMMANDLINE" else value

    is_named = "store" in before or source_of(context, "store") == "COMMANDLINE"

    quiet = bool(shared("quiet"))
    set_up_logging(quiet=quiet, verbose=bool(shared("verbose")))
    for wrong, right in misspelt(os.environ, context.find_root().command):
        log.warning("%s is not read; did you mean %s?", escape(wrong), right)
    return Session(
        store=Store(store_path(shared("store"))),
        progress=ConsoleProgress(quiet=quiet, color=not shared("no_color")),
        name=values.get("name") if "force" in values else None,
        force=bool(values.get("force")),
        wait=bool(values.get("wait", True)),
        json=bool(shared("json")),
        quiet=quiet,
        store_flag=f" --store {shlex.quote(os.fspath(shared('store')))}" if is_named else "",
    )


# results


def _announce(next_command: Templates | None) -> Callable[[Session, Result], None]:
    def finish(session: Session, result: Result | None) -> None:
        if result is not None:  # None: a process of torchrun other than rank 0
            announce(session, result, next_command)

    return finish


def announce(session: Session, result: Result, next_command: Templates | None = None) -> None:
    """Print the reference on stdout, for scripts, and a summary on stderr, for people."""
    artifact = result.artifact
    reference = result.name or artifact.reference
    counts = ", ".join(f"{key} {value:,}" for key, value in artifact.counts.items() if type(value) is int)
    state = "up to date" if result.reused else "done"
    session.tell(escape(f"{state}: {artifact.path}{f' ({counts})' if counts else ''}"))
    if next_command and not session.quiet:
        command = suggestion(next_command, artifact, reference, session.store)
        session.tell(escape(f"next: {command}{session.store_flag}")) if command else None
    if session.json:
        say_json(
            {
                "schema": 1,
                "artifact": artifact.reference,
                "kind": artifact.kind,
                "path": os.fspath(artifact.path),
                "content": artifact.content,
                "reused": result.reused,
                "name": result.name,
                "counts": artifact.counts,
                "warnings": [str(warning) for warning in artifact.manifest.get("warnings", [])],
            }
        )
    else:
        say(artifact.reference)
