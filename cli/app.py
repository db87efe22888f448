"""The Typer app: groups of commands, help pages, and the options that may come before a command."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cli.output import say, tell
from cli.settings import load_settings, source_of
from cli.usual_names import intended, is_argument
from pipelines.engine.stage import version_of

EXAMPLES = ("guide build-corpus text/*.txt --name wiki", "guide ls", "guide lineage wiki")
"""The examples of `guide --help`."""

GROUPS = ("Start", "Data", "Train", "Understand", "Store", "Help")
"""Headings of `guide --help`, in order."""

FAMILIES = {
    "patterns": ("Understand", "List patterns, and draw them on a text."),
    "plan": ("Understand", "Show, check, compare and start plans."),
    "cooccur": ("Understand", "Show what a word co-occurs with, and export the table for other tools."),
    "probe": ("Understand", "Measure what heads look at, and what a model has learned."),
    "discover": ("Understand", "Find patterns in heads, on a page or by score, and make plans of them."),
    "masks": ("Understand", "Draw the role masks of a sequence, and export masks for other tools."),
}
"""First words of two-word commands such as ``guide plan check``, with their heading and summary in `guide --help`."""


class Page(TyperCommand):
    """A command whose help page ends with examples.

    Attributes:
        group: heading under which `guide --help` lists it.
        examples: command lines, without the prompt.
        shared: names of the options that all commands have.
        settings: names of the options that may stand in ``guide.toml``.
        topics: headings for some of the options, in order, each with their names in order; an option stands under the first
            heading that has it.
    """

    group = "Help"
    examples: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    topics: Mapping[str, tuple[str, ...]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as raised:
            error: Any = raised
            if hasattr(error, "possibilities"):  # Typer does not export the class of errors about unknown options
                options = (option for param in self.params for option in param.opts if option.startswith("--"))
                arguments = [param.name for param in self.params if param.param_type_name == "argument"]
                if is_argument(error.option_name, arguments):
                    usage = " ".join([ctx.command_path, *(f"{{{name}}}" for name in arguments)])
                    near = f"; it is an argument: {usage}"
                else:
                    meant = intended(error.option_name, options)
                    near = f"; did you mean {meant}?" if meant else ""
                error.message = f"no such option: {error.option_name}{near}"
                error.possibilities = ()
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        titles = ("Arguments", *self.topics, "Options", "Shared options")
        records: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        order = [name for names in self.topics.values() for name in names]
        for param in sorted(self.get_params(ctx), key=lambda p: order.index(p.name) if p.name in order else len(order)):
            shown = copy.copy(param)
            flags = [option for option in param.opts if option.startswith("--")]
            shown.opts = [
                option for option in param.opts if option not in flags[1:]
            ]  # without names that it had before
            if record := shown.get_help_record(ctx):
                is_shared = param.name in self.shared or param.name == "help"
                topics = (title for title, names in self.topics.items() if param.name in names)
                title = next(topics, "Shared options" if is_shared else "Options")
                records["Arguments" if param.param_type_name == "argument" else title].append(record)
        for title, rows in records.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(formatter, self.examples)


class Group(TyperGroup):
    """A group of commands: all of ``guide``, listed under headings, or a family, whose commands share a first word.  `guide --help`
    lists a family under the heading ``group``."""

    group = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.group and not args and not ctx.resilient_parsing:
            tell(ctx.get_help())
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        for name, command in self.commands.items():
            if not command.hidden:
                title = "Commands" if self.group else getattr(command, "group", "Help")
                headings.setdefault(title, []).append((name, first_sentence(command.help)))
        for title, rows in headings.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        of_family = tuple(page.examples[0] for page in self.commands.values() if isinstance(page, Page))
        write_examples(formatter, of_family if self.group else EXAMPLES)


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring, or its first paragraph if that is shorter, as one line."""
    paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)])\.\s", paragraph, maxsplit=1)[0].removesuffix(".")


def write_examples(formatter: Any, examples: tuple[str, ...]) -> None:
    """Write the last section of a help page: one line per example, not wrapped."""
    if examples:
        formatter.write_paragraph()
        formatter.write("Examples:\n")
        for example in examples:
            formatter.write(f"  $ {example}\n")


_APP_OPTIONS: dict[str, Any] = {
    "rich_markup_mode": None,
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(name="guide", cls=Group, **_APP_OPTIONS)

_families: dict[str, typer.Typer] = {}


def parent_app(name: str) -> tuple[typer.Typer, str, str]:
    """The app in which to register a command, its name there, and the heading of its family.

    ``build-corpus`` belongs to the main app, ``plan check`` to the app of its family, which is created on first use.
    """
    first, _, last = name.rpartition(" ")
    if not first:
        return app, name, ""
    heading, summary = FAMILIES[first]
    if first not in _families:
        page = type("Family", (Group,), {"group": heading})
        _families[first] = typer.Typer(cls=page, callback=root, help=summary, **_APP_OPTIONS)
        app.add_typer(_families[first], name=first)
    return _families[first], last, heading


def _show_version(asked: bool) -> None:
    if asked:
        say(f"guide {version_of('attention-guide') or '(not installed)'}")
        raise typer.Exit()


SHARED: dict[str, tuple[Any, Any, Any]] = {
    "store": (
        Path | None,
        typer.Option("--store", envvar="GUIDE_STORE", help="Folder of artifacts; ./artifacts by default."),
        None,
    ),
    "config_file": (
        Path | None,
        typer.Option(
            "--config",
            envvar="GUIDE_CONFIG",
            callback=load_settings,
            is_eager=True,
            help="Settings file; ./guide.toml by default.",
        ),
        None,
    ),
    "json": (bool, typer.Option("--json", help="Print JSON: one object, or one for each line of input."), False),
    "quiet": (bool, typer.Option("--quiet", "-q", help="Print only warnings and errors on stderr."), False),
    "verbose": (bool, typer.Option("--verbose", "-v", help="Print more on stderr."), False),
    "debug": (bool, typer.Option("--debug", help="Show the traceback of errors."), False),
    "no_color": (bool, typer.Option("--no-color", help="Use no colours, as with NO_COLOR."), False),
}
"""The options of all commands: type, option and default.  They may stand before the command, too."""

_VERSION = typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")


def parameter(name: str, annotation: Any, option: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A keyword parameter, annotated for Typer."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=Annotated[annotation, option], default=default)


def root(context: typer.Context, **values: Any) -> None:
    """Guide attention heads: patterns, losses, masks and statistics for transformers.

    Each build or training command writes one artifact and prints its reference, an input for the next command.  A
    setting is taken from its flag, or else from GUIDE_<SETTING> in the environment, from guide.toml, or from its
    default.
    """
    typed = {name: value for name, value in values.items() if source_of(context, name) == "COMMANDLINE"}
    context.obj = (context.obj or {}) | typed


root.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(parameter(name, *facts) for name, facts in SHARED.items()),
        parameter("version", bool, _VERSION, False),
    ]
)
root.__annotations__ = {}
app.callback()(root)
