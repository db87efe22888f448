"""Checkpoints of unfinished training: sealed directories, each absent or complete, and verified before use."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from pipelines.progress import log
from pipelines.storage.artifacts import Artifact, Builder
from pipelines.storage.files import machine_errors, publish_directory, remove_tree
from pipelines.storage.manifest import ArtifactDamaged, ArtifactMissing, digest

WEIGHTS = "model.safetensors"
"""The weights in every checkpoint, whatever its name."""

NAMES = ("checkpoint", "best", "snapshot")
"""What a run saves: everything it needs to go on, its best weights, and the weights that the user asked for."""


def best_name(number: int) -> str:
    """The folder with the weights of the n-th best validation: ``best``, ``best-2``, ``best-3``, …"""
    return "best" if number == 1 else f"best-{number}"


class Checkpoints:
    """The checkpoints of one run, ordered by the step in their names; the caller holds the lock of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Make the folder and remove incomplete checkpoints of a crash."""
        with machine_errors(f"cannot write to {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("new.*"):
            remove_tree(leftover)

    def save(self, name: str, step: int, write: Callable[[Builder], None], *, keep: int | None) -> None:
        """Write a checkpoint; once it is on disk, remove older ones of that name but for the newest ``keep``."""
        final = self.folder / f"{name}-{step:08d}"
        if final.exists():
            return
        temporary = self.folder / f"new.{final.name}"
        remove_tree(temporary)
        try:
            with machine_errors(f"cannot write to {self.folder}"):
                temporary.mkdir()
            builder = Builder(temporary)
            write(builder)
            builder.counts["step"] = step
            builder.finish({"kind": name, "recipe": digest([self.folder.name, name, step]), "stage": "training"})
            publish_directory(temporary, final, trash=self.folder)
        except BaseException:
            remove_tree(temporary)
            raise
        for old in self._all(name)[:-keep] if keep else []:
            remove_tree(old)

    def newest(self, name: str) -> Artifact | None:
        """The newest checkpoint that verifies; damaged ones are skipped with a warning.

        Raises:
            ArtifactDamaged: no checkpoint verifies.
        """
        damaged: list[str] = []
        for path in reversed(self._all(name)):
            try:
                artifact = Artifact(path)
                artifact.verify()
            except (ArtifactDamaged, ArtifactMissing) as error:
                damaged.append(error.message)
                continue
            for message in damaged:
                log.warning("%s; using %s instead", message, path.name)
            return artifact
        if damaged:
            raise ArtifactDamaged(
                f"all checkpoints in {self.folder} are damaged: {damaged[0]}",
                hint="--force starts from the beginning",
            )
        return None

    def steps(self, name: str) -> list[int]:
        """The steps of all checkpoints of a name, ascending."""
        return [_step(path) for path in self._all(name)]

    def forget_after(self, name: str, step: int) -> None:
        """Remove the checkpoints of later steps."""
        self.retain(name, {found for found in self.steps(name) if found <= step})

    def retain(self, name: str, steps: Collection[int]) -> None:
        """Remove the checkpoints of all other steps."""
        for path in self._all(name):
            if _step(path) not in steps:
                remove_tree(path)

    def with_weights(self, step: int) -> Artifact | None:
        """A checkpoint of this step whose weights verify, whatever its name; damaged ones are skipped with a warning."""
        for path in (p for name in NAMES for p in self._all(name) if _step(p) == step):
            try:
                artifact = Artifact(path)
                artifact.verify(WEIGHTS)
            except (ArtifactDamaged, ArtifactMissing) as error:
                log.warning("%s", error.message)
                continue
            return artifact
        return None

    def _all(self, name: str) -> list[Path]:
        pattern = re.compile(rf"{re.escape(name)}-(\d+)")
        folders = [p for p in self.folder.glob(f"{name}-*") if pattern.fullmatch(p.name)]
        return sorted(folders, key=_step)


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
