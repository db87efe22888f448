"""The store: versioned artifacts that are either absent or complete, and are verified when they are read.

``<store>/<kind>/<recipe>/`` holds the files of an artifact and its manifest, ``artifact.json``.  The recipe is a
digest of everything that determines the result: stage, stage version, configuration and the content of all
inputs.  The content is a digest of the files.  Names with versions (``wiki@2``) are small files under
``<store>/names``.  Unfinished work that a later run continues is under ``<store>/.partial``, and the name that its
artifact will get is in a file beside it; locks, half-built and discarded directories are under ``.locks``, ``.tmp`` and
``.trash``.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guidance.errors import InputError, MachineError, did_you_mean
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact, Builder
from pipelines.storage.files import Lock, machine_errors, publish_directory, remove_tree, sync_directory, write_file
from pipelines.storage.manifest import (
    DRY,
    ID,
    ID_LENGTH,
    KIND,
    MANIFEST,
    ArtifactAmbiguous,
    ArtifactDamaged,
    ArtifactMismatch,
    ArtifactMisplaced,
    ArtifactMissing,
    canonical_json,
)
from pipelines.storage.names import NAME, Name, check_name, read_name

_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_DOWNLOADS_NOTHING = "guide downloads nothing: `hf download NAME --local-dir FOLDER` fetches a model of the hub"


def _entries(folder: Path) -> list[str]:
    """What a folder holds, sorted; nothing if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


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
        return self._lock(self._lock_file(kind, recipe).name, shared=shared)

    def is_being_built(self, kind: str, recipe: str) -> bool:
        """Whether a process is building the artifact of a recipe now."""
        try:
            lock = Lock(self._lock_file(kind, recipe), shared=True)
        except FileNotFoundError:
            return False
        with lock:
            return not lock.acquire(wait=False)

    def _lock_file(self, kind: str, recipe: str) -> Path:
        return self.root / ".locks" / f"{kind}-{recipe[:ID_LENGTH]}"

    def _lock(self, name: str, *, shared: bool = False) -> Lock:
        with machine_errors(f"cannot use the store {self.root}"):
            (self.root / ".locks").mkdir(parents=True, exist_ok=True)
            return Lock(self.root / ".locks" / name, shared=shared, create=True)

    # building

    def existing(self, kind: str, recipe: str, *, verify: bool = True, otherwise: str = "building") -> Artifact | None:
        """The artifact of a recipe, if it exists and is valid.  A warning tells of a damaged one.  Raises InputError if its path
        holds something else, which not even ``--force`` may replace, and ArtifactMisplaced if the folder holds another
        artifact, which is not to be lost.

        Args:
            verify: whether to check its files.
            otherwise: for the warning, what is done again, such as ``building``.
        """
        path = self.folder(kind, recipe)
        try:
            artifact = self.open(path)
            try:
                if artifact.recipe != recipe:
                    raise ArtifactDamaged(f"{path}: holds an artifact of another recipe, {artifact.recipe}")
                if verify:
                    artifact.verify()
                return artifact
            except BaseException:
                artifact.close()
                raise
        except ArtifactMisplaced:
            raise
        except ArtifactMissing:
            if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
                raise InputError(f"{path} is in the way and is not a guide artifact", hint="move it away") from None
            return None
        except ArtifactDamaged as error:
            log.warning("%s; %s it again", error.message, otherwise)
            return None

    def check_writable(self) -> None:
        """Fail now rather than after the work: with InputError if the store is a file, and MachineError, which names its owner, if
        it cannot be written."""
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
                    self.sweep()

    @contextlib.contextmanager
    def build(self, kind: str, recipe: str, manifest: Mapping[str, Any]) -> Iterator[Builder]:
        """Build in a private directory, then publish; an error leaves nothing behind.  The caller holds `lock`."""
        with self.private(kind, recipe) as temporary:
            builder = Builder(temporary)
            yield builder
            builder.finish({**manifest, "kind": kind, "recipe": recipe})
            publish_directory(temporary, self.folder(kind, recipe), trash=self.root / ".trash")
        self.sweep()

    @contextlib.contextmanager
    def _sweeping(self, *, shared: bool) -> Iterator[None]:
        """The sweep lock.  Held shared, it protects new directories until they are locked themselves."""
        with self._lock("sweep", shared=shared) as lock:
            lock.acquire(wait=True)
            yield

    def sweep(self, *, dry_run: bool = False) -> list[Path]:
        """Delete half-built and half-deleted directories of crashed runs, which no process has locked; returns them, and with
        ``dry_run`` only that."""
        removed = []
        for folder in (self.root / ".tmp", self.root / ".trash"):
            if not _entries(folder):
                continue
            with self._sweeping(shared=False):
                for path in sorted(folder.iterdir()):
                    try:
                        lock = Lock(path)
                    except OSError:
                        continue
                    with lock:
                        if lock.acquire(wait=False):
                            removed.append(path)
                            if not dry_run:
                                remove_tree(path)
        return removed

    # names

    def name_of(self, kind: str, recipe: str) -> str:
        """The name that an artifact was given last, or else its id."""
        names = [name for name in self.names() if (name.kind, name.recipe) == (kind, recipe)]
        return str(max(names, key=self._given_at)) if names else f"{kind}/{self.folder(kind, recipe).name}"

    def _given_at(self, name: Name) -> tuple[int, int]:
        """When a name was given, in nanoseconds, and its version, which decides between equal times."""
        with contextlib.suppress(OSError):  # it may be removed at the same time
            return (self.root / "names" / name.name / str(name.version)).stat().st_mtime_ns, name.version
        return 0, name.version

    def names(self) -> list[Name]:
        """All versions of all names, oldest first within a name."""
        return [version for name in _entries(self.root / "names") for version in self.versions(name)]

    def versions(self, name: str) -> list[Name]:
        """All versions of a name, oldest first; none if there is no such name."""
        if not NAME.fullmatch(name):
            return []
        folder = self.root / "names" / name
        versions = [version for entry in _entries(folder) if (version := read_name(folder / entry)) is not None]
        return sorted(versions, key=lambda version: version.version)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Hold the lock under which names are changed."""
        with self._lock("names") as lock:
            lock.acquire(wait=True)
            yield

    def check_name_free(self, name: str, kind: str) -> Name | None:
        """Check that an artifact of this kind may get the name; returns the newest version, if there is one.  Raises
        InputError if the name is invalid, or belongs to another kind."""
        check_name(name)
        versions = self.versions(name)
        if versions and versions[-1].kind != kind:
            raise InputError(
                f"the name {name!r} belongs to artifacts of kind {versions[-1].kind}; this one is of kind {kind}",
                hint="choose another name, or `guide rename` the old one",
            )
        return versions[-1] if versions else None

    def add_name(self, name: str, artifact: Artifact) -> Name:
        """Make ``artifact`` the newest version of ``name``, unless it already is.  Raises InputError if the name is
        invalid, or belongs to another kind."""
        with self.naming():
            newest = self.check_name_free(name, artifact.kind)
            if newest and newest.refers_to(artifact):
                return newest
            version = newest.version + 1 if newest else 1
            write_file(self.root / "names" / name / str(version), canonical_json(artifact.describe()))
        return Name(name, version, artifact.kind, artifact.recipe, artifact.content)

    def rename(self, old: str, new: str) -> None:
        """Rename all versions of a name.  Raises InputError if a name is invalid, the old one does not exist, or the
        new one does."""
        source, target = self.root / "names" / check_name(old), self.root / "names" / check_name(new)
        if not source.is_dir():
            raise ArtifactMissing(f"no name {old!r} in {self.root}", hint="`guide ls` lists them")
        with self.naming(), machine_errors(f"cannot rename {old!r}"):
            if not self.versions(old):
                raise ArtifactMissing(f"no name {old!r} in {self.root}", hint="`guide ls` lists them")
            if self.versions(new):
                raise InputError(f"the name {new!r} exists already")
            os.rename(source, target)  # the target may be an empty folder
            sync_directory(target.parent)

    def remove_names(self, unwanted: Callable[[Name], bool]) -> None:
        """Delete some versions of names."""
        with self.naming(), machine_errors("cannot remove a name"):
            for name in filter(unwanted, self.names()):
                folder = self.root / "names" / name.name
                (folder / str(name.version)).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    folder.rmdir()

    # reading

    def open(self, folder: Path) -> Artifact:
        """Open an artifact of the store, or a copy of one elsewhere; `Artifact.verify` checks its files.

        Raises:
            ArtifactMissing, ArtifactDamaged: see `Artifact`.
            ArtifactMisplaced: the folder is called by the id, or in the store by the kind, of another artifact.  Any
                other name is fine for a copy.
        """
        artifact = Artifact(folder)
        path = Path(os.path.abspath(folder))
        is_other = ID.fullmatch(path.name) is not None and path.name != artifact.id
        if is_other or (path.parent.name != artifact.kind and self.holds(folder)):
            artifact.close()
            home = self.folder(artifact.kind, artifact.recipe)
            raise ArtifactMisplaced(
                f"{folder}: holds {artifact.reference}; the folder was renamed, or swapped with another",
                hint=f"rename it to {home}" + (", and what is there now likewise" if os.path.lexists(home) else ""),
            )
        return artifact

    def holds(self, folder: Path) -> bool:
        """Whether a path, however it is written, is that of an artifact in this store."""
        path = Path(os.path.realpath(folder))
        return path.parent.parent == Path(os.path.realpath(self.root)) and self.is_folder(path)

    @staticmethod
    def is_folder(path: Path) -> bool:
        """Whether a folder of the store may hold an artifact, by its name."""
        return KIND.fullmatch(path.parent.name) is not None and ID.fullmatch(path.name) is not None

    def artifacts(self) -> Iterator[Artifact]:
        """Every readable artifact; damaged and misplaced ones are skipped."""
        for folder in self.folders():
            with contextlib.suppress(InputError):
                yield self.open(folder)

    def folders(self, kind: str | None = None) -> list[Path]:
        """The folders of all artifacts, or of those of a kind; damaged ones included."""
        kinds = [name for name in _entries(self.root) if KIND.fullmatch(name) and kind in (None, name)]
        return [self.root / kind / id for kind in kinds for id in _entries(self.root / kind) if ID.fullmatch(id)]

    def named(self, reference: str) -> Name | None:
        """The version that ``name`` or ``name@n`` refers to; None if there is none."""
        name, _, version = reference.partition("@")
        versions = [known for known in self.versions(name) if version in ("", str(known.version))]
        return versions[-1] if versions else None

    def find(self, reference: str, kind: str | None = None) -> Path:
        """The folder that a reference names: ``name``, ``name@n``, ``kind/id``, an id prefix, or a path.

        Args:
            kind: what is looked for, for the hint; the artifact may be of another kind.

        Raises:
            ArtifactMissing: no artifact matches.
            ArtifactAmbiguous: more than one does.
        """
        if os.path.exists(os.path.join(reference, MANIFEST)):
            return Path(reference)
        if reference.startswith(DRY):
            raise ArtifactMissing(
                f"{reference!r} is what a dry run says of an artifact that does not exist yet",
                hint="run the command that printed it without --dry-run; only --dry-run takes it",
            )
        named = self.named(reference)
        if named:
            folder = self.folder(named.kind, named.recipe)
            if not folder.exists():
                raise ArtifactMissing(f"{reference!r} refers to {named.kind}/{named.recipe[:ID_LENGTH]}, which is gone")
            return folder
        group, _, prefix = reference.rpartition("/")
        if _PREFIX.fullmatch(prefix):
            fitting = [folder for folder in self.folders(group or None) if folder.name.startswith(prefix[:ID_LENGTH])]
            if fitting:
                return _only(reference, fitting)
        if os.path.exists(reference):
            is_model = os.path.exists(os.path.join(reference, "config.json"))
            raise ArtifactMissing(
                f"{reference!r}: {'a model folder, ' if is_model else ''}not a guide artifact (it has no {MANIFEST})",
                hint="`guide build-corpus` makes one of text, `guide build-dataset` one of labelled examples"
                + ("; a model goes where a command says MODEL, or after --init" if is_model else ""),
            )
        if unfinished := self.find_unfinished(None, reference):
            raise ArtifactMissing(
                f"{reference!r} is not finished: {unfinished.parent.name}/{unfinished.name} in {self.root}",
                hint="the command that began it continues it; `guide show` says how far it is",
            )
        more = f"\n{_DOWNLOADS_NOTHING}" if kind == "model" else ""
        if "/" in reference and not (KIND.fullmatch(group) and _PREFIX.fullmatch(prefix)):
            raise ArtifactMissing(
                f"there is no folder or file {reference!r}",
                hint="`guide ls` lists the names of artifacts, which need no path" + more,
            )
        newest = self.named(reference.partition("@")[0])  # if only the version is wrong
        guess = (
            f"; the newest is {str(newest)!r}" if newest else did_you_mean(reference, {n.name for n in self.names()})
        )
        sought = "file and no artifact" if "." in reference else "artifact"  # names may have a point, files mostly do
        raise ArtifactMissing(
            f"no {sought} {reference!r} in {self.root}{guess}",
            hint="`guide ls` lists all artifacts; choose another store with --store or GUIDE_STORE" + more,
        )

    def load(self, reference: str, *, kind: str | None = None, verify: bool = True) -> Artifact:
        """Open an artifact and verify all its files.

        Raises:
            ArtifactMissing, ArtifactDamaged: see `find`, `open` and `Artifact.verify`.
            ArtifactMismatch: it is not of the given ``kind``.
        """
        with contextlib.ExitStack() as opened:
            artifact = opened.enter_context(self.open(self.find(reference, kind)))
            self._check(artifact, reference, kind)
            if verify:
                artifact.verify()
            opened.pop_all()  # the caller closes it
        return artifact

    def _check(self, artifact: Artifact, reference: str, kind: str | None) -> None:
        """Raise what `load` raises unless the artifact is of the kind, and has the content that was named."""
        named = self.named(reference)
        if named and named.recipe == artifact.recipe and named.content != artifact.content:
            if "@" in reference:
                raise ArtifactMissing(
                    f"{reference!r} is gone: {artifact.reference} was built again with different content",
                    hint=f"use `{named.kind}/{named.recipe[:ID_LENGTH]}` for the new content",
                )
            log.warning("%s was built again with different content since it was named %s", artifact.reference, named)
        if kind not in (None, artifact.kind):
            raise ArtifactMismatch(
                f"{reference!r} is an artifact of kind {artifact.kind}; expected: {kind}",
                hint=f"`guide ls --kind {kind}` lists those",
            )

    def load_input(self, artifact: Artifact, role: str, *, verify: bool = True) -> Artifact:
        """An input of an artifact, with the same content as when the artifact was built.  Raises ArtifactMissing if the
        input is gone, or has been rebuilt with other content."""
        known = artifact.manifest.get("inputs", {}).get(role, {})
        reference = f"{known.get('kind', role)}/{str(known.get('recipe', ''))[:16]}"
        try:
            source = self.load(reference, verify=verify)
        except ArtifactMissing as error:
            raise ArtifactMissing(
                f"{artifact.reference} was made from {reference}, which is not in {self.root}",
                hint="built again from the same text, it gets the same id",
            ) from error
        if source.content != known.get("content"):
            raise ArtifactMissing(
                f"{source.reference} was rebuilt with other content after {artifact.reference} was built from it",
                hint=f"build the {artifact.kind} again",
            )
        return source

    # unfinished work

    def unfinished(self) -> list[Path]:
        """The folders of unfinished work, which the same command would continue."""
        root = self.root / ".partial"
        folders = [root / kind / id for kind in _entries(root) for id in _entries(root / kind) if ID.fullmatch(id)]
        return [folder for folder in folders if folder.is_dir()]

    def unfinished_name(self, folder: Path) -> str | None:
        """The name that unfinished work will give its artifact; None if it was begun without a name."""
        try:
            return check_name(self._name_file(folder).read_text())
        except (OSError, ValueError, InputError):
            return None

    @staticmethod
    def _name_file(folder: Path) -> Path:
        return folder.with_name(f"{folder.name}.name")

    def begin(self, kind: str, recipe: str, name: str | None) -> None:
        """Note which name a run will give its artifact, in case it is interrupted.  The caller holds `lock`."""
        file = self._name_file(self.partial(kind, recipe))
        if name:
            write_file(file, name.encode())
        else:
            file.unlink(missing_ok=True)

    def find_unfinished(self, kind: str | None, reference: str) -> Path | None:
        """The folder of unfinished work with this ``kind/id``, id prefix or name, of any kind if ``kind`` is None; None if
        there is none.  Raises ArtifactAmbiguous if more than one matches."""
        given, _, rest = reference.rpartition("/")
        folders = [f for f in self.unfinished() if kind in (None, f.parent.name) and given in ("", f.parent.name)]
        fitting = [] if given else [folder for folder in folders if self.unfinished_name(folder) == rest]
        if not fitting and _PREFIX.fullmatch(rest):
            fitting = [folder for folder in folders if folder.name.startswith(rest[:ID_LENGTH])]
        return _only(reference, fitting) if fitting else None

    def forget_unfinished(self, kind: str, recipe: str) -> None:
        """Remove the leftovers of a finished recipe, unless another run is working on it again."""
        if self.partial(kind, recipe).exists():
            with self.lock(kind, recipe) as lock:
                if lock.acquire(wait=False):
                    remove_tree(self.partial(kind, recipe))


def _only(reference: str, folders: Sequence[Path]) -> Path:
    """The only one of some folders; raises ArtifactAmbiguous if there are more."""
    if len(folders) > 1:
        matches = ", ".join(f"{folder.parent.name}/{folder.name}" for folder in folders)
        raise ArtifactAmbiguous(f"{reference!r} is ambiguous; it matches {matches}", hint="give more digits of the id")
    return folders[0]
