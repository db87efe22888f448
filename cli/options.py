r"""Turn a function into a command and the ``Config`` of a stage into flags, for all commands.

A command file looks like this; this module adds the flags of the configuration, shared flags, output and examples:

    @command("translate", config=TranslateConfig, examples=["guide translate de-en sentences.de"])
    def translate(
        session: Session,
        config: TranslateConfig,
        model: Annotated[str, typer.Argument(help="A model.")],
    ) -> None:
        \"\"\"Translate lines of text.\"\"\"
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import typer
from pydantic import BaseModel

from cli.app import SHARED, Page, parameter, parent_app
from cli.flags import field_parameters, make_config
from cli.output import escape, say, say_json, say_texts, tell
from cli.progress import ConsoleProgress, set_up_logging
from cli.settings import misspelt, origin_of, origins_added, source_of, store_path
from guidance.errors import InputError, counted
from pipelines.engine.declaration import Templates, unmade
from pipelines.engine.stage import Result
from pipelines.progress import Progress, log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import DryArtifact, DryStore, NotYet
from pipelines.storage.manifest import ID_LENGTH, ArtifactMismatch, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training.run_inputs import is_guided


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
    dry_run: bool = False
    store_flag: str = ""
    """`` --store FOLDER`` if that was given, for commands to paste."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of every stage's ``run``."""
        return {name: getattr(self, name) for name in ("store", "name", "force", "wait", "progress")}

    def answer(self, facts: Mapping[str, Any], lines: Iterable[object], *, of_texts: bool = False) -> None:
        """Print a result on stdout: its facts as one JSON object with --json, otherwise its lines.  With
        ``of_texts`` the facts quote texts, whose letters are not escaped in JSON."""
        if self.json:
            (say_texts if of_texts else say_json)({"schema": 1, **facts})
            return
        for line in lines:
            say(escape(line))

    def tell(self, text: object) -> None:
        """Print a line on stderr, unless --quiet was given."""
        if not self.quiet:
            tell(escape(text))

    def suggest(self, command: str | None) -> None:
        """Say on stderr what to do next, if that is known."""
        if command:
            self.tell(f"next: {command}{self.store_flag}")


DRY_RUN = {
    "dry_run": (
        bool,
        typer.Option(
            "--dry-run",
            help="Check settings and inputs, write nothing, and print the artifact that exists already, or else dry:KIND, which "
            "later commands take with --dry-run.",
        ),
        False,
    )
}
_STAGE = {
    "name": (str | None, typer.Option("--name", help="Name of which the artifact also becomes a new version."), None),
    "force": (bool, typer.Option("--force", help="Build the artifact again even if it exists."), False),
    "wait": (
        bool,
        typer.Option("--wait/--no-wait", help="Wait for another run that is building the same artifact, or fail."),
        True,
    ),
    **DRY_RUN,
}


def stage_command(
    name: str, config: type[BaseModel], *, kind: str = "artifact", group: str = "Data", **options: Any
) -> Any:
    """Register a function that runs a stage.  It returns the `Result`, or None if another process reports it.

    Args:
        kind: of the artifact that the stage writes, for a dry run.
        config: its fields become flags; the function gets an instance of it as ``config``.
        options: see `command`.
    """
    return command(name, config=config, group=group, shared=_STAGE, makes=kind, **options)


def command(
    name: str,
    *,
    examples: Sequence[str],
    group: str = "Help",
    config: type[BaseModel] | None = None,
    shared: Mapping[str, tuple[Any, Any, Any]] = {},
    next_command: Templates | None = None,
    topics: Mapping[str, tuple[str, ...]] = {},
    own: Sequence[inspect.Parameter] | None = None,
    makes: str = "report",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a command and return it unchanged, so that Python code can call it.

    Its first parameter is ``session``, followed by ``config`` if a config is given; all others are Typer parameters.  If it
    returns the `Result` of a stage, that is printed.

    Args:
        name: one word, or two words, the first of which is in `cli.app.FAMILIES` and then determines the heading.
        shared: further options, which the session reads.
        next_command: the command to suggest afterwards.
        topics: headings for groups of options on the help page; all others are listed under "Options".
        own: the parameters of the function besides these two; by default those of its signature.
        makes: the kind KIND for which a dry run prints ``dry:KIND``.
    """
    if not examples:
        raise ValueError(f"{name} has no examples")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        declared = _parameters(function) if own is None else list(own)
        fields = field_parameters(config) if config else []
        common = [parameter(key, *facts) for key, facts in {**shared, **SHARED}.items()]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

        def call(context: typer.Context, **values: Any) -> None:
            with origins_added(context, values):
                _check_sizes(context, values)
                dry_run = "dry_run" in shared and bool(values["dry_run"])
                session = open_session(context, values, dry_run=dry_run)
                arguments = {parameter.name: values[parameter.name] for parameter in declared}
                if config:
                    chosen = {p.name: values[p.name] for p in fields if source_of(context, p.name) != "DEFAULT"}
                    arguments["config"] = make_config(config, chosen)
                try:
                    result = function(session, **arguments)
                except NotYet:
                    result = unmade(makes, session.store, session.name)
            if isinstance(result, Result):
                (announce_dry if session.dry_run else announce)(session, result, next_command)

        parameters = [context, *declared, *fields, *common]
        if len({parameter.name for parameter in parameters}) != len(parameters):
            raise ValueError(f"{name}: two parameters have the same name")
        if unknown := {key for names in topics.values() for key in names} - {p.name for p in parameters}:
            raise ValueError(f"{name} has no option {min(unknown)}")
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {}
        arguments = {p.name for p in declared if type(p.annotation.__metadata__[0]).__name__ == "ArgumentInfo"}
        settings = {p.name for p in (*declared, *fields)} - arguments | {"store", "quiet", "verbose", "wait"}
        parent, word, heading = parent_app(name)
        attributes = {
            "group": heading or group,
            "examples": tuple(examples),
            "shared": frozenset(parameter.name for parameter in common),
            "topics": topics,
            "settings": frozenset(settings & {parameter.name for parameter in parameters}),
        }
        page = type("Page", (Page,), attributes)
        parent.command(word, cls=page, help=inspect.cleandoc(function.__doc__ or ""))(call)
        return function

    return register


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a command's function, besides the session and the configuration."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("session", "config")
    ]


# from flags to a session


def _check_sizes(context: Any, values: Mapping[str, Any]) -> None:
    """Raises InputError for a whole number that 64 bits do not hold."""
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                raise InputError(f"{origin_of(context, name)}: the number is too large", hint=f"at most {2**63 - 1}")


def open_session(context: Any, values: dict[str, Any], *, dry_run: bool = False) -> Session:
    """The session of one command, from shared flags after the command or else before it."""
    before = (context.parent.obj or {}) if context.parent else {}

    def shared(key: str) -> Any:
        return before[key] if key in before and source_of(context, key) != "COMMANDLINE" else values[key]

    quiet, store = bool(shared("quiet")), shared("store")
    is_named = "store" in before or source_of(context, "store") == "COMMANDLINE"
    no_color = shared("no_color") or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    set_up_logging(quiet=quiet, verbose=bool(shared("verbose")))
    for wrong, right in misspelt(os.environ, context.find_root().command):
        log.warning("%s is not read; did you mean %s?", escape(wrong), right)
    return Session(
        store=(DryStore if dry_run else Store)(store_path(store)),
        dry_run=dry_run,
        progress=ConsoleProgress(quiet=quiet, color=not no_color),
        name=values.get("name") if "force" in values else None,
        force=bool(values.get("force")),
        wait=bool(values.get("wait", True)),
        json=bool(shared("json")),
        quiet=quiet,
        store_flag=f" --store {shlex.quote(os.fspath(store))}" if is_named else "",
    )


def _count(name: str, value: int) -> str:
    is_size = name.endswith("_bytes")
    return f"{name.removesuffix('_bytes')} {value / 2**20:,.0f} MiB" if is_size else f"{name} {value:,}"


def announce(session: Session, result: Result, next_command: Templates | None = None) -> None:
    """Print the reference on stdout, for scripts, and a summary on stderr, for people."""
    artifact = result.artifact
    counts = ", ".join(_count(key, value) for key, value in artifact.counts.items() if type(value) is int)
    state = "up to date" if result.reused else "done"
    session.tell(f"{state}: {artifact.path}{f' ({counts})' if counts else ''}")
    if next_command and not session.quiet:
        session.suggest(suggestion(next_command, artifact, result.name or artifact.reference, session.store))
    facts = {
        "artifact": artifact.reference,
        "kind": artifact.kind,
        "path": os.fspath(artifact.path),
        "content": artifact.content,
        "reused": result.reused,
        "name": result.name,
        "counts": artifact.counts,
        "warnings": [str(warning) for warning in artifact.manifest.get("warnings", [])],
    }
    session.answer(facts, [artifact.reference])


def announce_dry(session: Session, result: Result, next_command: Templates | None = None) -> None:
    """Print the reference of an artifact that exists, or else ``dry:KIND``; and on stderr what a real run would do."""
    made, facts = result.artifact, _dry_facts(result.artifact)
    if isinstance(made, DryArtifact):
        state = f"would make: {facts['key'] or f'{made.reference}, whose id is known once its inputs exist'}"
        state += f", {counted(made.steps, 'step')}" if made.steps else ""
        state += f", about {timedelta(seconds=round(made.seconds))} (h:mm:ss)" if made.seconds else ""
    else:
        state = f"{'would make again' if session.force else 'up to date'}: {made.path}"
    session.tell(f"dry run: {state}" + (f", named {session.name}" if session.name else ""))
    session.answer(facts, [made.reference])


def _dry_facts(made: Artifact) -> dict[str, Any]:
    """What a dry run says of an artifact with --json: ``key`` is the reference that it has, or would have, if that is known, and
    ``estimate_s`` how many seconds it would take, if that is known."""
    if not isinstance(made, DryArtifact):
        return {
            "kind": made.kind,
            "exists": True,
            "artifact": made.reference,
            "key": made.reference,
            "estimate_s": None,
        }
    key = f"{made.kind}/{made.known_recipe[:ID_LENGTH]}" if made.known_recipe else None
    facts = {"kind": made.kind, "exists": False, "artifact": None, "key": key, "estimate_s": made.seconds}
    return facts | ({"steps": made.steps} if made.steps else {})


def dry_report(session: Session, references: Sequence[str], *kinds: str, is_of_one_kind: bool = False) -> None:
    """The dry run of a command that shows artifacts or unfinished runs.  It prints ``dry:report``.

    Args:
        kinds: the kinds that the command can show.
        is_of_one_kind: whether all references must be of the same kind.

    Raises:
        ArtifactMissing: a reference names nothing.
        ArtifactMismatch: it names an artifact, or a run, of another kind.
    """
    for reference in references:
        try:
            with session.store.load(reference, verify=False) as artifact:
                kind = artifact.kind
        except ArtifactMissing:
            if (folder := session.store.find_unfinished(None, reference)) is None:
                raise
            kind = folder.parent.name
        if kind not in kinds:
            raise ArtifactMismatch(f"{reference!r} is of kind {kind}; expected: {' or '.join(kinds)}")
        kinds = (kind,) if is_of_one_kind else kinds
    session.tell(f"dry run: would show {', '.join(references)}")
    session.answer(_dry_facts(DryArtifact("report")), ["dry:report"])


# what to do next


LOOKED_AT = 50
"""How many of the newest artifacts of a kind are looked at."""


def suggestion(templates: Templates, artifact: Artifact, reference: str, store: Store) -> str | None:
    """The first command line whose gaps can be filled; None if there is none.  ``reference`` is what to call the artifact."""
    lines = templates(artifact, store) if callable(templates) else templates
    for template in (lines,) if isinstance(lines, str) else lines:
        kinds = re.findall(r"\{(\w+)\}", template)
        names = {kind: _name_of(kind, artifact, store) for kind in kinds}
        if all(names.values()):
            return template.format(reference, **names)
    return None


def _name_of(kind: str, artifact: Artifact, store: Store) -> str | None:
    """How to call the input of a kind, or the newest artifact of that kind with the same origin."""
    inputs = artifact.manifest.get("inputs", {})
    if kind in inputs:
        recipe = str(inputs[kind].get("recipe", ""))
        return store.name_of(kind, recipe) if recipe and store.folder(kind, recipe).exists() else None
    origin = "sequences" if kind == "model" else "corpus"

    def source_of(manifest: Mapping[str, Any]) -> list[Any]:
        """The contents of the inputs that an artifact was made from; of a model also its stage and objective."""
        given = manifest.get("inputs", {}).items()
        contents = {role: each.get("content") for role, each in given if role.startswith(origin)}
        learned = (manifest.get("stage"), manifest.get("config", {}).get("objective")) if kind == "model" else ()
        return [contents, *learned]

    def fits(other: Artifact) -> bool:
        is_other = other.id != artifact.id and source_of(other.manifest) == source_of(artifact.manifest)
        return is_other and not (kind == "model" and is_guided(other.manifest))

    return newest(kind, store, fits) if inputs.get(origin, {}).get("content") else None


def newest(kind: str, store: Store, fits: Callable[[Artifact], bool] = lambda artifact: True) -> str | None:
    """How to call the newest artifact of a kind, among those that fit."""
    folders = [folder for folder in store.folders() if folder.parent.name == kind]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[:LOOKED_AT]:
        with contextlib.suppress(InputError), Artifact(folder) as artifact:
            if fits(artifact):
                return store.name_of(kind, artifact.recipe)
    return None
