"""Where the value of a flag was given: on the command line, by a variable of the environment, or in ``guide.toml``."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cli.config import DEFAULT_FILE
from guidance.errors import InputError

DEFAULT_STORE = Path("artifacts")

SETTINGS = "guide.settings"
"""Where a context keeps the path of the settings file."""


def source_of(context: Any, name: str) -> str:
    """Where a value comes from: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP or DEFAULT."""
    source = context.get_parameter_source(name)
    return source.name if source is not None else "DEFAULT"


def flag_of(context: Any, name: str) -> str:
    """The flag of a parameter with its dashes; the placeholder of an argument."""
    parameter = next(parameter for parameter in context.command.params if parameter.name == name)
    if parameter.param_type_name == "argument":
        return str(parameter.human_readable_name)
    renamed = getattr(context.command, "renamed", {})
    return f"--{renamed[name]}" if name in renamed else str(parameter.opts[0])


def origin_of(context: Any, name: str) -> str:
    """Where the user gave a value: ``--steps``, ``GUIDE_STEPS`` or ``'guide.toml', [pretrain] steps``."""
    flag, source = flag_of(context, name), source_of(context, name)
    if source == "ENVIRONMENT":
        parameter = next(parameter for parameter in context.command.params if parameter.name == name)
        variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
        return next((variable for variable in variables if os.environ.get(variable)), flag)
    if source == "DEFAULT_MAP":
        table = "" if name == "store" else f"[{'.'.join(context.command_path.split()[1:])}] "
        return f"{str(context.meta.get(SETTINGS, DEFAULT_FILE))!r}, {table}{flag.removeprefix('--')}"
    return flag


@contextlib.contextmanager
def origins_added(context: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Add to an `InputError` where the settings that it mentions were given, unless that was the command line."""
    try:
        yield
    except InputError as error:
        text = f"{error.message} {error.hint or ''}"
        lines = [] if error.hint is None else [error.hint]
        for name, value in values.items():
            if source_of(context, name) not in ("ENVIRONMENT", "DEFAULT_MAP"):
                continue
            flag = flag_of(context, name)
            is_value = isinstance(value, str | Path) and len(str(value)) > 1 and str(value) in text
            if is_value or re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text):
                lines.append(f"{flag} was given by {origin_of(context, name)}")
        error.hint = "\n".join(lines) or None
        raise


def store_path(root: Any) -> Path:
    """The folder of the store, from what the user gave.

    Raises:
        InputError: it is not UTF-8, so files could not record it.
    """
    path = DEFAULT_STORE if root is None else Path(root)
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"--store {os.fspath(path)!r}: the path is not UTF-8", hint="choose another folder") from error
    return path
