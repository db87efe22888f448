"""Resolves a command's arguments (files, globs, folders, standard input) to files, each real file once."""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from guidance.errors import InputError, counted
from pipelines.engine.stage import Files, file_digest
from pipelines.storage.files import machine_errors
from pipelines.text.line_layout import SAMPLE, beginning, check_not_columns
from pipelines.text.readers import known_extension, read_small

STDIN = "-"
BUILTIN = "builtin:python-docs"


@dataclass
class Sources:
    """The files that the arguments name.

    Attributes:
        by_name: files in reading order, by their names in the corpus: relative to the given folder, else the last part of the
            path.
        digests: sha256 by path, for files where it is already known (standard input).
        builtin: whether ``builtin:python-docs`` was given.
        skipped: the files left out, because they are hidden, of unknown format, or the same file again.
    """

    by_name: dict[str, Path] = field(default_factory=dict)
    digests: dict[Path, str] = field(default_factory=dict)
    builtin: bool = False
    skipped: list[str] = field(default_factory=list)

    paths = property(lambda self: list[Path](self.by_name.values()))
    names = property(lambda self: list[str](self.by_name))

    def files(self, source: str | None, license: str | None) -> Files:
        """The files as an input of a stage, with their digests and where they come from (by default their names)."""
        shown = source or ", ".join(self.names[:3]) + (" ..." if len(self.names) > 3 else "")
        digests = tuple(self.digests.get(path) or file_digest(path) for path in self.paths)
        return Files(tuple(self.paths), tuple(self.names), digests, [{"source": shown, "license": license}])


@contextlib.contextmanager
def expand(
    arguments: Sequence[str],
    *,
    any_kind: bool,
    stdin: BinaryIO | None,
    spool: Path | None = None,
    in_folders: Callable[[str], bool] = known_extension,
) -> Iterator[Sources]:
    """Find the files.  Standard input is copied to a private file that is deleted when the context ends.  Raises InputError
    if no file is found, a path is not a regular file, or two files would get the same name.

    Args:
        any_kind: accept explicitly named files with an unknown extension, because ``--format`` gives their format.
        spool: folder for the copy of standard input; by default the machine's folder for temporary files.
        in_folders: which files of a folder to take, by their names.
    """
    sources, seen = Sources(), set[tuple[int, int]]()
    with contextlib.ExitStack() as stack:
        for argument in arguments:
            if argument == STDIN:
                _add_stdin(sources, stdin, stack, spool)
            elif argument == BUILTIN:
                sources.builtin = True
            elif argument.startswith("builtin:"):
                raise InputError(f"unknown source {argument!r}", hint=f"the only built-in text is {BUILTIN}")
            else:
                for path in _matches(argument):
                    if stat.S_ISDIR(_status(path).st_mode):
                        for inner in _walk(path, set(), sources, in_folders):
                            _add(sources, inner, inner.relative_to(path), seen)
                    elif any_kind or known_extension(path.name):
                        _add(sources, path, Path(path.name), seen)
                    else:
                        with machine_errors(f"cannot read {path}"), path.open("rb") as file:
                            check_not_columns(beginning(file.read(4 * SAMPLE), "utf-8"), str(path))
                        raise InputError(f"{str(path)!r}: unknown kind of file", hint="name its format with --format")
        if not sources.paths and not sources.builtin:
            number = len(sources.skipped)
            skipped = counted(
                number,
                "file that is hidden or of unknown format was",
                "files that are hidden or of unknown format were",
            )
            extra = f"; {skipped} skipped" if number else ""
            raise InputError(
                f"no text files in {', '.join(map(repr, arguments[:5])) or 'an empty list'}{extra}",
                hint="name the files, or their format with --format" if number else None,
            )
        yield sources


def _matches(argument: str) -> list[Path]:
    if os.path.lexists(argument) or not any(letter in argument for letter in "*?["):
        return [Path(argument)]
    if matches := sorted(glob.glob(argument, recursive=True)):
        return list(map(Path, matches))
    raise InputError(f"nothing matches {argument!r}")


def _add(sources: Sources, path: Path, inside: Path, seen: set[tuple[int, int]]) -> None:
    """Add a file, unless it was added before.  Its name is its path ``inside`` the given folder, as UTF-8 in any locale."""
    status = _status(path)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{str(path)!r}: not a regular file", hint="to read from a pipe, give `-`")
    try:
        name = os.fsencode(inside.as_posix()).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{str(inside)!r}: the name is not UTF-8", hint="rename it, or pipe it in with `-`") from error
    if (status.st_dev, status.st_ino) in seen:
        sources.skipped.append(name)
        return
    seen.add((status.st_dev, status.st_ino))
    if (other := sources.by_name.setdefault(name, path)) is not path:
        raise InputError(
            f"{str(path)!r} and {str(other)!r} would both be document {name!r}",
            hint="give a folder that contains both; ids are then paths inside it",
        )


def _walk(
    folder: Path, visited: set[tuple[int, int]], sources: Sources, takes: Callable[[str], bool]
) -> Iterator[Path]:
    """The files to take below a folder, sorted.  Follows links, but enters each real folder once."""
    status = _status(folder)
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise InputError(f"{str(folder)!r}: cannot be read ({os.strerror(error.errno or 0)})") from error
    saved = _saved_files(folder)
    for entry in entries:
        is_cache = entry.name.endswith(".arrow") and saved and entry.name not in saved
        if entry.name.startswith(".") or is_cache or not (entry.is_dir() or takes(entry.name)):
            sources.skipped.append(entry.name)
        elif entry.is_dir():
            yield from _walk(Path(entry.path), visited, sources, takes)
        else:
            yield Path(entry.path)


def _saved_files(folder: Path) -> frozenset[str]:
    """The files that hold the data of a folder saved by Hugging Face's ``datasets``, which may also hold caches."""
    try:
        files = json.loads(read_small(folder / "state.json"))["_data_files"]
        return frozenset(str(file["filename"]) for file in files)
    except (InputError, ValueError, LookupError, TypeError, RecursionError):
        return frozenset()


def _status(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise InputError(f"{str(path)!r}: cannot be read ({reason})", hint=_similar(path)) from error


def _similar(path: Path) -> str:
    """What to do about a path that cannot be read: a file with a similar name, or what can be given."""
    with contextlib.suppress(OSError, ValueError):
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), 1, 0.8)
        if near and not path.exists():
            return f"did you mean {str(path.with_name(near[0]))!r}?"
    return "give files, folders, quoted patterns such as 'text/*.txt', or - for standard input"


def _add_stdin(sources: Sources, stdin: BinaryIO | None, stack: contextlib.ExitStack, spool: Path | None) -> None:
    if STDIN in sources.names:
        raise InputError("`-` is given twice, but standard input can be read only once")
    if stdin is None or stdin.closed:
        raise InputError("`-` was given, but standard input is closed")
    sha256 = hashlib.sha256()
    with machine_errors("cannot keep a copy of standard input"):
        copy = stack.enter_context(tempfile.NamedTemporaryFile(prefix="guide-stdin-", dir=spool))  # noqa: SIM115
        while data := stdin.read(1 << 20):
            sha256.update(data)
            copy.write(data)
        copy.flush()
    path = Path(copy.name)
    sources.by_name[STDIN] = path
    sources.digests[path] = sha256.hexdigest()
