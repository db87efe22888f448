"""Published artifacts, which are verified when they are read, and artifacts under construction."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.lazy import pa, pq
from pipelines.storage.files import DigestWriter, Lock, machine_error, machine_errors
from pipelines.storage.manifest import (
    FILE_NAME,
    FORMAT,
    ID_LENGTH,
    MANIFEST,
    MANIFEST_LIMIT,
    ArtifactDamaged,
    ArtifactMissing,
    content_of,
    parse_manifest,
    seal,
)
from pipelines.storage.tables import Columns, schema_of

_WRONG_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""Errors that mean the path is wrong; all others are failures of the machine."""


class Artifact:
    """One published artifact, open for reading; while it is open, it cannot be removed."""

    def __init__(self, path: Path) -> None:
        """Read the manifest only; `verify` checks the files.  Raises ArtifactMissing if there is no artifact at this
        path, and ArtifactDamaged if the manifest is unreadable or altered."""
        self.path = path
        try:
            self._lock = self._lock_folder(path)
            try:
                with self.open(MANIFEST) as file:
                    data = file.read(MANIFEST_LIMIT + 1)
            except ArtifactDamaged as error:
                raise ArtifactMissing(f"{path}: not a guide artifact (it has no {MANIFEST})") from error
            if len(data) > MANIFEST_LIMIT:
                raise ArtifactDamaged(f"{path / MANIFEST}: larger than {MANIFEST_LIMIT >> 20} MiB")
            self.manifest = parse_manifest(data, path)
        except BaseException:
            if hasattr(self, "_lock"):
                self.close()
            raise

    @staticmethod
    def _lock_folder(path: Path) -> Lock:
        """A shared lock on the directory at ``path``; retried if another run replaced the directory while we waited."""
        while True:
            try:
                lock = Lock(path, shared=True)
            except OSError as error:
                if error.errno not in _WRONG_PATH:
                    raise machine_error(f"cannot open {path}", error) from error
                raise ArtifactMissing(f"{path}: not a guide artifact ({os.strerror(error.errno or 0)})") from error
            if not stat.S_ISDIR(os.fstat(lock.fd).st_mode):
                lock.release()
                raise ArtifactMissing(f"{path}: not a guide artifact (a file, not a folder)")
            try:
                lock.acquire(wait=True)
                if lock.in_place():
                    return lock
            except BaseException:
                lock.release()
                raise
            lock.release()

    kind = property(lambda self: str(self.manifest["kind"]))
    recipe = property(lambda self: str(self.manifest["recipe"]))
    content = property(lambda self: str(self.manifest["content"]))
    counts = property(lambda self: dict(self.manifest.get("counts", {})))
    files = property(lambda self: dict(self.manifest["files"]))
    provenance = property(lambda self: list(self.manifest.get("provenance", [])))

    @property
    def id(self) -> str:
        """The first digits of the recipe; unique within a kind."""
        return str(self.recipe)[:ID_LENGTH]

    @property
    def reference(self) -> str:
        """``kind/id``, as later commands take it."""
        return f"{self.kind}/{self.id}"

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(int(entry["bytes"]) for entry in self.manifest["files"].values())

    def describe(self) -> dict[str, Any]:
        """Its entry in the manifests of artifacts made from it."""
        return {"kind": self.kind, "recipe": self.recipe, "content": self.content}

    def open(self, name: str) -> io.BufferedReader:
        """Open a file of the artifact, without following links.  Raises ArtifactDamaged if the file is missing or not a
        plain file."""
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
            if error.errno not in _WRONG_PATH:
                raise machine_error(f"cannot read {self.path / name}", error) from error
            raise ArtifactDamaged(
                f"{self.path / name}: {os.strerror(error.errno or 0)}", hint="rerun the stage that made it with --force"
            ) from error
        finally:
            os.close(folder)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        with self.open(name) as file:
            return file.read()

    def verify(self, *names: str) -> None:
        """Compare the given files, by default all, with their recorded size and sha256.  Raises ArtifactDamaged if a file
        is missing, differs or is not in the manifest; the message names it."""
        for name in names or self.manifest["files"]:
            entry = self.manifest["files"].get(name)
            if entry is None:
                raise ArtifactDamaged(f"{self.path / name}: not in the manifest")
            with self.open(name) as file:
                size, sha256 = os.fstat(file.fileno()).st_size, ""
                if size == entry["bytes"]:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != entry["sha256"]:
                problem = f"{size} bytes, not {entry['bytes']}" if size != entry["bytes"] else "its digest differs"
                raise ArtifactDamaged(
                    f"{self.path / name}: damaged ({problem})",
                    hint=f"rerun {self.manifest['stage']} with the same settings; it rebuilds damaged artifacts",
                )

    def in_place(self) -> bool:
        """False once another directory has replaced the one that was opened."""
        return self._lock.fd < 0 or self._lock.in_place()

    def unlisted_files(self) -> list[str]:
        """Files in the directory that the manifest does not list."""
        return sorted(self._present() - set(self.manifest["files"]) - {MANIFEST})

    def missing_files(self) -> list[str]:
        """Files that the manifest lists and that are gone."""
        return sorted(set(self.manifest["files"]) - self._present())

    def _present(self) -> set[str]:
        """The names of the files and links in the directory."""
        present = set()
        for folder, folders, files in os.walk(self.path):
            links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
            inside = os.path.relpath(folder, self.path)
            present |= {name if inside == "." else f"{inside}/{name}" for name in (*files, *links)}
        return present

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
    """An artifact under construction: a private directory; all its files go through `DigestWriter`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, dict[str, Any]] = {}
        self.counts: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.provenance: list[dict[str, Any]] = []
        self.seconds_before = 0.0  # spent by earlier runs on the work that this run continues

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[DigestWriter]:
        """Open a new file of the artifact; ``name`` may contain folders."""
        if not FILE_NAME.fullmatch(name) or name in self.files or name == MANIFEST:
            raise ValueError(f"bad or repeated file name {name!r}")
        target = self.path / name
        with machine_errors(f"cannot create {target.parent}"):
            target.parent.mkdir(parents=True, exist_ok=True)
        with DigestWriter(target) as file:
            yield file
        self.files[name] = {"bytes": file.size, "sha256": file.sha256}

    def write(self, name: str, data: bytes) -> None:
        """Write a file from bytes in memory."""
        with self.open(name) as file:
            file.write(data)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())

    @contextlib.contextmanager
    def parquet(self, name: str, schema: Any) -> Iterator[Any]:
        """A ``pyarrow.parquet.ParquetWriter`` whose fixed options give the same bytes for the same row groups."""
        # without dictionaries, columns of numbers are smaller and take a third less time to write
        strings = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_dictionary(f.type)]
        rows = 0
        with self.open(name) as file:
            with pq.ParquetWriter(
                file,
                schema,
                compression="zstd",
                use_dictionary=strings,
                write_page_checksum=True,
                data_page_version="2.0",
            ) as writer:
                write_table = writer.write_table

                def counted(table: Any, *args: Any, **kwargs: Any) -> None:
                    nonlocal rows
                    rows += table.num_rows
                    write_table(table, *args, **kwargs)

                writer.write_table = counted
                yield writer
        self.files[name]["rows"] = rows

    def write_rows(
        self,
        name: str,
        columns: Columns,
        rows: Sequence[Mapping[str, Any]],
        *,
        may_be_null: Container[str] = (),
    ) -> None:
        """Write a table from rows in memory; see `schema_of` for its columns."""
        schema = schema_of(columns, may_be_null)
        with self.parquet(name, schema) as writer:
            writer.write_table(pa.Table.from_pylist(list(rows), schema))

    def remove(self, name: str) -> None:
        """Delete a file that is no longer needed."""
        del self.files[name]
        (self.path / name).unlink()

    def finish(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Write the manifest, after all other files."""
        files = dict(sorted(self.files.items()))
        whole = seal(
            {
                **manifest,
                "format": FORMAT,
                "content": content_of(files),
                "files": files,
                "counts": self.counts,
                "warnings": self.warnings,
                "provenance": self.provenance,
            }
        )
        with DigestWriter(self.path / MANIFEST) as file:
            file.write((json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
        return whole
