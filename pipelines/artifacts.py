"""The store: versioned artifacts that are absent or complete, and that are verified whenever they are read.

``<store>/<kind>/<recipe>/`` holds the files and ``artifact.json``, its manifest.  The recipe is a digest of everything
that decides the result: stage, stage version, configuration and the content of all inputs.  The content is a digest of
the files.  Names with versions (``wiki@2``) are small files under ``<store>/names``; unfinished work that a second run
continues lives under ``<store>/.partial``; locks, half-built and discarded directories under ``.locks``, ``.tmp``
and ``.trash``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from guidance.errors import InputError, MachineError
from pipelines.files import (
    DigestWriter,
    Lock,
    machine_errors,
    publish_directory,
    remove_tree,
    sync_directory,
    write_file,
)

FORMAT = 1
"""Version of the manifest; a reader refuses a newer one."""

MANIFEST = "artifact.json"
MANIFEST_LIMIT = 16 << 20
ID_LENGTH = 16
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DEVICE_NAMES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


class ArtifactMissing(InputError):
    """No artifact answers to a reference."""


class ArtifactDamaged(InputError):
    """An artifact is not what its manifest says."""


class ArtifactMismatch(InputError):
    """An artifact is of another kind, format or lineage than the one that is needed."""


class ArtifactInUse(MachineError):
    """Somebody else is building or reading the artifact."""


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value: keys sorted, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the digest of itself, so that no flipped bit in it goes unnoticed."""
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return body | {"seal": digest(body)}


def parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """Read and check the bytes of a manifest.

    Raises:
        ArtifactDamaged: it is no JSON object, is altered, or names files outside its directory.
        ArtifactMismatch: it was written in a newer format.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    try:
        manifest = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
        if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
            raise ValueError("it is not a manifest")
        if manifest["format"] > FORMAT:
            raise ArtifactMismatch(
                f"{path}: made by guide {manifest.get('guide', '?')}, format {manifest['format']}; this one reads up to {FORMAT}",
                hint="upgrade attention-guide, or rerun the stage with this version",
            )
        if manifest.get("seal") != seal(manifest)["seal"]:
            raise ValueError("it was altered after it was written")
        for name in manifest["files"]:
            if not _FILE_NAME.fullmatch(name) or ".." in name.split("/"):
                raise ValueError(f"it names a file outside its directory: {name!r}")
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ArtifactDamaged(
            f"{path / MANIFEST}: {detail}", hint="rerun the stage that made it, with --force"
        ) from error


class Artifact:
    """One published artifact, open for reading; while it is open, nothing removes it."""

    def __init__(self, path: Path) -> None:
        """Open the manifest only; `verify` checks the files.

        Raises:
            ArtifactMissing: no artifact is there.
            ArtifactDamaged: the manifest is unreadable or altered.
        """
        self.path = path
        try:
            self._lock = Lock(path, shared=True)
        except OSError as error:
            raise ArtifactMissing(f"{path}: not a guide artifact ({os.strerror(error.errno or 0)})") from error
        if not stat.S_ISDIR(os.fstat(self._lock.fd).st_mode):
            self._lock.release()
            raise ArtifactMissing(f"{path}: not a guide artifact (a file, not a folder)")
        self._lock.acquire(wait=True)
        try:
            with self.open(MANIFEST) as file:
                data = file.read(MANIFEST_LIMIT + 1)
        except ArtifactDamaged as error:
            self.close()
            raise ArtifactMissing(f"{path}: not a guide artifact (it has no {MANIFEST})") from error
        if len(data) > MANIFEST_LIMIT:
            raise ArtifactDamaged(f"{path / MANIFEST}: larger than {MANIFEST_LIMIT >> 20} MiB")
        self.manifest = parse_manifest(data, path)

    kind = property(lambda self: str(self.manifest["kind"]))
    recipe = property(lambda self: str(self.manifest["recipe"]))
    content = property(lambda self: str(self.manifest["content"]))
    counts = property(lambda self: dict(self.manifest.get("counts", {})))
    files = property(lambda self: dict(self.manifest["files"]))
    provenance = property(lambda self: list(self.manifest.get("provenance", [])))

    @property
    def id(self) -> str:
        """The recipe's first digits: unique within a kind."""
        return self.recipe[:ID_LENGTH]

    @property
    def reference(self) -> str:
        """What a later command takes: ``kind/id``."""
        return f"{self.kind}/{self.id}"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(int(entry["bytes"]) for entry in self.manifest["files"].values())

    def describe(self) -> dict[str, Any]:
        """How a manifest made from this artifact names it."""
        return {"kind": self.kind, "recipe": self.recipe, "content": self.content}

    def open(self, name: str) -> IO[bytes]:
        """Open a file of the artifact; links are not followed.

        Raises:
            ArtifactDamaged: the file is missing or is not a plain file.
        """
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY) if self._lock.fd < 0 else os.dup(self._lock.fd)
        try:
            *parents, last = name.split("/")
            for parent in parents:
                inner = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise ArtifactDamaged(f"{self.path / name}: not a plain file")
            return os.fdopen(fd, "rb")
        except OSError as error:
            raise ArtifactDamaged(
                f"{self.path / name}: {os.strerror(error.errno or 0)}",
                hint="rerun the stage that made it, with --force",
            ) from error
        finally:
            os.close(folder)

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        with self.open(name) as file:
            return file.read()

    def verify(self) -> None:
        """Compare every file with its recorded size and sha256.

        Raises:
            ArtifactDamaged: a file is missing or differs; it is named.
        """
        for name, entry in self.manifest["files"].items():
            with self.open(name) as file:
                size, sha256 = os.fstat(file.fileno()).st_size, ""
                if size == entry["bytes"]:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != entry["sha256"]:
                found = f"{size} bytes, not {entry['bytes']}" if size != entry["bytes"] else "its digest differs"
                raise ArtifactDamaged(
                    f"{self.path / name}: damaged ({found})",
                    hint=f"rerun {self.manifest['stage']} with the same settings: it rebuilds what does not verify",
                )

    def strangers(self) -> list[str]:
        """Files in the directory that the manifest does not know."""
        found = {p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if not p.is_dir()}
        return sorted(found - set(self.manifest["files"]) - {MANIFEST})

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()


class Builder:
    """An artifact in the making: a private directory whose files all pass through the one writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, dict[str, Any]] = {}
        self.counts: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.provenance: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def open(self, name: str, *, rows: int | None = None) -> Iterator[DigestWriter]:
        """A new file of the artifact; ``name`` may hold one or more folders."""
        if not _FILE_NAME.fullmatch(name) or name in self.files or name == MANIFEST:
            raise ValueError(f"bad or repeated file name {name!r}")
        target = self.path / name
        with machine_errors(f"cannot create {target.parent}"):
            target.parent.mkdir(parents=True, exist_ok=True)
        with DigestWriter(target) as file:
            yield file
        self.files[name] = {"bytes": file.size, "sha256": file.sha256} | ({"rows": rows} if rows is not None else {})

    def write(self, name: str, data: bytes) -> None:
        """A file from bytes in memory."""
        with self.open(name) as file:
            file.write(data)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())

    @contextlib.contextmanager
    def parquet(self, name: str, schema: Any) -> Iterator[Any]:
        """A ``pyarrow.parquet.ParquetWriter`` with our options: same table, same row groups, same bytes."""
        import pyarrow.parquet as pq

        rows = 0
        with self.open(name) as file:
            with pq.ParquetWriter(
                file, schema, compression="zstd", write_page_checksum=True, data_page_version="2.0"
            ) as writer:
                write_table = writer.write_table

                def counted(table: Any, *args: Any, **kwargs: Any) -> None:
                    nonlocal rows
                    rows += table.num_rows
                    write_table(table, *args, **kwargs)

                writer.write_table = counted
                yield writer
        self.files[name]["rows"] = rows

    def remove(self, name: str) -> None:
        """Take back a file that was written on the way to another."""
        del self.files[name]
        (self.path / name).unlink()

    def finish(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Write the manifest, last of all files."""
        files = dict(sorted(self.files.items()))
        whole = seal(
            {
                **manifest,
                "format": FORMAT,
                "content": digest({name: entry["sha256"] for name, entry in files.items()}),
                "files": files,
                "counts": self.counts,
                "warnings": self.warnings,
                "provenance": self.provenance,
            }
        )
        with DigestWriter(self.path / MANIFEST) as file:
            file.write((json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
        return whole


@dataclass(frozen=True)
class Name:
    """One version of a name and what it stands for."""

    name: str
    version: int
    kind: str
    recipe: str
    content: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def check_name(name: str) -> str:
    """The name, if it is a good one.

    Raises:
        InputError: it could be mistaken for a path, an option or a device.
    """
    if not NAME.fullmatch(name) or _DEVICE_NAMES.fullmatch(name):
        raise InputError(
            f"bad name {name!r}", hint="up to 64 small letters, digits, dots, dashes; a letter or digit first"
        )
    return name


@dataclass(frozen=True)
class Store:
    """A directory of artifacts."""

    root: Path

    # where things are

    def place(self, kind: str, recipe: str) -> Path:
        return self.root / kind / recipe[:ID_LENGTH]

    def partial(self, kind: str, recipe: str) -> Path:
        """Where unfinished work of a recipe is kept until it is done."""
        return self.root / ".partial" / kind / recipe[:ID_LENGTH]

    def lock(self, kind: str, recipe: str) -> Lock:
        """The lock that whoever builds this recipe holds; its file is never deleted."""
        with machine_errors(f"cannot use the store {self.root}"):
            (self.root / ".locks").mkdir(parents=True, exist_ok=True)
            return Lock(self.root / ".locks" / f"{kind}-{recipe[:ID_LENGTH]}", create=True)

    # building

    def check_writable(self) -> None:
        """Fail now rather than after the work.

        Raises:
            MachineError: the store cannot be written; the message says who owns it.
        """
        with machine_errors(f"cannot write to the store {self.root}{self._owner()}"):
            (self.root / ".tmp").mkdir(parents=True, exist_ok=True)
            probe = self.root / ".tmp" / f"probe.{secrets.token_hex(4)}"
            probe.mkdir()
            probe.rmdir()

    def _owner(self) -> str:
        with contextlib.suppress(OSError):
            return f" (owned by user {self.root.stat().st_uid})"
        return ""

    @contextlib.contextmanager
    def build(self, kind: str, recipe: str, manifest: Mapping[str, Any]) -> Iterator[Builder]:
        """Build in private, then publish; on any error nothing is left.  The caller holds `lock`."""
        temporary = self.root / ".tmp" / f"{kind}-{recipe[:ID_LENGTH]}.{secrets.token_hex(4)}"
        with machine_errors(f"cannot write to the store {self.root}{self._owner()}"), self._sweeping(shared=True):
            temporary.mkdir(parents=True)
            alive = Lock(temporary)
            alive.acquire(wait=False)
        try:
            builder = Builder(temporary)
            yield builder
            builder.finish({**manifest, "kind": kind, "recipe": recipe})
            publish_directory(temporary, self.place(kind, recipe), trash=self.root / ".trash")
            self._sweep(self.root / ".trash")
        finally:
            alive.release()
            remove_tree(temporary)

    # names

    def names(self) -> list[Name]:
        """All versions of all names, oldest first within a name."""
        found = []
        for entry in sorted((self.root / "names").glob("*/*")):
            with contextlib.suppress(OSError, ValueError, KeyError):
                data = json.loads(entry.read_bytes())
                found.append(
                    Name(entry.parent.name, int(entry.name), data["kind"], data["recipe"], data["content"])
                )
        return sorted(found, key=lambda n: (n.name, n.version))

    def add_name(self, name: str, artifact: Artifact) -> Name:
        """Make ``artifact`` the newest version of ``name``; nothing changes when it already is.

        Raises:
            InputError: a bad name, or one that belongs to another kind.
        """
        versions = [n for n in self.names() if n.name == check_name(name)]
        if versions and versions[-1].kind != artifact.kind:
            raise InputError(
                f"the name {name!r} is taken by a {versions[-1].kind}; this is a {artifact.kind}",
                hint="choose another name, or `guide rename` the old one",
            )
        newest = versions[-1] if versions else None
        if newest and (newest.recipe, newest.content) == (artifact.recipe, artifact.content):
            return newest
        version = newest.version + 1 if newest else 1
        write_file(self.root / "names" / name / str(version), canonical_json(artifact.describe()))
        return Name(name, version, artifact.kind, artifact.recipe, artifact.content)

    def rename(self, old: str, new: str) -> None:
        """Give all versions of a name another name."""
        source, target = self.root / "names" / check_name(old), self.root / "names" / check_name(new)
        if not source.is_dir():
            raise ArtifactMissing(f"no name {old!r} in {self.root}", hint="`guide ls` lists them")
        if target.exists():
            raise InputError(f"the name {new!r} exists already")
        with machine_errors(f"cannot rename {old!r}"):
            os.rename(source, target)
            sync_directory(target.parent)

    # reading

    def artifacts(self) -> Iterator[Artifact]:
        """Every readable artifact; damaged ones are passed over."""
        for folder in sorted(self.root.glob("[a-z]*/*/")):
            if folder.parent.name != "names":
                with contextlib.suppress(InputError):
                    yield Artifact(folder)

    def find(self, reference: str) -> Path:
        """The directory that a reference names: ``name``, ``name@n``, ``kind/id``, an id's first digits, or a path.

        Raises:
            ArtifactMissing: nothing, or more than one artifact, answers to it.
        """
        if (Path(reference) / MANIFEST).exists():
            return Path(reference)
        name, _, version = reference.partition("@")
        versions = [n for n in self.names() if n.name == name and version in ("", str(n.version))]
        if versions:
            return self.place(versions[-1].kind, versions[-1].recipe)
        kind, _, prefix = reference.rpartition("/")
        if re.fullmatch(r"[0-9a-f]{4,64}", prefix) and re.fullmatch(r"[a-z]*", kind):
            found = [
                p for p in self.root.glob(f"{kind or '[a-z]*'}/{prefix[:ID_LENGTH]}*") if p.parent.name != "names"
            ]
            if len(found) == 1:
                return found[0]
            if found:
                raise ArtifactMissing(
                    f"{reference!r} could be any of {', '.join(f'{p.parent.name}/{p.name}' for p in found)}"
                )
        if Path(reference).exists():
            raise ArtifactMissing(f"{reference!r}: not a guide artifact (it has no {MANIFEST})")
        raise ArtifactMissing(
            f"no artifact {reference!r} in {self.root}",
            hint="`guide ls` lists what there is; --store or GUIDE_STORE names another store",
        )

    def load(self, reference: str, *, kind: str | tuple[str, ...] | None = None, verify: bool = True) -> Artifact:
        """Open an artifact and check every file of it.

        Raises:
            ArtifactMissing, ArtifactDamaged: see `find` and `Artifact.verify`.
            ArtifactMismatch: it is not of the ``kind`` that is needed.
        """
        artifact = Artifact(self.find(reference))
        kinds = (kind,) if isinstance(kind, str) else kind
        if kinds and artifact.kind not in kinds:
            raise ArtifactMismatch(f"{reference!r} is a {artifact.kind} artifact; needed is a {' or '.join(kinds)}")
        if verify:
            artifact.verify()
        return artifact

    # looking after it

    def users(self, artifact: Artifact) -> list[Artifact]:
        """The artifacts that were made from this one."""
        return [
            other
            for other in self.artifacts()
            if any(i.get("recipe") == artifact.recipe for i in other.manifest.get("inputs", {}).values())
        ]

    def remove(self, artifact: Artifact) -> None:
        """Remove an artifact and the names that stand for it.

        Raises:
            ArtifactInUse: somebody is reading it.
        """
        artifact.close()
        lock = Lock(artifact.path)
        try:
            if not lock.acquire(wait=False):
                raise ArtifactInUse(f"{artifact.reference} is being read", hint="try again when that run has ended")
            trash = self.root / ".trash" / f"{artifact.kind}-{artifact.id}.{secrets.token_hex(4)}"
            with machine_errors(f"cannot remove {artifact.reference}"):
                trash.parent.mkdir(exist_ok=True)
                os.rename(artifact.path, trash)
        finally:
            lock.release()
        for name in self.names():
            if (name.kind, name.recipe) == (artifact.kind, artifact.recipe):
                (self.root / "names" / name.name / str(name.version)).unlink(missing_ok=True)
        self._sweep(self.root / ".trash")

    @contextlib.contextmanager
    def _sweeping(self, *, shared: bool) -> Iterator[None]:
        """Keep sweepers away (shared) from directories that are made but not yet locked."""
        (self.root / ".locks").mkdir(parents=True, exist_ok=True)
        lock = Lock(self.root / ".locks" / "sweep", shared=shared, create=True)
        lock.acquire(wait=True)
        try:
            yield
        finally:
            lock.release()

    def _sweep(self, folder: Path, *, dry_run: bool = False) -> list[Path]:
        """Delete the directories in ``folder`` that no living process holds."""
        gone: list[Path] = []
        if not folder.is_dir() or not any(folder.iterdir()):
            return gone
        with self._sweeping(shared=False):
            for path in sorted(folder.iterdir()):
                try:
                    lock = Lock(path)
                except OSError:
                    continue
                if lock.acquire(wait=False):
                    gone.append(path)
                    if not dry_run:
                        remove_tree(path)
                lock.release()
        return gone

    def sweep(self) -> list[Path]:
        """Delete what crashed runs left half-built or half-deleted."""
        return self._sweep(self.root / ".tmp") + self._sweep(self.root / ".trash")

    def collect(self, *, unnamed: bool = False, dry_run: bool = False) -> list[Path]:
        """Delete what crashed runs left, and with ``unnamed`` every artifact that no name reaches.

        Unfinished work under ``.partial``, named artifacts, their inputs, and whatever is being read are spared.
        """
        gone = self._sweep(self.root / ".tmp", dry_run=dry_run) + self._sweep(self.root / ".trash", dry_run=dry_run)
        if not unnamed:
            return gone
        manifests = {(a.kind, a.recipe): a.manifest for a in self.artifacts()}
        wanted = {(n.kind, n.recipe) for n in self.names()}
        pending = list(wanted)
        while pending:
            for parent in manifests.get(pending.pop(), {}).get("inputs", {}).values():
                key = (parent.get("kind"), parent.get("recipe"))
                if key in manifests and key not in wanted:
                    wanted.add(key)
                    pending.append(key)
        for kind, recipe in manifests.keys() - wanted:
            path = self.place(kind, recipe)
            try:
                if not dry_run:
                    self.remove(Artifact(path))
                gone.append(path)
            except (ArtifactInUse, ArtifactMissing):
                continue
        return gone
