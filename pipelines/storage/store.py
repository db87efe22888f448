"""The store: versioned artifacts that are either absent or complete, and are verified when they are read.

``<store>/<kind>/<recipe>/`` holds the files of an artifact and its manifest, ``artifact.json``.  The recipe is a
digest of everything that determines the result: stage, stage version, configuration and the content of all
inputs.  The content is a digest of the files.  Names with versions (``wiki@2``) are small files under
``<store>/names``.  Unfinished work that a later run continues is under ``<store>/.partial``; locks, half-built and
discarded directories are under ``.locks``, ``.tmp`` and ``.trash``.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guidance.errors import InputError, MachineError, did_you_mean
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact, Builder
from pipelines.storage.files import (
    Lock,
    machine_errors,
    publish_directory,
    remove_tree,
    sync_directory,
    write_file,
)
from pipelines.storage.manifest import (
    ID_LENGTH,
    KIND,
    MANIFEST,
    ArtifactInUse,
    ArtifactMismatch,
    ArtifactMissing,
    canonical_json,
)
from pipelines.storage.names import Name, check_name, read_name

_PREFIX = re.compile(r"[0-9a-f]{4,64}")


def _in_use(folder: Path) -> bool:
    """True while a process holds a lock on the folder."""
    try:
        lock = Lock(folder)
    except OSError:
        return True
    try:
        return not lock.acquire(wait=False)
    finally:
        lock.release()


@dataclass(frozen=True)
class Store:
    """A directory of artifacts."""

    root: Path

    # paths and locks

    def folder(self, kind: str, recipe: str) -> Path:
        """Where the artifact of a recipe is, or will be."""
        return self.root / kind / recipe[:ID_LENGTH]

    def partial(self, kind: str, recipe: str) -> Path:
        """Where unfinished work of a recipe is kept."""
        return self.root / ".partial" / kind / recipe[:ID_LENGTH]

    def lock(self, kind: str, recipe: str, *, shared: bool = False) -> Lock:
        """The lock of a recipe: exclusive for building it, shared for ``--shard`` runs.  Its file is never deleted."""
        with machine_errors(f"cannot use the store {self.root}"):
            (self.root / ".locks").mkdir(parents=True, exist_ok=True)
            return Lock(self.root / ".locks" / f"{kind}-{recipe[:ID_LENGTH]}", shared=shared, create=True)

    # building

    def check_path_free(self, kind: str, recipe: str) -> None:
        """Raises InputError if the path of an artifact holds something else, which not even ``--force`` may replace."""
        path = self.folder(kind, recipe)
        if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            raise InputError(f"{path} is in the way and is not a guide artifact", hint="move it away")

    def check_writable(self) -> None:
        """Fail now rather than after the work.

        Raises:
            InputError: the store is a file.
            MachineError: the store cannot be written; the message names its owner.
        """
        if os.path.lexists(self.root) and not os.path.isdir(self.root):
            raise InputError(f"the store {str(self.root)!r} is not a folder", hint="choose another with --store")
        with machine_errors(f"cannot write to the store {self.root}{self._owner()}"):
            (self.root / ".tmp").mkdir(parents=True, exist_ok=True)
            probe = self.root / ".tmp" / f"probe.{secrets.token_hex(4)}"
            probe.mkdir()
            with contextlib.suppress(FileNotFoundError):  # another process may have swept it away
                probe.rmdir()

    def _owner(self) -> str:
        with contextlib.suppress(OSError):
            return f" (owned by user {self.root.stat().st_uid})"
        return ""

    @contextlib.contextmanager
    def private(self, kind: str, recipe: str) -> Iterator[Path]:
        """A new directory that sweeps spare while this process lives; deleted at the end unless it was renamed."""
        temporary = self.root / ".tmp" / f"{kind}-{recipe[:ID_LENGTH]}.{secrets.token_hex(4)}"
        with machine_errors(f"cannot write to the store {self.root}{self._owner()}"), self._sweeping(shared=True):
            temporary.mkdir(parents=True)
            alive = Lock(temporary)
            alive.acquire(wait=False)
        try:
            yield temporary
        finally:
            alive.release()
            if temporary.exists():  # ours, or the artifact that it replaced, which may still be open
                with contextlib.suppress(MachineError):
                    self._sweep(temporary.parent)

    @contextlib.contextmanager
    def build(self, kind: str, recipe: str, manifest: Mapping[str, Any]) -> Iterator[Builder]:
        """Build in a private directory, then publish; an error leaves nothing behind.  The caller holds `lock`."""
        with self.private(kind, recipe) as temporary:
            builder = Builder(temporary)
            yield builder
            builder.finish({**manifest, "kind": kind, "recipe": recipe})
            publish_directory(temporary, self.folder(kind, recipe), trash=self.root / ".trash")
        self._sweep(self.root / ".trash")

    # names

    def names(self) -> list[Name]:
        """All versions of all names, oldest first within a name."""
        found = [name for entry in (self.root / "names").glob("*/*") if (name := read_name(entry)) is not None]
        return sorted(found, key=lambda n: (n.name, n.version))

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Hold the lock under which names are changed."""
        with machine_errors(f"cannot use the store {self.root}"):
            (self.root / ".locks").mkdir(parents=True, exist_ok=True)
            lock = Lock(self.root / ".locks" / "names", create=True)
        try:
            lock.acquire(wait=True)
            yield
        finally:
            lock.release()

    def check_name_free(self, name: str, kind: str) -> Name | None:
        """Check that an artifact of this kind may get the name; returns the newest version, if there is one.

        Raises:
            InputError: the name is invalid, or belongs to another kind.
        """
        check_name(name)
        versions = [n for n in self.names() if n.name == name]
        if versions and versions[-1].kind != kind:
            raise InputError(
                f"the name {name!r} is taken by a {versions[-1].kind}; this is a {kind}",
                hint="choose another name, or `guide rename` the old one",
            )
        return versions[-1] if versions else None

    def add_name(self, name: str, artifact: Artifact) -> Name:
        """Make ``artifact`` the newest version of ``name``, unless it already is.

        Raises:
            InputError: the name is invalid, or belongs to another kind.
        """
        with self._naming():
            newest = self.check_name_free(name, artifact.kind)
            if newest and (newest.recipe, newest.content) == (artifact.recipe, artifact.content):
                return newest
            version = newest.version + 1 if newest else 1
            write_file(self.root / "names" / name / str(version), canonical_json(artifact.describe()))
        return Name(name, version, artifact.kind, artifact.recipe, artifact.content)

    def rename(self, old: str, new: str) -> None:
        """Rename all versions of a name.

        Raises:
            InputError: a name is invalid, the old one does not exist, or the new one does.
        """
        source, target = self.root / "names" / check_name(old), self.root / "names" / check_name(new)
        if not source.is_dir():
            raise ArtifactMissing(f"no name {old!r} in {self.root}", hint="`guide ls` lists them")
        with self._naming(), machine_errors(f"cannot rename {old!r}"):
            names = {n.name for n in self.names()}
            if old not in names:
                raise ArtifactMissing(f"no name {old!r} in {self.root}", hint="`guide ls` lists them")
            if new in names:
                raise InputError(f"the name {new!r} exists already")
            os.rename(source, target)  # the target may be an empty folder
            sync_directory(target.parent)

    def remove_names(self, kind: str, recipe: str) -> list[Name]:
        """Delete the names of a removed artifact."""
        with self._naming(), machine_errors("cannot remove a name"):
            removed = [n for n in self.names() if (n.kind, n.recipe[:ID_LENGTH]) == (kind, recipe[:ID_LENGTH])]
            for name in removed:
                (self.root / "names" / name.name / str(name.version)).unlink(missing_ok=True)
            for folder in {self.root / "names" / name.name for name in removed}:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return removed

    # reading

    def artifacts(self) -> Iterator[Artifact]:
        """Every readable artifact; damaged ones are skipped."""
        for folder in self.folders():
            with contextlib.suppress(InputError):
                yield Artifact(folder)

    def folders(self) -> list[Path]:
        """The folders of all artifacts, damaged ones included."""
        found = self.root.glob("[a-z]*/*")
        return sorted(p for p in found if KIND.fullmatch(p.parent.name) and re.fullmatch(r"[0-9a-f]{16}", p.name))

    def unfinished(self) -> list[Path]:
        """The folders of unfinished work, which the same command would continue."""
        return sorted((self.root / ".partial").glob("*/*"))

    def find_unfinished(self, kind: str, reference: str) -> Path | None:
        """The folder of unfinished work with this ``kind/id`` or id prefix; None if there is none.

        Raises:
            ArtifactMissing: more than one matches.
        """
        prefix = reference.removeprefix(f"{kind}/")
        if not _PREFIX.fullmatch(prefix):
            return None
        found = sorted((self.root / ".partial" / kind).glob(f"{prefix[:ID_LENGTH]}*"))
        if len(found) > 1:
            raise ArtifactMissing(
                f"{reference!r} is ambiguous; it matches {', '.join(f'{kind}/{p.name}' for p in found)}"
            )
        return found[0] if found else None

    def named(self, reference: str) -> Name | None:
        """The version that ``name`` or ``name@n`` refers to; None if there is none."""
        name, _, version = reference.partition("@")
        versions = [n for n in self.names() if n.name == name and version in ("", str(n.version))]
        return versions[-1] if versions else None

    def find(self, reference: str) -> Path:
        """The folder that a reference names: ``name``, ``name@n``, ``kind/id``, an id prefix, or a path.

        Raises:
            ArtifactMissing: no artifact matches, or more than one.
        """
        if os.path.exists(os.path.join(reference, MANIFEST)):
            return Path(reference)
        named = self.named(reference)
        if named:
            folder = self.folder(named.kind, named.recipe)
            if not folder.exists():
                raise ArtifactMissing(f"{reference!r} refers to {named.kind}/{named.recipe[:ID_LENGTH]}, which is gone")
            return folder
        kind, _, prefix = reference.rpartition("/")
        if _PREFIX.fullmatch(prefix):
            found = [
                p for p in self.folders() if p.parent.name == (kind or p.parent.name) and p.name.startswith(prefix[:16])
            ]
            if len(found) == 1:
                return found[0]
            if found:
                raise ArtifactMissing(
                    f"{reference!r} is ambiguous; it matches {', '.join(f'{p.parent.name}/{p.name}' for p in found)}"
                )
        if os.path.exists(reference):
            raise ArtifactMissing(f"{reference!r}: not a guide artifact (it has no {MANIFEST})")
        newest = self.named(reference.partition("@")[0])  # if only the version is wrong
        guess = (
            f"; the newest is {str(newest)!r}" if newest else did_you_mean(reference, {n.name for n in self.names()})
        )
        raise ArtifactMissing(
            f"no artifact {reference!r} in {self.root}{guess}",
            hint="`guide ls` lists all artifacts; choose another store with --store or GUIDE_STORE",
        )

    def load(self, reference: str, *, kind: str | None = None, verify: bool = True) -> Artifact:
        """Open an artifact and verify all its files.

        Raises:
            ArtifactMissing, ArtifactDamaged: see `find` and `Artifact.verify`.
            ArtifactMismatch: it is not of the given ``kind``.
        """
        artifact = Artifact(self.find(reference))
        named = self.named(reference)
        if named and named.recipe == artifact.recipe and named.content != artifact.content:
            if "@" in reference:
                raise ArtifactMissing(
                    f"{reference!r} is gone: {artifact.reference} was built again with different content",
                    hint=f"use `{named.kind}/{named.recipe[:ID_LENGTH]}` for the new content",
                )
            log.warning("%s was built again with different content since it was named %s", artifact.reference, named)
        if kind not in (None, artifact.kind):
            raise ArtifactMismatch(f"{reference!r} is a {artifact.kind} artifact; expected: {kind}")
        if verify:
            artifact.verify()
        return artifact

    # removing

    def load_input(self, artifact: Artifact, role: str, *, verify: bool = True) -> Artifact:
        """An input of an artifact, with the same content as when the artifact was built.

        Raises:
            ArtifactMissing: the input is gone, or has been rebuilt with other content.
        """
        known = artifact.manifest.get("inputs", {}).get(role, {})
        reference = f"{known.get('kind', role)}/{str(known.get('recipe', ''))[:16]}"
        try:
            found = self.load(reference, verify=verify)
        except ArtifactMissing as error:
            raise ArtifactMissing(
                f"the {role} of {artifact.reference}, {reference}, is not in {self.root}",
                hint="build it again from the same text; it gets the same id",
            ) from error
        if found.content != known.get("content"):
            raise ArtifactMissing(
                f"{found.reference} was rebuilt with other content after {artifact.reference} was built from it",
                hint=f"build the {artifact.kind} again",
            )
        return found

    def users(self, artifact: Artifact) -> list[Artifact]:
        """The artifacts that were made from this one."""
        return [
            other
            for other in self.artifacts()
            if any(i.get("recipe") == artifact.recipe for i in other.manifest.get("inputs", {}).values())
        ]

    def remove(self, folder: Path) -> None:
        """Remove an artifact of the store, damaged or not, together with its names.

        Raises:
            ArtifactInUse: a process is reading it.
            ArtifactMissing: the folder is not an artifact of this store, or is gone already.
        """
        kind, recipe = folder.parent.name, folder.name
        reference = f"{kind}/{recipe}"
        if folder not in self.folders():
            raise ArtifactMissing(f"{str(folder)!r} is not an artifact in the store {self.root}")
        self._discard(folder, reference)
        self.remove_names(kind, recipe)
        self._sweep(self.root / ".trash")

    def remove_unfinished(self, folder: Path) -> None:
        """Remove unfinished work.

        Raises:
            ArtifactInUse: a run is working on it.
        """
        kind, recipe = folder.parent.name, folder.name
        lock = self.lock(kind, recipe)
        try:
            if not lock.acquire(wait=False):
                raise ArtifactInUse(f"{kind}/{recipe} is being built", hint="try again after that run has ended")
            self._discard(folder, f"unfinished {kind}/{recipe}")
        finally:
            lock.release()
        self._sweep(self.root / ".trash")

    def forget_unfinished(self, kind: str, recipe: str) -> None:
        """Remove the leftovers of a finished recipe, unless another run is working on it again."""
        lock = self.lock(kind, recipe)
        try:
            if lock.acquire(wait=False):
                remove_tree(self.partial(kind, recipe))
        finally:
            lock.release()

    def _discard(self, folder: Path, reference: str) -> None:
        """Move an unlocked folder to the trash."""
        with machine_errors(f"cannot remove {reference}"):
            try:
                lock = Lock(folder)
            except FileNotFoundError:
                raise ArtifactMissing(f"{reference} is gone already") from None
            try:
                if not lock.acquire(wait=False):
                    raise ArtifactInUse(f"{reference} is being read", hint="try again after that run has ended")
                if not lock.in_place():
                    raise ArtifactInUse(f"{reference} was just replaced")
                trash = self.root / ".trash" / f"{folder.parent.name}-{folder.name}.{secrets.token_hex(4)}"
                trash.parent.mkdir(exist_ok=True)
                os.rename(folder, trash)
            finally:
                lock.release()

    @contextlib.contextmanager
    def _sweeping(self, *, shared: bool) -> Iterator[None]:
        """The sweep lock.  Held shared, it protects new directories until they are locked themselves."""
        (self.root / ".locks").mkdir(parents=True, exist_ok=True)
        lock = Lock(self.root / ".locks" / "sweep", shared=shared, create=True)
        lock.acquire(wait=True)
        try:
            yield
        finally:
            lock.release()

    def _sweep(self, folder: Path, *, dry_run: bool = False) -> list[Path]:
        """Delete the directories in ``folder`` that no process has locked; returns them."""
        removed: list[Path] = []
        if not folder.is_dir() or not any(folder.iterdir()):
            return removed
        with self._sweeping(shared=False):
            for path in sorted(folder.iterdir()):
                try:
                    lock = Lock(path)
                except OSError:
                    continue
                if lock.acquire(wait=False):
                    removed.append(path)
                    if not dry_run:
                        remove_tree(path)
                lock.release()
        return removed

    def sweep(self) -> list[Path]:
        """Delete half-built and half-deleted directories of crashed runs."""
        return self._sweep(self.root / ".tmp") + self._sweep(self.root / ".trash")

    def collect(self, *, unnamed: bool = False, dry_run: bool = False) -> list[Path]:
        """Delete leftovers of crashed runs, and with ``unnamed`` all artifacts that no named one was made from.

        Unfinished work, named artifacts, all artifacts that they were made from, and artifacts in use are
        kept.  Returns the deleted paths; with ``dry_run`` those that would be deleted.
        """
        removed = self._sweep(self.root / ".tmp", dry_run=dry_run) + self._sweep(self.root / ".trash", dry_run=dry_run)
        if not dry_run:
            self._remove_dangling_names()
        if not unnamed:
            return removed
        manifests = {artifact.path: artifact.manifest for artifact in self.artifacts()}
        kept = {self.folder(name.kind, name.recipe) for name in self.names()}
        pending = list(kept)
        while pending:
            for parent in manifests.get(pending.pop(), {}).get("inputs", {}).values():
                folder = self.folder(str(parent.get("kind")), str(parent.get("recipe")))
                if folder in manifests and folder not in kept:
                    kept.add(folder)
                    pending.append(folder)
        for folder in sorted(manifests.keys() - kept):
            try:
                if not dry_run:
                    self.remove(folder)
                elif _in_use(folder):
                    continue
                removed.append(folder)
            except (ArtifactInUse, ArtifactMissing):
                continue
        return removed

    def _remove_dangling_names(self) -> None:
        """Delete names of artifacts that are gone, and half-written name files."""
        for name in self.names():
            if not self.folder(name.kind, name.recipe).exists():
                self.remove_names(name.kind, name.recipe)
        with self._naming(), contextlib.suppress(OSError):
            for path in (self.root / "names").glob("*/.*"):
                path.unlink(missing_ok=True)
