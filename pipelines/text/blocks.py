"""Text as documents made of blocks.

A block is a paragraph, or a piece of one longer than `BLOCK_LIMIT`.  The limit bounds memory and keeps texts below the
limits of parsers, even for a single document of a gigabyte.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_LIMIT = 100_000
"""Code points in the longest block.  spaCy refuses texts of 1,000,000 and Stanza slows down well below that."""

PAGE = 100
"""In a file of one sentence a line, a block ends after every line whose number is a multiple of this.

So where blocks end depends on line numbers alone, and such a file can be divided without a blank line.
"""

_SENTENCE_END = re.compile(r"[.!?。!?…।።؟۔][\"'”’»)\]]*(?=\s)")
_WHITE = re.compile(r"\s")
_LOOK_BACK = 5_000

Span = tuple[int, int]


class Block(NamedTuple):
    """A paragraph, or a piece of a very long one.

    Attributes:
        text: NFC, stripped of white space at both ends, never empty.
        line: line of the file where the paragraph begins, from 1.  All pieces of a paragraph have the same line.
        sentences: start and end of each sentence in ``text``; None if the text is not split into sentences yet.
    """

    text: str
    line: int
    sentences: list[Span] | None = None


@dataclass(frozen=True)
class Document:
    """A document that is being read; ``blocks`` can be iterated once.

    Attributes:
        id: the user's id; with None the id becomes a digest of the text.
        source: name of the file it comes from, as the user gave it.
        place: where it begins, for messages.
        split: of an example of a task: train, valid or test.  Examples are kept even if their text is a duplicate.
        pair: its second text, which is also the second block; "" if it is empty, None if the task has no pairs.
        label: as written in the file.
    """

    id: str | None
    source: str
    place: str
    blocks: Iterable[Block]
    split: str | None = None
    pair: str | None = None
    label: str | None = None


@dataclass
class Notes:
    """Drops and warnings to report at the end of a run: for each kind its count and the place of the first."""

    dropped: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def warn(self, kind: str, place: str) -> None:
        self.warned[kind] += 1
        self.first.setdefault(kind, place)

    def drop(self, reason: str, place: str) -> None:
        """Count a record that is left out of the corpus."""
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)

    def add(self, later: Notes) -> None:
        """Add the notes about what follows in the text."""
        self.dropped.update(later.dropped)
        self.warned.update(later.warned)
        self.first = later.first | self.first

    def lines(self) -> list[str]:
        """One sentence for each reason to drop and each kind of warning."""
        dropped = (f"{n:,} dropped as {why}, first {self.first[why]}" for why, n in sorted(self.dropped.items()))
        warned = (
            f"{kind}: {f'{n:,} times, first ' if n > 1 else ''}{self.first[kind]}"
            for kind, n in sorted(self.warned.items())
        )
        return [*dropped, *warned]


def block_of(sentences: Sequence[str], line: int) -> Block:
    """A block of given sentences, which are joined by spaces."""
    ends = itertools.accumulate(sentences, lambda end, sentence: end + 1 + len(sentence), initial=-1)
    return Block(" ".join(sentences), line, [(before + 1, end) for before, end in itertools.pairwise(ends)])


def pieces_of(text: str) -> Iterator[str]:
    """A text in pieces that fit into a block, without white space at their ends."""
    while text:
        position = cut_position(text) if len(text) > BLOCK_LIMIT else len(text)
        piece, text = text[:position].strip(), text[position:].strip()
        if piece:
            yield piece


def cut_position(text: str, limit: int = BLOCK_LIMIT) -> int:
    """Where to cut a text longer than ``limit``: after a sentence, else at white space, else before a base character.

    Depends only on the first ``limit + 1`` characters, so the result does not depend on how a file is read in chunks.
    """
    offset = max(0, limit - _LOOK_BACK)
    near = text[offset : limit + 1]
    if ends := [match.end() for match in _SENTENCE_END.finditer(near)]:
        return offset + ends[-1]
    spaces = [match.start() for match in _WHITE.finditer(near)]
    if spaces and offset + spaces[-1] > 0:
        return offset + spaces[-1]
    for position in range(limit, max(limit - 100, 1), -1):
        if not unicodedata.combining(text[position]) and text[position] not in "\u200d\ufe0e\ufe0f":
            return position
    return limit


def _pieces(line: str) -> Iterator[str]:
    while len(line) > BLOCK_LIMIT:
        position = cut_position(line)
        yield line[:position]
        line = line[position:]
    yield line


def bounded_lines(chunks: Iterable[str], first: int = 1) -> Iterator[tuple[int, str]]:
    """Lines of a text that arrives in chunks, numbered from ``first``; pieces of one over `BLOCK_LIMIT` share a number.

    Lines end at ``\\n`` only: the reader has already translated other line ends, and U+2028 and form feeds do not end a
    line.  Each line is NFC and stripped of white space at both ends.
    """
    number, pending = first, ""
    for chunk in chunks:
        head, *rest = chunk.split("\n")
        pending += head
        for following in rest:
            for piece in _pieces(pending):
                yield number, unicodedata.normalize("NFC", piece).strip()
            number, pending = number + 1, following
        while len(pending) > BLOCK_LIMIT:
            position = cut_position(pending)
            yield number, unicodedata.normalize("NFC", pending[:position]).strip()
            pending = pending[position:]
    if pending:
        yield number, unicodedata.normalize("NFC", pending).strip()


def paragraphs(
    lines: Iterable[tuple[int, str]], *, source: str, notes: Notes, keep_lines: bool = False, page: int = 0
) -> Iterator[Block]:
    """Blocks from lines: a blank line ends a paragraph, and the lines of a paragraph are joined by one space.

    With ``keep_lines`` each line is one sentence of its block.  A block ends after every ``page``-th line, unless that is 0.
    """
    pending: list[str] = []
    start, size = 0, 0

    def block() -> Block:
        return block_of(pending, start) if keep_lines else Block(" ".join(pending), start)

    for number, text in lines:
        if not text:
            if pending:
                yield block()
            pending, size = [], 0
            continue
        if not pending:
            start, size = number, -1
        # NFC can lengthen a piece, so cut it again
        for piece in (p.strip() for p in _pieces(text)):
            if pending and size + 1 + len(piece) > BLOCK_LIMIT:
                notes.warn(f"a paragraph over {BLOCK_LIMIT:,} characters was cut", f"{source!r}, line {start}")
                whole = block()
                rest = ""
                if not keep_lines and len(pending) > 1:
                    position = cut_position(whole.text + " ", len(whole.text))
                    whole, rest = Block(whole.text[:position].rstrip(), start), whole.text[position:].strip()
                yield whole
                pending, size = ([rest], len(rest)) if rest else ([], -1)
                if pending and size + 1 + len(piece) > BLOCK_LIMIT:
                    yield block()
                    pending, size = [], -1
            if piece:
                pending.append(piece)
                size += len(piece) + 1
        if page and number % page == 0 and pending:
            yield block()
            pending, size = [], 0
    if pending:
        yield block()


def text_documents(
    chunks: Iterable[str], *, source: str, layout: str, notes: Notes, keep_lines: bool = False, line: int = 1
) -> Iterator[Document]:
    """The documents of a plain text.  ``layout`` says what a document is: the ``file``, a ``paragraph`` or a ``line``.

    Lines end at ``\\n`` alone; the first one has the number ``line``.
    """
    lines = bounded_lines(chunks, line)
    if layout == "line":
        for number, group in itertools.groupby(lines, key=lambda numbered: numbered[0]):
            pieces = [piece for piece in group if piece[1]]
            if own := list(paragraphs(pieces, source=source, notes=notes, keep_lines=keep_lines)):
                yield Document(None, source, f"{source!r}, line {number}", own)
        return
    page = PAGE if layout == "file" and keep_lines else 0
    blocks = paragraphs(lines, source=source, notes=notes, keep_lines=keep_lines, page=page)
    if layout == "file":
        yield Document(source, source, repr(source), blocks)
        return
    for number, paragraph in itertools.groupby(blocks, key=lambda block: block.line):
        yield Document(None, source, f"{source!r}, line {number}", paragraph)


def record_blocks(text: str, *, source: str, line: int, notes: Notes, keep_lines: bool = False) -> Iterator[Block]:
    """The blocks of a text from a field of a record; all of them have the record's line number."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    for block in paragraphs(bounded_lines([text]), source=source, notes=notes, keep_lines=keep_lines):
        yield Block(block.text, line, block.sentences)
