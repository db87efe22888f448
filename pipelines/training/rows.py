"""Rows: facts about objectives and tasks, one file for each; and configurations made of the settings that rows bring along.

A row's settings mean something for this row only, or for the rows that list the same group.  The command line shows the
settings of all rows as flags; a setting of another row is refused if it was changed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from pipelines.engine.stage import Config
from pipelines.training.objective import Objective

AnyRow = TypeVar("AnyRow", bound=Objective)


def find_rows(package: str, folder: Path, attribute: str) -> dict[str, Any]:
    """The row of every module of a package, by name, in the order of the file names."""
    found: dict[str, Any] = {}
    for module in sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__"):
        row = getattr(importlib.import_module(f"{package}.{module}"), attribute)
        if row.name in found:
            raise ValueError(f"two rows of {package} are called {row.name}")
        found[row.name] = row
    return found


def fields(groups: Iterable[type[Config]]) -> dict[str, Any]:
    """The fields of groups of settings, by their names."""
    found: dict[str, Any] = {}
    for group in dict.fromkeys(groups):
        for name, info in group.model_fields.items():
            if name in found:
                raise ValueError(f"two groups of settings have {name}: list the same group in both rows")
            found[name] = (info.annotation, info)
    return found


def owners(rows: Iterable[Objective]) -> dict[str, tuple[str, ...]]:
    """For each setting that not all rows have: the rows that have it."""
    rows = tuple(rows)
    return {
        name: tuple(row.name for row in rows if group in row.settings)
        for group in dict.fromkeys(group for row in rows for group in row.settings)
        for name in group.model_fields
    }


def one_of(default: str, names: Iterable[str], description: str) -> tuple[Any, Any]:
    """A field whose value is one of these names."""
    return Literal.__getitem__(tuple(names)), Field(default, description=description)


def families(rows: Iterable[Objective]) -> tuple[Any, Any]:
    """The field ``architecture``: which family a new model is of."""
    rows = tuple(rows)
    firsts: dict[str, list[str]] = {}
    for row in rows:
        firsts.setdefault(row.families[0], []).append(row.name)
    first = (
        f"{next(iter(firsts))}."
        if len(firsts) == 1 and len(rows) > 1
        else ", ".join(f"{row.families[0]} for {row.name}" for row in rows) + "."
    )
    names = dict.fromkeys(("auto", *(family for row in rows for family in row.families)))
    return one_of("auto", names, f"Family of a new model; auto is {first}")


def check_settings(config: Any, flag: str, chosen: str, owned: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError when a setting of another row was changed.

    Args:
        flag: the option that chooses the row, ``chosen`` its value; ``owned``: see `owners`.
    """
    for name, its in owned.items():
        if chosen not in its and getattr(config, name) != type(config).model_fields[name].default:
            raise ValueError(f"--{name.replace('_', '-')} belongs to {flag} {' or '.join(its)}, not to {chosen}")
