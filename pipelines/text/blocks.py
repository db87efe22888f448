"""Text as blocks of documents.  A block is a paragraph, never longer than `BLOCK_LIMIT`, so that memory is bounded by the
block, and no parser meets a text over its limit, even where one file is one document of a gigabyte."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

BLOCK_LIMIT = 100_000
"""Characters (code points) in the longest block; spaCy refuses 1,000,000 and Stanza slows down long before."""

_SENTENCE_END = re.compile(r"[.!?。!?…।።؟۔][\"'”’»)\]]*(?=\s)")
_WHITE = re.compile(r"\s")
_LOOK_BACK = 5_000

Span = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """A paragraph, or a piece of a very long one.

    Attributes:
        text: NFC, without white space at its ends, never empty.
        line: where its paragraph begins in the file, from 1.  Pieces of one paragraph share it.
        sentences: start and end of each sentence in ``text``, or None when they are still to be found.
    """

    text: str
    line: int
    sentences: list[Span] | None = None


@dataclass(frozen=True)
class Example:
    """What an example of a task has besides its text.

    Attributes:
        split: train, valid or test.
        pair: its second text, which is its second block too; "" where it is empty, None where the task has none.
        label: as the file has it.
    """

    split: str
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Document:
    """A document while it is read; ``blocks`` can be walked once.

    Attributes:
        id: what the user calls it; None gives it a digest of its text.
        source: the file it comes from, by the name that the user knows.
        place: where it begins, for messages.
        example: it is one of a task, which is kept whatever was there before.
    """

    id: str | None
    source: str
    place: str
    blocks: Iterable[Block]
    example: Example | None = None


@dataclass
class Notes:
    """What deserves a word at the end of a run: each kind with its number and the place of the first."""

    dropped: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def warn(self, kind: str, place: str) -> None:
        self.warned[kind] += 1
        self.first.setdefault(kind, place)

    def drop(self, reason: str, place: str) -> None:
        """Count a record that does not get into the corpus."""
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)

    def lines(self) -> list[str]:
        """One sentence for each kind of warning and each reason."""
        dropped = (f"{n:,} dropped as {why}, first {self.first[why]}" for why, n in sorted(self.dropped.items()))
        return [
            *dropped,
            *(f"{kind}: {n:,} times, first {self.first[kind]}" for kind, n in sorted(self.warned.items())),
        ]


def cut_position(text: str, limit: int = BLOCK_LIMIT) -> int:
    """Where to cut a text that is longer than ``limit``: after a sentence, else at white space, else before a base
    character.  Depends on the first ``limit + 1`` characters only, so that it does not matter how a file is chunked."""
    near = text[max(0, limit - _LOOK_BACK) : limit + 1]
    offset = max(0, limit - _LOOK_BACK)
    ends = [match.end() for match in _SENTENCE_END.finditer(near)]
    if ends:
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


def bounded_lines(chunks: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text that arrives in chunks; a line over `BLOCK_LIMIT` comes in pieces of one number.

    Lines end at ``\\n`` only: the reader has translated the others, and U+2028 or form feeds end no line.  The text is
    NFC and has no white space at its ends.
    """
    number, pending = 1, ""
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
    lines: Iterable[tuple[int, str]], *, source: str, notes: Notes, keep_lines: bool = False
) -> Iterator[Block]:
    """Blocks from lines: a blank line ends a paragraph, and its wrapped lines are joined by one space.

    With ``keep_lines`` every line becomes a sentence of its block.
    """
    held: list[str] = []
    start, size = 0, 0

    def block() -> Block:
        spans: list[Span] = []
        position = 0
        for line in held:
            spans.append((position, position + len(line)))
            position += len(line) + 1
        return Block(" ".join(held), start, spans if keep_lines else None)

    for number, text in lines:
        if not text:
            if held:
                yield block()
            held, size = [], 0
            continue
        if not held:
            start, size = number, -1
        # NFC can lengthen a piece that was cut to measure
        for piece in (p.strip() for p in _pieces(text)):
            if held and size + 1 + len(piece) > BLOCK_LIMIT:
                notes.warn(f"a paragraph over {BLOCK_LIMIT:,} characters was cut", f"{source!r}, line {start}")
                whole = block()
                rest = ""
                if not keep_lines and len(held) > 1:
                    position = cut_position(whole.text + " ", len(whole.text))
                    whole, rest = Block(whole.text[:position].rstrip(), start), whole.text[position:].strip()
                yield whole
                held, size = ([rest], len(rest)) if rest else ([], -1)
                if held and size + 1 + len(piece) > BLOCK_LIMIT:
                    yield block()
                    held, size = [], -1
            if piece:
                held.append(piece)
                size += len(piece) + 1
    if held:
        yield block()


def text_documents(
    chunks: Iterable[str], *, source: str, layout: str, notes: Notes, keep_lines: bool = False
) -> Iterator[Document]:
    """The documents of a plain text: the ``file``, each ``paragraph``, or each ``line``."""
    lines = bounded_lines(chunks)
    if layout == "file":
        yield Document(
            source, source, repr(source), paragraphs(lines, source=source, notes=notes, keep_lines=keep_lines)
        )
        return
    if layout == "line":
        for number, group in itertools.groupby(lines, key=lambda line: line[0]):
            pieces = [line for line in group if line[1]]
            if pieces:
                blocks = paragraphs(pieces, source=source, notes=notes, keep_lines=keep_lines)
                yield Document(None, source, f"{source!r}, line {number}", blocks)
        return
    found = paragraphs(lines, source=source, notes=notes, keep_lines=keep_lines)
    for number, blocks in itertools.groupby(found, key=lambda block: block.line):
        yield Document(None, source, f"{source!r}, line {number}", blocks)


def record_blocks(text: str, *, source: str, line: int, notes: Notes, keep_lines: bool = False) -> Iterator[Block]:
    """The blocks of a text that is one field of a record; all of them stand at the record's line."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    for block in paragraphs(bounded_lines([text]), source=source, notes=notes, keep_lines=keep_lines):
        yield Block(block.text, line, block.sentences)
