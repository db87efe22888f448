"""The code of other packages on which a result depends: that of the patterns, mechanisms and families that they register."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.engine.stage import file_digest
from pipelines.storage.manifest import digest

ROLE = "packages"
"""The name of this input in recipes and manifests."""


@dataclass(frozen=True)
class Packages:
    """Packages as an input: their versions, and their Python files.

    Attributes:
        versions: by the name under which a package is imported; None if it is not installed but lies somewhere on the path.
        files: the digests of its Python files, likewise.
    """

    versions: Mapping[str, str | None]
    files: Mapping[str, Mapping[str, str]]
    provenance: list[dict[str, Any]] = field(default_factory=list)

    @property
    def content(self) -> str:
        return digest([dict(self.versions), {name: dict(found) for name, found in self.files.items()}])

    def describe(self) -> dict[str, Any]:
        return {"kind": "packages", "content": self.content, "versions": dict(self.versions)}


def owners_of(patterns: Iterable[str | Mapping[str, Any]]) -> set[str]:
    """The packages of others that register some patterns."""
    from guidance.patterns import PATTERNS
    from guidance.patterns.combinations import pattern_names

    names = {name for pattern in patterns for name in pattern_names(pattern)}
    return {PATTERNS.packages[name] for name in names if name in PATTERNS.packages}


def family_owner(folder: Path) -> set[str]:
    """The package of others that registers the family of a model, if there is one."""
    from guidance.checkpoint import config_of
    from guidance.models.families import FAMILIES
    from guidance.registry import load_entry_points

    name = config_of(folder).model_type.replace("-", "_")
    if name not in FAMILIES:
        load_entry_points()
    return {FAMILIES.packages[name]} if name in FAMILIES.packages else set()


def packages_input(names: Iterable[str]) -> dict[str, Packages]:
    """The packages of these names as an input of a stage; empty if there are none, so that other recipes stay as they are."""
    names = sorted(set(names))
    if not names:
        return {}
    distributions = importlib.metadata.packages_distributions()
    versions = {
        name: next((importlib.metadata.version(each) for each in distributions.get(name, ())), None) for name in names
    }
    return {ROLE: Packages(versions, {name: _python_files(name) for name in names})}


def _python_files(name: str) -> dict[str, str]:
    """The digests of a package's Python files by their place in it: a pattern may call any of them."""
    module = sys.modules.get(name)
    if folders := list(getattr(module, "__path__", ())):
        places = {
            path.relative_to(folder).as_posix(): path for folder in folders for path in Path(folder).rglob("*.py")
        }
    else:
        path = Path(getattr(module, "__file__", None) or "")
        places = {path.name: path} if path.is_file() else {}
    return {place: file_digest(places[place]) for place in sorted(places)}
