"""Which command to suggest after a stage: one that works when it is pasted."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from guidance.errors import InputError
from pipelines.engine.declaration import Templates
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.run_inputs import is_guided

LOOKED_AT = 50
"""At most so many of the newest artifacts of a kind are looked at."""


def suggestion(templates: Templates, artifact: Artifact, reference: str, store: Store) -> str | None:
    """The first command line whose gaps can be filled; None if there is none.

    Args:
        reference: how to call the artifact itself.
    """
    lines = templates(artifact, store) if callable(templates) else templates
    for template in (lines,) if isinstance(lines, str) else lines:
        kinds = re.findall(r"\{(\w+)\}", template)
        names = {kind: _name_of(kind, artifact, store) for kind in kinds}
        if all(names.values()):
            return template.format(reference, **names)
    return None


def _name_of(kind: str, artifact: Artifact, store: Store) -> str | None:
    """How to call the input of a kind, or the newest artifact of that kind with the same origin."""
    inputs = artifact.manifest.get("inputs", {})
    if kind in inputs:
        recipe = str(inputs[kind].get("recipe", ""))
        return store.name_of(kind, recipe) if recipe and store.folder(kind, recipe).exists() else None
    origin = "sequences" if kind == "model" else "corpus"
    content = inputs.get(origin, {}).get("content")

    def fits(other: Artifact) -> bool:
        known = other.manifest.get("inputs", {}).get(origin, {}).get("content")
        return other.id != artifact.id and known == content and not (kind == "model" and is_guided(other.manifest))

    return newest(kind, store, fits) if content else None


def newest(kind: str, store: Store, fits: Callable[[Artifact], bool] = lambda artifact: True) -> str | None:
    """How to call the newest artifact of a kind, among those that fit."""
    folders = [folder for folder in store.folders() if folder.parent.name == kind]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[:LOOKED_AT]:
        with contextlib.suppress(InputError), Artifact(folder) as artifact:
            if fits(artifact):
                return store.name_of(kind, artifact.recipe)
    return None
