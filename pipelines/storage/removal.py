"""Removing from the store: artifacts with their names, unfinished work, and what nobody needs any more."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import Lock, machine_errors
from pipelines.storage.manifest import ID_LENGTH, MANIFEST, MANIFEST_LIMIT, ArtifactInUse, ArtifactMissing
from pipelines.storage.names import Name
from pipelines.storage.store import Store


def remove(store: Store, folder: Path) -> list[Name]:
    """Remove an artifact of the store, damaged or not, together with its names, which are returned.  Raises ArtifactInUse if a
    process is reading it, and ArtifactMissing if the folder is not an artifact of this store, or is gone already."""
    kind, recipe = folder.parent.name, folder.name
    if folder != store.root / kind / recipe or not store.is_folder(folder) or not os.path.lexists(folder):
        raise ArtifactMissing(f"{str(folder)!r} is not an artifact in the store {store.root}")
    _discard(store, folder, f"{kind}/{recipe}")

    def is_its_own(name: Name) -> bool:
        return (name.kind, name.recipe[:ID_LENGTH]) == (kind, recipe)

    names = [name for name in store.names() if is_its_own(name)]
    store.remove_names(is_its_own)
    store.sweep()
    return names


def remove_unfinished(store: Store, folder: Path) -> None:
    """Remove unfinished work.  Raises ArtifactInUse if a run is working on it."""
    kind, recipe = folder.parent.name, folder.name
    with store.lock(kind, recipe) as lock:
        if not lock.acquire(wait=False):
            raise ArtifactInUse(f"{kind}/{recipe} is being built", hint="try again after that run has ended")
        _discard(store, folder, f"unfinished {kind}/{recipe}")
        store.begin(kind, recipe, None)
    store.sweep()


def collect(store: Store, *, unnamed: bool = False, dry_run: bool = False) -> list[Path]:
    """Delete leftovers of crashed runs, and with ``unnamed`` all unnamed artifacts that no named one was made from.

    Unfinished work, named artifacts, all artifacts that they were made from, and artifacts in use are
    kept.  Returns the deleted paths; with ``dry_run`` those that would be deleted.
    """
    removed = store.sweep(dry_run=dry_run)
    for folder in _unneeded(store) if unnamed else []:
        with contextlib.suppress(ArtifactInUse, ArtifactMissing):
            if not dry_run:
                _discard(store, folder, f"{folder.parent.name}/{folder.name}")
            elif _in_use(folder):
                continue
            removed.append(folder)
    if not dry_run:
        store.sweep()
        _remove_dangling_names(store)
    return removed


def users(store: Store, *recipes: str) -> dict[Path, set[str]]:
    """The folders of the artifacts that were made from artifacts of these recipes, and from which of them."""
    by_folder = {}
    for folder in store.folders():
        if _mentions(folder, recipes):
            with contextlib.suppress(InputError), store.open(folder) as artifact:
                inputs = artifact.manifest.get("inputs", {}).values()
                if used := {given.get("recipe") for given in inputs}.intersection(recipes):
                    by_folder[folder] = used
    return by_folder


def _mentions(folder: Path, recipes: Iterable[str]) -> bool:
    """False if a manifest mentions none of these recipes, which is found out without parsing it."""
    try:
        with os.fdopen(os.open(folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            text = file.read(MANIFEST_LIMIT)
        return any(recipe.encode() in text for recipe in recipes)
    except OSError:
        return True


def _in_use(folder: Path) -> bool:
    """True while a process holds a lock on the folder."""
    try:
        with Lock(folder) as lock:
            return not lock.acquire(wait=False)
    except OSError:
        return True


def _discard(store: Store, folder: Path, reference: str) -> None:
    """Move an unlocked folder to the trash."""
    with machine_errors(f"cannot remove {reference}"):
        try:
            lock = Lock(folder)
        except FileNotFoundError:
            raise ArtifactMissing(f"{reference} is gone already") from None
        with lock:
            if not lock.acquire(wait=False):
                raise ArtifactInUse(f"{reference} is being read", hint="try again after that run has ended")
            if not lock.in_place():
                raise ArtifactInUse(f"{reference} was just replaced")
            trash = store.root / ".trash" / f"{folder.parent.name}-{folder.name}.{secrets.token_hex(4)}"
            trash.parent.mkdir(exist_ok=True)
            os.rename(folder, trash)


def _unneeded(store: Store) -> list[Path]:
    """The unnamed artifacts that no named one was made from.

    What a misplaced folder was made from counts as needed, and so does the folder itself.
    """
    manifests: dict[Path, Mapping[str, Any]] = {}
    for folder in store.folders():
        with contextlib.suppress(InputError), Artifact(folder) as artifact:
            manifests[folder] = artifact.manifest
    needed = {store.folder(name.kind, name.recipe) for name in store.names()}
    needed |= {folder for folder, own in manifests.items() if folder != store.folder(own["kind"], own["recipe"])}
    pending = list(needed)
    while pending:
        for parent in manifests.get(pending.pop(), {}).get("inputs", {}).values():
            folder = store.folder(str(parent.get("kind")), str(parent.get("recipe")))
            if folder in manifests and folder not in needed:
                needed.add(folder)
                pending.append(folder)
    return sorted(manifests.keys() - needed)


def _remove_dangling_names(store: Store) -> None:
    """Delete the names of artifacts and of unfinished work that are gone, and half-written name files."""
    store.remove_names(lambda name: not store.folder(name.kind, name.recipe).exists())
    with store.naming(), contextlib.suppress(OSError):
        for path in (store.root / "names").glob("*/.*"):
            path.unlink(missing_ok=True)
    for file in (store.root / ".partial").glob("*/*.name"):
        with store.lock(file.parent.name, file.stem) as lock:
            if lock.acquire(wait=False) and not file.with_suffix("").exists():
                file.unlink(missing_ok=True)
