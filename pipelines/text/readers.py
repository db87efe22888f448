"""From bytes to text: recognises formats, decompresses gzip within bounds, decodes strictly and splits lines.

Lines end at ``\\n``, ``\\r\\n`` and ``\\r``, but not at the other ends of ``str.splitlines`` (U+2028, form feeds ...).  Lines of
parallel files end at ``\\n`` only.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from guidance.errors import InputError
from pipelines.storage.files import machine_errors
from pipelines.text.blocks import Notes

FORMAT_OF_EXTENSION = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".conllu": "conllu",
}
"""Format by extension; all but Parquet and Arrow may be followed by ``.gz``."""

LINE_LIMIT = 100 << 20
"""Maximum number of characters in a line of a file whose lines are records."""

EXPANSION_LIMIT = 1000
"""A compressed file that expands by more than this factor, to over a gigabyte, is refused as a decompression bomb."""

MIXED_LINE_ENDS = "a file mixes several kinds of line ends"

_CHUNK = 1 << 20
_SMALL = 16 << 20
_SURVEY = 16 << 20
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7-zip",
    b"%PDF-": "PDF",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x7fELF": "a program",
    b"SQLite format 3\x00": "an SQLite database",
    b"ARROW1": "Arrow",
    b"\x80\x04\x95": "a Python pickle",
    b"\x80\x02": "a Python pickle",
}
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_small(path: Path) -> bytes:
    """The bytes of a small file, such as settings or a table; raises InputError if it is larger than 16 MiB."""
    try:
        with path.open("rb") as file:
            data = file.read(_SMALL + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > _SMALL:
        raise InputError(f"{path}: larger than {_SMALL >> 20} MiB")
    return data


def is_gzip(name: str) -> bool:
    """True if the file name says that the file is compressed."""
    return name.lower().endswith(".gz")


def without_gzip(name: str) -> str:
    """The name of a file in small letters, without ``.gz``."""
    return name.lower().removesuffix(".gz")


def known_extension(name: str) -> bool:
    """True if the file name has an extension of `FORMAT_OF_EXTENSION`."""
    return Path(without_gzip(name)).suffix in FORMAT_OF_EXTENSION


def format_of(name: str, override: str | None = None) -> str:
    """The format of a file by the extension of its name; ``text`` if that is unknown."""
    return override or FORMAT_OF_EXTENSION.get(Path(without_gzip(name)).suffix, "text")


def looks_like(head: bytes) -> str | None:
    """The kind of binary file that the first bytes indicate, or None."""
    return next((what for magic, what in _MAGIC.items() if head.startswith(magic)), None)


def check_expansion(name: str, unpacked: int, compressed: int) -> None:
    """Raises InputError when a compressed file turns out to be a decompression bomb; see `EXPANSION_LIMIT`."""
    if unpacked > 1 << 30 and unpacked > EXPANSION_LIMIT * max(compressed, 1):
        raise InputError(
            f"{name!r}: {compressed:,} bytes expand to over {unpacked:,}: it looks like a decompression bomb",
            hint="decompress it yourself if you trust it",
        )


class _Gunzipped(io.RawIOBase):
    """A gzip file, decompressed in steps of bounded size."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        super().__init__()
        self._raw, self._name = raw, name
        self._file, self._unpacked = gzip.GzipFile(fileobj=raw), 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._file.read(size if size and size > 0 else _CHUNK)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(
                f"{self._name!r}: damaged gzip after {self._unpacked:,} bytes of text ({error})"
            ) from error
        self._unpacked += len(data)
        check_expansion(self._name, self._unpacked, self._raw.tell())
        return data


@contextlib.contextmanager
def open_text(path: Path, name: str, encoding: str, start: int = 0, stop: int | None = None) -> Iterator[BinaryIO]:
    """The bytes of a text file, decompressed if its name ends in ``.gz``; of a file that is not compressed perhaps a part.
    Raises InputError if the first bytes show that it is not text, not gzip, or in another encoding."""
    with machine_errors(f"cannot read {str(path)!r}"), path.open("rb") as raw:
        head = raw.read(16)
        raw.seek(0)
        stream: BinaryIO = raw
        if is_gzip(name):
            if looks_like(head) != "gzip":
                it = f"looks like {looks_like(head) or 'plain text'}" if head else "is empty"
                raise InputError(f"{name!r}: not gzip; it {it}")
            head = _survey(raw, name)
            raw.seek(0)
            stream = cast(BinaryIO, _Gunzipped(raw, name))
        if what := looks_like(head):
            hint = "name it .gz, or gunzip it first" if what == "gzip" else "give text, or set its format with --format"
            raise InputError(f"{name!r}: not text; it looks like {what}", hint=hint)
        mark = next((mark for bom, mark in _MARKS.items() if head.startswith(bom)), None)
        if mark and codecs.lookup(encoding).name == "utf-8":
            raise InputError(f"{name!r}: looks like {mark.upper()}, line 1, byte 0", hint=f"--encoding {mark}")
        raw.seek(start)
        yield stream if stop is None else cast(BinaryIO, _Part(raw, stop - start))


class _Part(io.RawIOBase):
    """The next ``size`` bytes of a file."""

    def __init__(self, raw: BinaryIO, size: int) -> None:
        super().__init__()
        self._raw, self._left = raw, size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def _survey(raw: BinaryIO, name: str) -> bytes:
    """The first decompressed bytes.

    Decompresses a file that starts like a bomb to its end or to the limit, since that is much faster here than line by
    line.  A file under a megabyte cannot reach the limit: deflate packs at most 1,032 bytes into one.
    """
    stream = _Gunzipped(raw, name)
    data = head = stream.read(_CHUNK)
    unpacked = len(data)
    may_be_bomb = os.fstat(raw.fileno()).st_size >= _CHUNK
    while data and may_be_bomb and (unpacked < _SURVEY or unpacked > EXPANSION_LIMIT // 2 * raw.tell()):
        data = stream.read(_CHUNK)
        unpacked += len(data)
    return head[:16]


def check_encoding(encoding: str) -> str:
    """The canonical name of an encoding; raises InputError if Python has no encoding of that name for files."""
    try:
        "".encode(encoding)
        b"\xff".decode(encoding, "ignore")  # idna cannot skip what is invalid
        return codecs.lookup(encoding).name
    except (LookupError, UnicodeError, ValueError, AttributeError) as error:
        raise InputError(f"unknown encoding {encoding!r}", hint="try utf-8, latin-1, cp1252 or utf-16") from error


def decode(
    stream: BinaryIO,
    name: str,
    encoding: str,
    notes: Notes,
    *,
    any_end: bool = True,
    position: int = 0,
    line: int = 1,
    is_whole: bool = True,
) -> Iterator[str]:
    """Chunks of text with ``\\n`` for every line end, without a byte-order mark at the start of the file.  Raises
    InputError if bytes are not valid in the encoding; the message names the line from 1 and the byte from 0.

    Args:
        any_end: whether ``\\r`` ends a line too; if not, it stays in the text.
        position: byte of the file at which the stream begins, and
        line: number of its first line.
        is_whole: whether the stream is the whole file, so that mixed line ends are worth a warning.
    """
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    newlines = io.IncrementalNewlineDecoder(cast("codecs.IncrementalDecoder", None), translate=any_end)
    start, lines, first = position, line - 1, position == 0
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    while True:
        data = stream.read(_CHUNK)
        waiting = decoder.getstate()[0] if position > start else b""
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            good = error.object[: error.start].decode(encoding, "ignore")
            line = lines + newlines.decode(good, final=True).count("\n") + 1
            byte = position - len(waiting) + error.start
            raise InputError(
                f"{name!r}, line {line}, byte {byte} of the file: not {encoding} ({error.reason})",
                hint="name its encoding, for example --encoding latin-1, or cp1252 for a file from Windows",
            ) from error
        except UnicodeError as error:
            raise InputError(f"{name!r}, line {lines + 1}, byte {position}: not {encoding} ({error})") from error
        if not is_utf8 and (half := re.search("[\ud800-\udfff]", text)):  # some encodings, such as utf-7, can spell it
            raise InputError(
                f"{name!r}, from line {lines + 1}, byte {position}: not {encoding} "
                f"(character {half.start()} is half of a surrogate pair)",
                hint="name its encoding, for example --encoding latin-1",
            )
        position += len(data)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        text = newlines.decode(text, final=not data)
        lines += text.count("\n")
        if text:
            yield text
        if not data:
            break
    if any_end and is_whole and isinstance(newlines.newlines, tuple):
        notes.warn(MIXED_LINE_ENDS, repr(name))


def read_lines(chunks: Iterable[str], name: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """Lines without their line ends, numbered from ``first``; an empty last line is left out, one over `LINE_LIMIT` refused."""
    number, pending, size = first, [""], 0
    for chunk in chunks:
        head, *rest = chunk.split("\n")
        pending.append(head)
        size += len(head)
        for following in rest:
            yield number, "".join(pending)
            number, pending, size = number + 1, [following], len(following)
        if size > LINE_LIMIT:
            raise InputError(
                f"{name!r}, line {number}: over {LINE_LIMIT:,} characters", hint="check that each line is one record"
            )
    if size:
        yield number, "".join(pending)


def whole_number(text: str) -> int | None:
    """The number that some digits write; None for anything else, and for more digits than a count of anything has."""
    return int(text) if text.isdecimal() and len(text) <= 15 else None


def open_lines(
    path: Path,
    name: str,
    encoding: str,
    notes: Notes,
    *,
    any_end: bool = True,
    start: int = 0,
    stop: int | None = None,
    line: int = 1,
) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file; see `open_text`, `decode` and `read_lines` for arguments and errors."""
    with open_text(path, name, encoding, start, stop) as stream:
        is_whole = not start and stop is None
        chunks = decode(stream, name, encoding, notes, any_end=any_end, position=start, line=line, is_whole=is_whole)
        yield from read_lines(chunks, name, line)


@dataclass(frozen=True)
class TextFile:
    """A text file of the user: its ``name`` stands in messages, and ``notes`` take what is odd about it."""

    path: Path
    name: str
    encoding: str
    notes: Notes

    def lines(self, *, any_end: bool = True) -> Iterator[tuple[int, str]]:
        """Its numbered lines; see `open_lines`."""
        return open_lines(self.path, self.name, self.encoding, self.notes, any_end=any_end)

    def first_line(self) -> str:
        """The first line that is not blank; "" if there is none."""
        return next((line for _, line in replace(self, notes=Notes()).lines() if line.strip()), "")

    def first_lines(self, number: int = 1000) -> str:
        """Its first lines."""
        return "\n".join(line for _, line in itertools.islice(replace(self, notes=Notes()).lines(), number))

    def text(self) -> str:
        """The whole text; one of more than `LINE_LIMIT` characters is refused."""
        chunks, size = [], 0
        with open_text(self.path, self.name, self.encoding) as stream:
            for chunk in decode(stream, self.name, self.encoding, self.notes):
                chunks.append(chunk)
                size += len(chunk)
                if size > LINE_LIMIT:
                    hint = "divide it into several files"
                    raise InputError(f"{self.name!r}: over {LINE_LIMIT:,} characters", hint=hint)
        return "".join(chunks)

    def place(self, line: int) -> str:
        """A line, for messages."""
        return f"{self.name!r}, line {line}"
