"""Divides the user's files into pieces that any process can read by itself.

A piece is a whole file, or a part of a large one that begins where a document, a paragraph or a line does.  Where a file is
cut does not change what is read from it.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pipelines.lazy import pa
from pipelines.storage.files import machine_errors, open_parquet
from pipelines.text.blocks import PAGE

Cut = Literal["blank line", "page", "line"]

_CHUNK = 1 << 20
_BLANK_LINE = re.compile(rb"\n\r?\n")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_ONE_BYTE_LINE_ENDS = re.compile(r"utf-8|ascii|iso8859.*|cp125\d|koi8.*")
"""Encodings in which the bytes 10 and 13 are line ends and nothing else, and which have no state."""


@dataclass(frozen=True)
class Piece:
    """A file, or a part of it.

    Attributes:
        number: of its file.
        path: absolute path; "" for text that is no file.
        name: name of the file in the corpus.
        kind: its format.
        size: bytes to read, for the progress display.
        start: first byte, or row group of a Parquet file.
        stop: byte or row group after the last; None for the end of the file.
        line: number of the first line or row.
        has_sentence_lines: whether each line is one sentence; None if not known yet.
    """

    number: int
    path: str
    name: str
    kind: str
    size: int
    start: int = 0
    stop: int | None = None
    line: int = 1
    has_sentence_lines: bool | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole file."""
        return self.start == 0 and self.stop is None


@dataclass(frozen=True)
class Bundle:
    """Consecutive pieces that are read together."""

    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """A name that depends on nothing but the files and bytes; its last number is the version of the columns of drafts."""
        first, last = self.pieces[0], self.pieces[-1]
        end = "end" if last.stop is None else f"{last.stop:014d}"
        return f"{first.number:08d}-{first.start:014d}-{last.number:08d}-{end}-2"

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(piece.size for piece in self.pieces)


def bundles(pieces: Iterable[Piece], size: int) -> Iterator[Bundle]:
    """Consecutive pieces in bundles of about ``size`` bytes."""
    held, total = list[Piece](), 0
    for piece in pieces:
        if held and total + piece.size > size:
            yield Bundle(tuple(held))
            held, total = [], 0
        held.append(piece)
        total += piece.size
    if held:
        yield Bundle(tuple(held))


def can_cut(encoding: str) -> bool:
    """True if a text in this encoding can be cut at the bytes of a line end."""
    return bool(_ONE_BYTE_LINE_ENDS.fullmatch(codecs.lookup(encoding).name))


def cut_file(piece: Piece, size: int, cut: Cut) -> tuple[list[Piece], bool]:
    """A whole text file as parts of about ``size`` bytes, and whether its line ends are of several kinds.  Parts begin after a
    blank line, after a line whose number is a multiple of `PAGE`, or after any line."""
    starts = [(0, 1)]  # byte and number of line
    offset, line, kinds = 0, 1, [0, 0, 0]
    with machine_errors(f"cannot read {piece.path!r}"), open(piece.path, "rb") as file:
        while data := file.read(_CHUNK):
            if data.endswith(b"\r") and len(data) == _CHUNK:  # its line feed may follow
                data = data[:-1]
                file.seek(-1, 1)
            at = max(0, starts[-1][0] + size - offset)
            while at < len(data) and (start := _find(data, at, line, cut)):
                starts.append((offset + start, line + sum(_count(data[:start]))))
                at = start + size
            counts = _count(data)
            kinds = [total + count for total, count in zip(kinds, counts, strict=True)]
            line += sum(counts)
            offset += len(data)
    if starts[-1][0] == offset and len(starts) > 1:
        starts.pop()
    ends = [start for start, _ in starts[1:]]
    parts = [
        replace(piece, start=start, stop=stop, line=line, size=(offset if stop is None else stop) - start)
        for (start, line), stop in zip(starts, [*ends, None], strict=True)
    ]
    return parts, sum(map(bool, kinds)) > 1


def _count(data: bytes) -> tuple[int, int, int]:
    """How often lines end with both bytes, with a line feed alone, with a carriage return alone."""
    both = data.count(b"\r\n")
    return both, data.count(b"\n") - both, data.count(b"\r") - both


def _find(data: bytes, at: int, line: int, cut: Cut) -> int | None:
    """The first place from ``at`` on where a part may begin; ``line`` is the number of the first line of the data."""
    if cut == "line":
        return data.find(b"\n", at) + 1 or None
    if cut == "blank line":
        blank = _BLANK_LINE.search(data, at)
        return blank.end() if blank else None
    for number, end in enumerate(_LINE_END.finditer(data), line):
        if end.end() > at and number % PAGE == 0:
            return end.end()
    return None


def cut_parquet(piece: Piece, size: int) -> list[Piece]:
    """A Parquet file as groups of row groups of about ``size`` bytes; whole if it cannot be read, which its reader reports."""
    try:
        with open(piece.path, "rb") as file:
            metadata = open_parquet(file).metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            rows = [group.num_rows for group in groups]
            weights = [
                max(1, sum(group.column(c).total_compressed_size for c in range(group.num_columns))) for group in groups
            ]
    except (pa.ArrowException, OSError, MemoryError):
        return [piece]
    bounds, total = [0], 0
    for number, weight in enumerate(weights):
        if number > bounds[-1] and total + weight > size:
            bounds.append(number)
            total = 0
        total += weight
    if len(bounds) == 1:
        return [piece]
    return [
        replace(piece, start=start, stop=stop, line=sum(rows[:start]) + 1, size=sum(weights[start:stop]))
        for start, stop in itertools.pairwise([*bounds, len(rows)])
    ]
