"""Names of artifacts, with versions: what may be a name, and the small files that define them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from guidance.errors import InputError
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import DIGEST, KIND

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DEVICE_NAMES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


@dataclass(frozen=True)
class Name:
    """One version of a name, and the artifact that it refers to."""

    name: str
    version: int
    kind: str
    recipe: str
    content: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def refers_to(self, artifact: Artifact) -> bool:
        """Whether this is a name of the artifact, with the content that it has now."""
        return (self.recipe, self.content) == (artifact.recipe, artifact.content)


def check_name(name: str) -> str:
    """The name itself, if it is valid.  Raises InputError if it is malformed, or could be mistaken for a path, an
    option or a device."""
    if _DEVICE_NAMES.fullmatch(name):
        raise InputError(f"bad name {name!r}", hint="on Windows it is that of a device; choose another one")
    if not NAME.fullmatch(name):
        raise InputError(
            f"bad name {name!r}",
            hint="use up to 64 lower-case letters, digits, dots, dashes and underscores; begin with a letter or digit",
        )
    return name


def read_name(entry: Path) -> Name | None:
    """The name that one file under ``names`` defines; None if the file is unusable."""
    try:
        data = json.loads(entry.read_bytes())
        name = Name(check_name(entry.parent.name), int(entry.name), data["kind"], data["recipe"], data["content"])
        usable = KIND.fullmatch(name.kind) and DIGEST.fullmatch(name.recipe) and name.version > 0
        return name if usable and entry.name == str(name.version) else None
    except (OSError, ValueError, KeyError, TypeError, InputError, RecursionError):
        return None
