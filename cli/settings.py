"""Where settings come from: flags, variables of the environment, or ``guide.toml``, with one table per command.

store = "/data/guide"

[build-sequences]
max-length = 128
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cli.usual_names import intended, usual
from guidance.errors import InputError, UnknownName

DEFAULT_FILE = Path("guide.toml")
DEFAULT_STORE = Path("artifacts")
SIZE_LIMIT = 1 << 20

SETTINGS = "guide.settings"
"""Where a context keeps the path of the settings file."""


# the file


def load_settings(context: Any, path: Path | None) -> Path | None:
    """Make ``guide.toml``, or the file that the user named, the defaults of the command that is being parsed.  Raises
    InputError if the file cannot be read, or has an unknown table or key."""
    if not hasattr(context.command, "settings"):  # a group, before the command is known
        return path
    names: list[str] = []
    top = context
    while top.parent is not None:
        names.insert(0, top.info_name)
        top = top.parent
    file = path or (context.parent.obj or {}).get("config_file") or DEFAULT_FILE
    context.meta[SETTINGS] = file
    if file is not DEFAULT_FILE or os.path.lexists(file):
        try:
            context.default_map = _settings_of(names, read_toml(file), top.command, file)
        except InputError:
            if not context.resilient_parsing:  # completion goes on without the file
                raise
    return path


def _settings_of(names: Iterable[str], table: dict[str, Any], command: Any, path: Path) -> dict[str, Any]:
    """The settings of one command, by parameter name; the whole table is checked."""
    top = {key: value for key, value in table.items() if not isinstance(value, dict)}
    for key in top:
        if key != "store":
            raise _unknown(path, "setting", key, ["store", *command.commands])
    table = {key: value for key, value in table.items() if key not in top}
    _check(path, command, table)
    for name in names:
        table, command = table.get(name, {}), command.commands[name]
    parameters = _parameters(command)
    return top | {parameters[_key(key)].name: value for key, value in table.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a small TOML file.  Raises InputError if the file cannot be read, is too large, or is not TOML."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InputError(f"{str(path)!r}: not a plain file")
            data = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise InputError(f"{str(path)!r}: cannot be read ({os.strerror(error.errno or 0)})") from error
    if len(data) > SIZE_LIMIT:
        raise InputError(f"{str(path)!r}: larger than {SIZE_LIMIT >> 20} MB")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{str(path)!r}: not TOML ({error})") from error
    except RecursionError as error:
        raise InputError(f"{str(path)!r}: nested too deeply") from error
    except ValueError as error:  # of Python, which reads no number of thousands of digits
        raise InputError(f"{str(path)!r}: a number has too many digits") from error


def _key(name: str) -> str:
    return name.lower().replace("_", "-")


def _parameters(command: Any) -> dict[str, Any]:
    """The parameters of a command that the file may set, by their names and their flags."""
    settings = [parameter for parameter in command.params if parameter.name in getattr(command, "settings", ())]
    names = {_key(parameter.name): parameter for parameter in settings}
    return names | {option[2:]: p for p in settings for option in p.opts if option.startswith("--")}


def _check(path: Path, group: Any, tables: dict[str, Any]) -> None:
    for name, table in tables.items():
        command = group.commands.get(name)
        if command is None or not isinstance(table, dict):
            raise _unknown(path, "setting" if command else "table", name, group.commands)
        if hasattr(command, "commands"):
            _check(path, command, table)
            continue
        parameters = _parameters(command)
        for key, value in table.items():
            parameter = parameters.get(_key(key))
            if parameter is None:
                raise _unknown(path, f"setting of {name}", key, parameters)
            if parameter.multiple and not isinstance(value, list):
                raise InputError(
                    f"{str(path)!r}, [{name}] {key}: not a list, and the flag is repeatable",
                    hint=f"{key} = [{json.dumps(value)}]" if isinstance(value, str | int | float) else None,
                )
            values = value if isinstance(value, list) else [value]
            if any(isinstance(each, bool) for each in values) and not getattr(parameter, "is_flag", False):
                raise InputError(f"{str(path)!r}, [{name}] {key}: true and false are for flags that are on or off")


def _unknown(path: Path, what: str, name: str, known: Iterable[str]) -> InputError:
    error = UnknownName(what, name, known)
    meant = intended(f"--{_key(name)}", [f"--{_key(each)}" for each in known])
    message = f"unknown {what} {name!r}; did you mean {meant[2:]!r}?" if meant else error.message
    return InputError(f"{str(path)!r}: {message}", hint=error.hint)


# the environment


def misspelt(variables: Iterable[str], group: Any) -> list[tuple[str, str]]:
    """Environment variables that no command reads but that resemble one, each with the likely intended name."""
    pairs = []
    if ours := sorted(name for name in variables if name.startswith("GUIDE_")):
        known = {"GUIDE_DEBUG", *_variables(group)}
        flags = {f"--{_key(name.removeprefix('GUIDE_'))}": name for name in known}
        for name in ours:
            meant = usual(f"--{_key(name.removeprefix('GUIDE_'))}", flags)
            similar = [flags[meant]] if meant else difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            pairs += [(name, right) for right in similar if name not in known]
    return pairs


def _variables(command: Any) -> Iterator[str]:
    """The variables that a command, or one of a group, reads."""
    for parameter in command.params:
        names = getattr(parameter, "envvar", None) or ()
        yield from (names,) if isinstance(names, str) else names
    for inner in getattr(command, "commands", {}).values():
        yield from _variables(inner)


# where a value was given


def source_of(context: Any, name: str) -> str:
    """Where a value comes from: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP or DEFAULT."""
    source = context.get_parameter_source(name)
    return source.name if source is not None else "DEFAULT"


def origin_of(context: Any, name: str) -> str:
    """Where the user gave a value: ``--steps``, ``GUIDE_STEPS`` or ``'guide.toml', [pretrain] steps``."""
    parameter, source = _parameter(context, name), source_of(context, name)
    flag = _flag(parameter)
    if source == "ENVIRONMENT":
        variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
        return next((variable for variable in variables if os.environ.get(variable)), flag)
    if source == "DEFAULT_MAP":
        table = "" if name == "store" else f"[{'.'.join(context.command_path.split()[1:])}] "
        return f"{str(context.meta.get(SETTINGS, DEFAULT_FILE))!r}, {table}{flag.removeprefix('--')}"
    return flag


def _parameter(context: Any, name: str) -> Any:
    return next(parameter for parameter in context.command.params if parameter.name == name)


def _flag(parameter: Any) -> str:
    """The flag of a parameter with its dashes; the placeholder of an argument."""
    return str(parameter.human_readable_name if parameter.param_type_name == "argument" else parameter.opts[0])


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
            flag = _flag(_parameter(context, name))
            # whole words only: a message about a file in the store is not about the store
            mentioned = [flag, str(value)] if isinstance(value, str | Path) and len(str(value)) > 1 else [flag]
            if any(re.search(rf"(?<![\w/.-]){re.escape(each)}(?![\w/-]|\.\w)", text) for each in mentioned):
                lines.append(f"{flag} was given by {origin_of(context, name)}")
        error.hint = "\n".join(lines) or None
        raise


def store_path(root: Any) -> Path:
    """The folder of the store, from what the user gave.  Raises InputError if it is not UTF-8, since files could not
    record it."""
    path = DEFAULT_STORE if root is None else Path(root)
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"--store {os.fspath(path)!r}: the path is not UTF-8", hint="choose another folder") from error
    return path
