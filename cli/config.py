"""``guide.toml``: one table per command, with the names of flags as keys; ``store`` comes before the tables.

store = "/data/guide"

[build-sequences]
max-length = 128
"""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cli.usual_names import intended, usual
from guidance.errors import InputError, UnknownName

DEFAULT_FILE = Path("guide.toml")
SIZE_LIMIT = 1 << 20


def settings_for(path: Path | None, group: Any, names: Iterable[str]) -> dict[str, Any]:
    """The settings of one command, by parameter name; the whole file is checked.

    Args:
        path: the file that the user named, or None for ``./guide.toml`` if it exists.
        group: the root of the command tree.
        names: the words of the command: ``("plan", "check")``.

    Raises:
        InputError: the file cannot be read, or has an unknown table or key.
    """
    if path is None:
        if not os.path.lexists(DEFAULT_FILE):
            return {}
        path = DEFAULT_FILE
    table = read_toml(path)
    top = {key: value for key, value in table.items() if not isinstance(value, dict)}
    for key in top:
        if key != "store":
            raise _unknown(path, "setting", key, ["store", *group.commands])
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    _check(path, group, tables)
    command = group
    for name in names:
        tables, command = tables.get(name, {}), command.commands[name]
    fields = {_parameter(flag): field for field, flag in getattr(command, "renamed", {}).items()}
    found = {_parameter(key): value for key, value in tables.items()}
    return top | {fields.get(name, name): value for name, value in found.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a small TOML file.

    Raises:
        InputError: the file cannot be read, is too large, or is not TOML.
    """
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
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{str(path)!r}: not TOML ({error})") from error
    except RecursionError as error:
        raise InputError(f"{str(path)!r}: nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{str(path)!r}: {error}") from error


def misspelt(variables: Iterable[str], group: Any) -> list[tuple[str, str]]:
    """Environment variables that no command reads but that resemble one, each with the likely intended name."""
    found = []
    if ours := sorted(name for name in variables if name.startswith("GUIDE_")):
        known = {"GUIDE_DEBUG", *_variables(group)}
        flags = {_flag(name.removeprefix("GUIDE_")): name for name in known}
        for name in ours:
            meant = usual(_flag(name.removeprefix("GUIDE_")), flags)
            similar = [flags[meant]] if meant else difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            found += [(name, right) for right in similar if name not in known]
    return found


def _flag(name: str) -> str:
    return "--" + name.lower().replace("_", "-")


def _variables(command: Any) -> Iterator[str]:
    for parameter in command.params:
        names = getattr(parameter, "envvar", None) or ()
        yield from (names,) if isinstance(names, str) else names
    for inner in getattr(command, "commands", {}).values():
        yield from _variables(inner)


def _check(path: Path, group: Any, tables: dict[str, Any]) -> None:
    for name, table in tables.items():
        command = group.commands.get(name)
        if command is None:
            raise _unknown(path, "table", name, group.commands)
        if not isinstance(table, dict):
            raise _unknown(path, "setting", name, group.commands)
        if hasattr(command, "commands"):
            _check(path, command, table)
            continue
        other = getattr(command, "renamed", {})
        on_or_off = [p.name for p in command.params if getattr(p, "is_flag", False)]
        switches = {other.get(flag, flag).replace("_", "-") for flag in on_or_off}
        known = [p.name.replace("_", "-") for p in command.params if p.name in getattr(command, "settings", ())]
        known += getattr(command, "renamed", {}).values()
        for key in table:
            if key.replace("_", "-") not in known:
                raise _unknown(path, f"setting of {name}", key, known)
            if key.replace("_", "-") not in switches and _has_bool(table[key]):
                raise InputError(f"{str(path)!r}, [{name}] {key}: true and false are for flags that are on or off")


def _has_bool(value: Any) -> bool:
    return any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value]))


def _unknown(path: Path, what: str, name: str, known: Iterable[str]) -> InputError:
    error = UnknownName(what, name, known)
    meant = intended(_flag(name), map(_flag, known))
    message = f"unknown {what} {name!r}; did you mean {meant[2:]!r}?" if meant else error.message
    return InputError(f"{str(path)!r}: {message}", hint=error.hint)


def _parameter(key: str) -> str:
    return key.replace("-", "_")
