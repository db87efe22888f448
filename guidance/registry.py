"""Registries: tables by name to which other packages can add.

A plan that uses an added name stores the package that adds it, so that a reader who lacks the package is told which one
to import or install.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import traceback
from collections.abc import Mapping
from typing import Any, TypeVar

from guidance.errors import InputError, PlanError, UnknownName

ENTRY_POINTS = "attention_guide"
"""The group of entry points that names modules to import before an unknown name is refused."""

Row = TypeVar("Row")


_registries: list[Registry[Any]] = []


class Registry(dict[str, Row]):
    """A table of rows by name.

    Attributes:
        what: what a row is, for messages: ``pattern``, ``mechanism``.
        packages: by name, the package that added the row; names of ours are not in it.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.packages: dict[str, str] = {}
        _registries.append(self)

    def add(self, name: str, row: Row, package: str = "") -> Row:
        """Add a row.

        Args:
            package: the package, or a module of it, that adds the row; empty for rows of ours.

        Raises:
            PlanError: the name is taken by another package, or is no name.
        """
        owner = package.partition(".")[0]
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name):
            raise PlanError(f"{name!r} is no name for a {self.what}", hint="letters, digits, _ and -")
        if name in self and (not owner or self.packages.get(name) != owner):
            taken = self.packages.get(name, "attention-guide")
            raise PlanError(f"the {self.what} {name!r} is registered already, by {taken}", hint="choose another name")
        self[name] = row
        if owner:
            self.packages[name] = owner
        return row

    def remove(self, name: str) -> None:
        """Take a row out that another package has added."""
        if name not in self.packages:
            raise UnknownName(f"added {self.what}", name, self.packages)
        del self[name], self.packages[name]

    def find(self, name: str) -> Row:
        """The row of that name.  Modules that installed packages name as entry points are imported first if it is missing."""
        if name not in self:
            load_entry_points()
        if name not in self:
            raise UnknownName(self.what, name, self)
        return self[name]


def failing_package(error: BaseException) -> str | None:
    """The package that has registered something and whose code raised an error; None if the error came from elsewhere."""
    owners = {owner for registry in _registries for owner in registry.packages.values()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = (str(frame.f_globals.get("__name__")).partition(".")[0] for frame in reversed(frames))
    return next((name for name in names if name in owners), None)


_loaded: set[str] = set()


def load_entry_points() -> None:
    """Import the modules that installed packages name in the group ``attention_guide``, each once."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.value not in _loaded:
            try:
                importlib.import_module(point.module)
            except Exception as error:  # code of another package
                raise InputError(f"the package that registers {point.name!r} cannot be imported: {error}") from error
            _loaded.add(point.value)


def missing_package(packages: Mapping[str, Any], name: str) -> str | None:
    """The hint for an unknown name that a plan says a package registers; None if it says nothing."""
    if name not in packages:
        return None
    return f"it is registered by the package {packages[name]!r}: install it, and import it before the plan is read"
