"""Export artifacts from the store and import them: verified copies, published with one rename."""

from __future__ import annotations

import os
from pathlib import Path

from guidance.errors import InputError
from pipelines.progress import Progress
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import DigestWriter, machine_errors, new_folder, publish_directory
from pipelines.storage.manifest import MANIFEST, MANIFEST_LIMIT, ArtifactDamaged, parse_manifest
from pipelines.storage.store import Store

BLOCK = 1 << 20


def export(artifact: Artifact, folder: Path, *, progress: Progress | None = None) -> None:
    """Copy an artifact to a new folder, which `import_folder` can import.  Raises InputError if the folder exists, or its
    parent does not, and ArtifactDamaged if a file does not match the manifest; then nothing is left behind."""
    if os.path.lexists(folder):
        raise InputError(f"{str(folder)!r} exists already", hint="choose a new folder")
    if not folder.parent.is_dir():
        raise InputError(f"{str(folder.parent)!r} is not a folder")
    with new_folder(folder) as temporary:
        _copy(artifact, temporary, progress or Progress())


def import_folder(
    store: Store, folder: Path, *, name: str | None = None, progress: Progress | None = None
) -> tuple[Artifact, bool]:
    """Import a folder made by `export` into the store; returns the artifact, and whether it existed already.

    Only the files that the manifest lists are copied.  Links are not followed, and no code is run.  Raises ArtifactMissing
    or ArtifactDamaged if the folder is not an artifact, or does not match its manifest, and InputError if the store has this
    recipe with other content, or the name belongs to another kind.
    """
    with Artifact(folder) as given:
        unlisted = given.unlisted_files()
        if unlisted:
            raise InputError(f"{str(folder)!r} has files that its manifest does not list: {', '.join(unlisted[:5])}")
        if name:
            store.check_name_free(name, given.kind)
        store.check_writable()
        store.sweep()
        with store.lock(given.kind, given.recipe) as lock:
            lock.acquire(wait=True)
            artifact = store.existing(given.kind, given.recipe, otherwise="importing")
            reused = artifact is not None
            if artifact is not None and artifact.content != given.content:
                raise InputError(
                    f"the store has {artifact.reference} with other content",
                    hint=f"remove that first: guide rm {artifact.reference}",
                )
            if artifact is None:
                with store.private(given.kind, given.recipe) as temporary:
                    _copy(given, temporary, progress or Progress())
                    publish_directory(temporary, store.folder(given.kind, given.recipe), trash=store.root / ".trash")
                artifact = Artifact(store.folder(given.kind, given.recipe))
            if name:
                store.add_name(name, artifact)
            return artifact, reused


def _copy(artifact: Artifact, target: Path, progress: Progress) -> None:
    """Copy and check all listed files, then the manifest."""
    with progress.task("Copying", total=artifact.size, unit="B") as task:
        for name, entry in artifact.files.items():
            path = target / name
            with machine_errors(f"cannot create {path.parent}"):
                path.parent.mkdir(parents=True, exist_ok=True)
            with artifact.open(name) as source, DigestWriter(path) as copy:
                while copy.size <= int(entry["bytes"]) and (block := source.read(BLOCK)):
                    copy.write(block)
                    task.advance(len(block))
            if (copy.size, copy.sha256) != (entry["bytes"], entry["sha256"]):
                raise ArtifactDamaged(
                    f"{artifact.path / name}: damaged, so not copied", hint="`guide verify` lists all damaged files"
                )
    data = artifact.read(MANIFEST)
    if len(data) > MANIFEST_LIMIT or parse_manifest(data, artifact.path) != artifact.manifest:
        raise ArtifactDamaged(f"{artifact.path}: changed while it was copied")
    with DigestWriter(target / MANIFEST) as file:
        file.write(data)
