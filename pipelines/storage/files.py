"""Writing to the store: one writer that hashes, one rename that publishes, one kind of lock.

A directory is built under a private name, each file is fsynced when it is closed, and one rename publishes the whole.
Readers therefore see all of it or nothing, even if the process dies at any moment.

Tests inject faults by name: ``GUIDE_FAILPOINT=write:3:kill`` kills the process at the third write,
``rename:ENOSPC`` makes the first rename fail with that error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import io
import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from guidance.errors import InputError, MachineError
from pipelines.lazy import pq

_failpoint_hits: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Die or fail here if ``GUIDE_FAILPOINT`` (``name[:n]:kill|term|int|ERRNO``) says so; otherwise do nothing."""
    request = os.environ.get("GUIDE_FAILPOINT")
    if not request:
        return
    wanted, _, rest = request.partition(":")
    if wanted != name:
        return
    count, _, action = rest.rpartition(":")
    _failpoint_hits[name] = _failpoint_hits.get(name, 0) + 1
    if _failpoint_hits[name] != int(count or 1):
        return
    if action in ("kill", "term", "int"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}[action])
    else:
        raise OSError(getattr(errno, action), os.strerror(getattr(errno, action)))


@contextlib.contextmanager
def machine_errors(action: str) -> Iterator[None]:
    """Turn any OSError raised inside into a MachineError that begins with ``action``."""
    try:
        yield
    except OSError as error:
        raise machine_error(action, error) from error


def machine_error(action: str, error: OSError) -> MachineError:
    """The MachineError for a failed system call, with a hint that fits the error number."""
    hints = {
        errno.ENOSPC: "free some space, or choose another store with --store or GUIDE_STORE",
        errno.EDQUOT: "your quota is used up; choose another store with --store or GUIDE_STORE",
        errno.EFBIG: "raise the file size limit (ulimit -f)",
        errno.EROFS: "the file system is read-only; another store is chosen with --store or GUIDE_STORE",
        errno.EACCES: "write to another folder; another store is chosen with --store or GUIDE_STORE",
        errno.EMFILE: "too many open files; raise ulimit -n",
        errno.ENOLCK: "this file system does not support locks (flock); put the store on one that does",
    }
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ENOSPC:
        reason = "no space left on device"
    return MachineError(f"{action}: {reason}", hint=hints.get(error.errno or 0))


class DigestWriter(io.RawIOBase):
    """A new file that hashes what is written to it, and is fsynced when it is closed.

    Attributes:
        size: bytes written so far.
        sha256: their digest, in hexadecimal.
    """

    def __init__(self, path: Path, called: Path | None = None) -> None:
        """``called`` is its name in messages, if it is written under another."""
        super().__init__()
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._fd = -1
        with machine_errors(f"cannot create {called or path}"):
            failpoint("open")
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with machine_errors(f"cannot write {self.path}"):
            failpoint("write")
            rest = view
            while len(rest):
                rest = rest[os.write(self._fd, rest) :]
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            with machine_errors(f"cannot save {self.path}"):
                failpoint("fsync")
                os.fsync(fd)
        finally:
            os.close(fd)
            super().close()

    def abandon(self) -> None:
        """Close without fsync, after an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().close()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        self.abandon()


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        failpoint("fsync")
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically: under a temporary name, then one rename."""
    with machine_errors(f"cannot save {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        with DigestWriter(temporary, called=path) as file:
            file.write(data)
        with machine_errors(f"cannot save {path}"):
            failpoint("rename")
            os.replace(temporary, path)
            sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def publish_directory(temporary: Path, final: Path, *, trash: Path | None) -> None:
    """Give a finished directory its public name with one rename.

    An existing directory of that name is moved to ``trash``; if ``trash`` is None, it is an error.  Raises MachineError if
    the rename failed; the caller removes the temporary directory.
    """
    with machine_errors(f"cannot publish {final}"):
        final.parent.mkdir(parents=True, exist_ok=True)
        for folder in sorted({p.parent for p in temporary.rglob("*")} | {temporary}, reverse=True):
            sync_directory(folder)
        failpoint("rename")
        if trash and os.path.lexists(final):
            _exchange(temporary, final)
            trash.mkdir(parents=True, exist_ok=True)
            os.rename(temporary, trash / temporary.name)
        else:
            os.rename(temporary, final)
        sync_directory(final.parent)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name with one rename when the block has ended; after an error nothing is left.
    Raises InputError if a folder of this name exists and is not empty, and MachineError if it cannot be written."""
    folder = folder.absolute()
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{str(folder)!r} exists already", hint="choose a new folder")
    temporary = folder.with_name(f".{folder.name[:200]}.{secrets.token_hex(4)}")
    with machine_errors(f"cannot write to {folder.parent}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        yield temporary
        publish_directory(temporary, folder, trash=None)
    finally:
        if temporary.exists():
            remove_tree(temporary)


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories: atomically if the kernel can (Linux ``RENAME_EXCHANGE``), otherwise by three renames."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        renameat2 = None
    if renameat2 and not renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange):
        return
    aside = one.with_name(one.name + ".old")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except BaseException:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


class Lock:
    """An advisory lock (``flock``) on a file or a directory, released at the end of a ``with``, or when the process dies.

    A forked child closes its copy at once, so that a worker that outlives its parent does not keep the lock.
    """

    _held: ClassVar[set[Lock]] = set()

    def __init__(self, path: Path, *, shared: bool = False, create: bool = False) -> None:
        self.path = path
        self._mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    def acquire(self, *, wait: bool) -> bool:
        """True once acquired; False if another process holds it and ``wait`` is off."""
        try:
            failpoint("lock")
            fcntl.flock(self.fd, self._mode | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise machine_error(f"cannot lock {self.path}", error) from error
        Lock._held.add(self)
        return True

    def note(self, holder: str, *, alone: bool = False) -> None:
        """Write into the locked file who holds it, for processes that wait; ``alone`` removes what others wrote."""
        with contextlib.suppress(OSError):
            if alone:
                os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, holder.encode(), 0)

    def in_place(self) -> bool:
        """True if the path still leads to what is locked, which may have been replaced while we waited."""
        try:
            there, locked = os.stat(self.path, follow_symlinks=False), os.fstat(self.fd)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (locked.st_dev, locked.st_ino)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        Lock._held.discard(self)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @classmethod
    def _drop_in_child(cls) -> None:
        for lock in list(cls._held):
            lock.release()


os.register_at_fork(after_in_child=Lock._drop_in_child)


def remove_tree(path: Path) -> None:
    """Delete a directory, ignoring errors such as files that are gone already."""
    failpoint("unlink")
    shutil.rmtree(path, ignore_errors=True)


def open_parquet(source: Any, **options: Any) -> Any:
    """A ``pyarrow.parquet.ParquetFile`` that holds only the row group being read in memory.

    Arrow's default, pre-buffering, keeps everything read until the file is closed: 440 MB for a corpus of 1 GB.
    """
    return pq.ParquetFile(source, pre_buffer=False, **options)
