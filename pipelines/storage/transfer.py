"""Artifacts in and out of the store: verified copies, published with one rename like everything else."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from guidance.errors import InputError
from pipelines.engine.progress import Progress, Task
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import DigestWriter, machine_errors, publish_directory, remove_tree
from pipelines.storage.manifest import MANIFEST, MANIFEST_LIMIT, ArtifactDamaged, ArtifactMissing, parse_manifest
from pipelines.storage.store import Store

BLOCK = 1 << 20


def export(artifact: Artifact, folder: Path, *, progress: Progress | None = None) -> None:
    """Copy an artifact to a new folder that any program can read, and that `import_folder` takes back.

    Raises:
        InputError: something is there already, or there is no folder to make it in.
        ArtifactDamaged: a file is not what the manifest says; nothing is left then.
    """
    if os.path.lexists(folder):
        raise InputError(f"{str(folder)!r} exists already", hint="choose a folder that does not")
    if not folder.parent.is_dir():
        raise InputError(f"{str(folder.parent)!r} is not a folder")
    with _beside(folder) as temporary:
        _copy(artifact, temporary, progress or Progress())
        publish_directory(temporary, folder, trash=None)


def import_folder(
    store: Store, folder: Path, *, name: str | None = None, progress: Progress | None = None
) -> tuple[Artifact, bool]:
    """Take a folder that `export` made into the store; gives the artifact, and whether it was there already.

    Only the files that the manifest lists are copied; links are not followed, and nothing in them is run.

    Raises:
        ArtifactMissing, ArtifactDamaged: the folder is no artifact, or not what its manifest says.
        InputError: the store has this recipe with other content, or the name belongs to another kind.
    """
    with Artifact(folder) as given:
        strangers = given.strangers()
        if strangers:
            raise InputError(f"{str(folder)!r} holds files that its manifest does not know: {', '.join(strangers[:5])}")
        if name:
            store.check_name_free(name, given.kind)
        store.check_writable()
        store.sweep()
        lock = store.lock(given.kind, given.recipe)
        try:
            lock.acquire(wait=True)
            artifact = _present(store, given)
            reused = artifact is not None
            if artifact is None:
                with store.private(given.kind, given.recipe) as temporary:
                    _copy(given, temporary, progress or Progress())
                    publish_directory(temporary, store.place(given.kind, given.recipe), trash=store.root / ".trash")
                artifact = Artifact(store.place(given.kind, given.recipe))
            if name:
                store.add_name(name, artifact)
            return artifact, reused
        finally:
            lock.release()


def _present(store: Store, given: Artifact) -> Artifact | None:
    """The same artifact in the store, verified; None when it is not there or is damaged."""
    place = store.place(given.kind, given.recipe)
    try:
        artifact = Artifact(place)
    except ArtifactMissing:
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir() or any(place.iterdir())):
            raise InputError(f"{place} is in the way and is not a guide artifact", hint="move it away") from None
        return None
    except ArtifactDamaged:
        return None
    try:
        artifact.verify()
    except ArtifactDamaged:
        artifact.close()
        return None
    if artifact.content != given.content:
        raise InputError(
            f"the store has {artifact.reference} with other content", hint=f"`guide rm {artifact.reference}` first"
        )
    return artifact


def _copy(artifact: Artifact, target: Path, progress: Progress) -> None:
    """Copy every listed file and check it on the way, the manifest last."""
    with progress.task("Copying", total=artifact.size, unit="B") as task:
        for name, entry in artifact.files.items():
            size, digest = _copy_file(artifact, name, target / name, task, limit=int(entry["bytes"]))
            if (size, digest) != (entry["bytes"], entry["sha256"]):
                raise ArtifactDamaged(f"{artifact.path / name}: damaged, not copied", hint="`guide verify` shows all")
    data = artifact.read(MANIFEST)
    if len(data) > MANIFEST_LIMIT or parse_manifest(data, artifact.path) != artifact.manifest:
        raise ArtifactDamaged(f"{artifact.path}: changed while it was copied")
    with DigestWriter(target / MANIFEST) as file:
        file.write(data)


def _copy_file(artifact: Artifact, name: str, target: Path, task: Task, *, limit: int) -> tuple[int, str]:
    with machine_errors(f"cannot create {target.parent}"):
        target.parent.mkdir(parents=True, exist_ok=True)
    with artifact.open(name) as source, DigestWriter(target) as file:
        while block := source.read(BLOCK):
            file.write(block)
            task.advance(len(block))
            if file.size > limit:
                break
    return file.size, file.sha256


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new directory next to the one to be made, gone unless it was renamed."""
    temporary = folder.with_name(f".{folder.name[:200]}.{secrets.token_hex(4)}")
    with machine_errors(f"cannot create {str(folder)!r}"):
        temporary.mkdir()
    try:
        yield temporary
    finally:
        if temporary.exists():
            remove_tree(temporary)
