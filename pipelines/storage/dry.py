"""Dry runs: a store to which nothing is written, and artifacts of which only the kind is known.

In a `DryStore` a stage checks its settings and inputs, and returns the artifact that exists already, or else a `DryArtifact`.  A
later stage takes it as an input by the reference ``dry:KIND``.  Whoever asks it for more than its kind gets `NotYet`.
`Stage.run` then ends the dry run; inside `where_known` only the rest of that block is skipped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import Lock, machine_error
from pipelines.storage.manifest import DRY, KIND
from pipelines.storage.store import Store


class NotYet(Exception):
    """A dry run asked for what an artifact holds that does not exist yet."""


def where_known() -> contextlib.AbstractContextManager[None]:
    """A block of checks, which ends without an error where one needs an artifact that does not exist yet."""
    return contextlib.suppress(NotYet)


class DryArtifact(Artifact):
    """An artifact that does not exist yet.

    Attributes:
        known_recipe: its recipe; None if an input does not exist yet, since the recipe depends on what inputs hold.
        steps, seconds: how many steps a training would take, and how long; None if that is not known.
    """

    def __init__(
        self, kind: str, recipe: str | None = None, *, steps: int | None = None, seconds: float | None = None
    ) -> None:
        self._kind, self.known_recipe, self.steps, self.seconds = kind, recipe, steps, seconds

    kind = property(lambda self: self._kind)
    reference = property(lambda self: f"{DRY}{self._kind}")

    @property
    def recipe(self) -> str:
        if self.known_recipe is None:
            raise NotYet(f"{self.reference} depends on what does not exist yet")
        return self.known_recipe

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("path", "manifest", "_lock"):
            raise NotYet(f"{self.reference} does not exist yet")
        raise AttributeError(name)

    def verify(self, *names: str) -> None:
        """There is nothing to verify."""

    def close(self) -> None:
        """There is nothing to close."""

    def __del__(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True)
class DryStore(Store):
    """A store to which nothing is written.  Besides the artifacts that it holds, it gives a `DryArtifact` for ``dry:KIND``."""

    def find(self, reference: str, kind: str | None = None) -> Path:
        return Path(reference) if self._is_dry(reference) else super().find(reference, kind)

    def open(self, folder: Path) -> Artifact:
        name = str(folder)
        return DryArtifact(name.removeprefix(DRY)) if self._is_dry(name) else super().open(folder)

    @staticmethod
    def _is_dry(reference: str) -> bool:
        return reference.startswith(DRY) and KIND.fullmatch(reference.removeprefix(DRY)) is not None

    def load_input(self, artifact: Artifact, role: str, *, verify: bool = True) -> Artifact:
        if isinstance(artifact, DryArtifact):
            return DryArtifact(role)  # such a role is called like its kind
        return super().load_input(artifact, role, verify=verify)

    def check_writable(self) -> None:
        """Check that the store could be written to, by permissions alone: nothing is created."""
        if os.path.lexists(self.root) and not os.path.isdir(self.root):
            super().check_writable()
        there = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            raise machine_error(
                f"cannot write to the store {self.root}{self._owner()}", OSError(errno.EACCES, "no permission")
            )

    @contextlib.contextmanager
    def private(self, kind: str, recipe: str) -> Iterator[Path]:
        """A folder outside of the store, which is deleted at the end."""
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)

    def _lock(self, name: str, *, shared: bool = False) -> Lock:
        raise RuntimeError(f"a dry run must not write to the store, and asked for the lock {name}")

    def build(self, kind: str, recipe: str, manifest: Any) -> Any:
        raise RuntimeError(f"a dry run must not build {kind}")
