"""The console script ``guide``, and the only place that turns errors into exit codes.

Imports nothing heavy at the top, so that Ctrl-C during imports ends the process quietly.
"""

from __future__ import annotations

import os
import sys

try:
    from cli import signals
    from cli.output import MAX_LINES, escape, prepare_streams, reader_gone, tell
except KeyboardInterrupt:
    os._exit(130)

TYPE_CHECKING = False  # importing typing for this takes longer than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    import typer

BUG = 1

CODES = {
    "guidance.errors.InputError": 2,
    "guidance.errors.MachineError": 3,
    "guidance.errors.NumericalError": 4,
    "guidance.errors.GateFailed": 5,
    "builtins.MemoryError": 3,
    "builtins.OSError": 3,
    "torch.OutOfMemoryError": 3,
    "torch.cuda.OutOfMemoryError": 3,
    "builtins.KeyboardInterrupt": 130,
    "cli.signals.Terminated": 143,
}
"""Exit code of each class of exception and its subclasses; any other exception is a bug in guide.

Classes are given by name to avoid imports, above all of ``torch``.
"""


_OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed")

COMMANDS = (
    "stages",
    "statistics",
    "masks",
    "train",
    "compare",
    "report",
    "evaluate",
    "live",
    "glue",
    "discover",
    "attention",
    "patterns",
    "plan",
    "store",
    "tools",
)
"""Modules of this package that define commands, in the order of the help page."""


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    signals.exit_on_signals()
    prepare_streams()
    end_process(run(sys.argv[1:], handle_signals=True))


def load_app() -> typer.Typer:
    """The app with all its commands."""
    import importlib

    from cli.app import app

    for module in COMMANDS:  # importing a module registers its commands
        importlib.import_module(f"cli.{module}")
    return app


def run(argv: Sequence[str], *, handle_signals: bool = False) -> int:
    """Run one command line in this process; returns its exit code and never raises."""
    try:
        import typer.main

        command = typer.main.get_command(load_app())
        if handle_signals:
            signals.raise_on_signals()
        if os.environ.get("_GUIDE_COMPLETE"):
            if os.environ["_GUIDE_COMPLETE"] == "complete_bash":
                from cli.completion import join_words

                join_words(os.environ)
            command.main(list(argv), prog_name="guide", complete_var="_GUIDE_COMPLETE")
        with command.make_context("guide", list(argv)) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except BaseException as error:
        error = signals.cause(error)
        return report(error, as_json="--json" in argv, debug="--debug" in argv or bool(os.environ.get("GUIDE_DEBUG")))


def exit_code(error: BaseException) -> int:
    """The exit code for an exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError) and reader_gone():
        return 141
    for attribute in ("exit_code", "signal_number"):  # of Typer's exceptions, of guidance.errors.Interrupted
        value = getattr(error, attribute, None)
        if isinstance(value, int):
            return value if attribute == "exit_code" else signals.exit_code(value)
    for base in type(error).__mro__:
        code = CODES.get(f"{base.__module__}.{base.__qualname__}")
        if code is not None:
            return code
    return 3 if _is_out_of_memory(error) else BUG


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how torch says on the CPU that an array does not fit: a RuntimeError like any other."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _wanted(error: BaseException) -> str:
    """How much memory was asked for, as far as torch says."""
    words = str(error).splitlines()[0].partition("you tried to allocate ")[2].split()
    return f"{int(words[0]):,} bytes were asked for" if words and words[0].isdigit() else "an array is too large"


def report(error: BaseException, *, as_json: bool = False, debug: bool = False) -> int:
    """Print on stderr what failed and what to do next; returns the exit code."""
    code = exit_code(error)
    if isinstance(error, SystemExit) or code == 141 or (type(error).__name__ == "Exit" and hasattr(error, "exit_code")):
        return code
    if code == BUG or debug:
        _show_traceback(error)
    message, hint = describe(error, code)
    if code != BUG:
        message = _with_short_words(message)
    if as_json:
        import json

        tell(json.dumps({"code": code, "message": message, "hint": hint}))
    else:
        lines = [f"guide: {escape(message)}", *(f"  {escape(line)}" for line in (hint or "").splitlines())]
        for line in lines[: MAX_LINES - 1]:
            tell(line)
        if len(lines) >= MAX_LINES:
            from guidance.errors import counted

            tell(f"  … and {counted(len(lines) - MAX_LINES + 1, 'more line')}; --json shows all")
    return code


def describe(error: BaseException, code: int) -> tuple[str, str | None]:
    """The message and the hint for an exception."""
    if hasattr(error, "format_message"):
        return _describe_usage(error)
    if hasattr(error, "message") and hasattr(error, "hint"):
        return str(error.message), error.hint
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None
    if isinstance(error, signals.Terminated):
        return "terminated", None
    if isinstance(error, OSError):
        prefix = f"{error.filename!r}: " if error.filename is not None else ""
        return f"{prefix}{error.strerror or error}", None
    if isinstance(error, MemoryError):
        return f"not enough memory{f': {error}' if str(error) else ''}", None
    if _is_out_of_memory(error):
        return f"not enough memory: {_wanted(error)}", "use a smaller model, shorter sequences or a smaller batch"
    if code == BUG:
        kind = type(error).__name__
        registry = sys.modules.get("guidance.registry")
        if registry and (package := registry.failing_package(error)):
            what = f"the package {package!r}, which adds to guide, fails: {kind}: {error}"
            return what, "mend that package; the lines above show where"
        return f"a bug in guide: {kind}: {error}", "please report it, with the lines above and the command you ran"
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first, "use a smaller batch to need less memory" if code == 3 else None


def _with_short_words(message: str) -> str:
    """A message in which words that people cannot read, such as numbers of thousands of digits, are cut; no name of a file is."""
    import re

    return re.sub(r"""([^\s/'",;]{100})[^\s/'",;]{200,}""", r"\1…", message)


def _describe_usage(error: Any) -> tuple[str, str]:
    """The message and the hint for a usage error found by Typer; of a bad value, where it was given and what is right."""
    import re

    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    path = context.command_path if context else "guide"
    lines = [f"`{path} --help` shows how to use it"]
    if type(error).__name__ == "NoArgsIsHelpError":
        return "no command given", lines[0]
    message = str(error.format_message()).replace("Value error, ", "")
    if extra := re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message, re.DOTALL):
        message = f"unexpected argument '{extra[1]}'"
        if context is not None and any("--text" in each.opts for each in context.command.params):
            lines.insert(0, "a text goes after --text, or into standard input")
    if context is not None and parameter is not None:
        from cli.settings import origin_of

        if error.message:
            said = str(error.message).removeprefix("Value error, ").partition(", unable to parse")[0].rstrip(".")
            refused = error.__cause__.errors()[0]["input"] if hasattr(error.__cause__, "errors") else None
            name, is_choice, choices = said.partition(" is not one of ")
            if is_choice:  # the value is named already
                from guidance.errors import did_you_mean

                said += did_you_mean(name.strip("'").lower(), [choice.strip("'") for choice in choices.split(", ")])
            elif refused is not None:
                said += f", not {refused!r}"
            message = f"{origin_of(context, parameter.name)}: {said[:1].lower()}{said[1:]}"
        if record := parameter.get_help_record(context):
            lines.insert(0, ": ".join(" ".join(text.split()) for text in record))
    return message, "\n".join(lines)


def _show_traceback(error: BaseException) -> None:
    import traceback

    for line in "".join(traceback.format_exception(error)).splitlines():
        tell(escape(line))


def end_process(code: int) -> NoReturn:
    """End the process with ``os._exit``, so that native threads that abort at exit cannot change the code."""
    if "multiprocessing" in sys.modules:
        import multiprocessing

        for child in multiprocessing.active_children():
            child.terminate()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            if stream is sys.stdout and code == 0:
                code = 141 if reader_gone() else 3
    os._exit(code)
