"""Registries of objectives and tasks, one file for each; and configurations made of the settings that they bring along.

The settings of an objective mean something for it only, or for those that list the same group.  The command line shows the
settings of all as flags; a setting of another objective is refused if it was changed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from pipelines.engine.stage import Config
from pipelines.training.objective import Objective

AnyObjective = TypeVar("AnyObjective", bound=Objective)


def find_rows(package: str, folder: Path, base: type[AnyObjective]) -> dict[str, type[AnyObjective]]:
    """The class of every module of a package that is a ``base``, by its name, in the order of the file names.

    Raises:
        ValueError: a module has no such class, or several; or two have the same name.
    """
    rows: dict[str, type[AnyObjective]] = {}
    for module in sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__"):
        home = importlib.import_module(f"{package}.{module}")
        own = [value for value in vars(home).values() if isinstance(value, type) and value.__module__ == home.__name__]
        classes = [value for value in own if issubclass(value, base)]
        if len(classes) != 1:
            raise ValueError(f"{home.__name__} has {len(classes)} classes of kind {base.__name__}; a file holds one")
        if classes[0].name in rows:
            raise ValueError(f"two classes of {package} are called {classes[0].name}")
        rows[classes[0].name] = classes[0]
    return rows


def fields(groups: Iterable[type[Config]]) -> dict[str, Any]:
    """The fields of groups of settings, by their names."""
    by_name: dict[str, Any] = {}
    for group in dict.fromkeys(groups):
        for name, info in group.model_fields.items():
            if name in by_name:
                raise ValueError(f"two groups of settings have {name}: list the same group in both objectives")
            by_name[name] = (info.annotation, info)
    return by_name


def owners(rows: Iterable[type[Objective]]) -> dict[str, tuple[str, ...]]:
    """For each setting that not all objectives have: the objectives that have it."""
    rows = tuple(rows)
    return {
        name: tuple(row.name for row in rows if group in row.settings)
        for group in dict.fromkeys(group for row in rows for group in row.settings)
        for name in group.model_fields
    }


def one_of(default: str, names: Iterable[str], description: str) -> tuple[Any, Any]:
    """A field whose value is one of these names."""
    return Literal.__getitem__(tuple(names)), Field(default, description=description)


def families(rows: Iterable[type[Objective]]) -> tuple[Any, Any]:
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
    """Raises ValueError when a setting of another objective was changed.

    Args:
        flag: the option that chooses the objective, ``chosen`` its value; ``owned``: see `owners`.
    """
    for name, its in owned.items():
        if chosen not in its and getattr(config, name) != type(config).model_fields[name].default:
            raise ValueError(f"--{name.replace('_', '-')} belongs to {flag} {' or '.join(its)}, not to {chosen}")
