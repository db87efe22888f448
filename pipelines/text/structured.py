"""Documents of tasks that need their structure: summaries, and topic segments.

Every reader gives `Structured` documents; `pipelines.text.formats` lists the readers.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.lazy import np
from pipelines.storage.manifest import digest
from pipelines.text.blocks import BLOCK_LIMIT, Block, Document, Notes, block_of, pieces_of
from pipelines.text.examples import Layout
from pipelines.text.records import check_unicode
from pipelines.text.sentences import Splitter

ONE_SECTION = "one section, so no boundary"
"""What is said of documents without a boundary to learn or to find."""

Part = str | list[str]
"""A paragraph or section: a text that is not split into sentences yet, or its sentences."""

_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Structured:
    """A document in parts.

    Attributes:
        id: unique among the documents of its file; None if the file is the document.
        name: of its file; ``line``: where it begins there.
        parts: paragraphs or sections.
        references: its reference summaries, each as a list of sentences; empty for segments.
        unit: what ``line`` counts: lines, or documents of a list.
    """

    id: str | None
    name: str
    line: int
    parts: Sequence[Part]
    references: Sequence[Sequence[str]] = ()
    unit: Literal["line", "document"] = "line"

    @property
    def place(self) -> str:
        """Where it begins, for messages."""
        return f"{self.name!r}, {self.unit} {self.line}" if self.id is not None else repr(self.name)


def one_line(text: str) -> str:
    """A text in NFC with one space for all white space."""
    return _SPACE.sub(" ", unicodedata.normalize("NFC", text)).strip()


@dataclass
class DocumentMaker:
    """Makes documents of a corpus from structured ones, and counts what is odd about them.

    Attributes:
        has_gold: whether documents without a summary are dropped.
        split_sentences: for parts that are not split.
        split_of: the split of a training document, given a key that depends on its text.
        shared, tested: how many test documents share a sentence with training, and how many there are.
    """

    shape: str
    has_gold: bool
    layout: Layout
    split_sentences: Splitter
    split_of: Callable[[str], str]
    notes: Notes
    shared: int = 0
    tested: int = 0
    _known: Any = None

    def survey(self, documents: Iterable[tuple[str, Structured]]) -> None:
        """Remember the sentences of the training documents, 8 bytes for each."""
        known = array("q")
        for split, document in documents:
            blocks = self._blocks(document, Notes())
            if blocks and self._split(split, blocks) == "train":
                known.extend(map(_hash, _sentences(blocks)))
        self._known = np.unique(np.frombuffer(known, np.int64)) if len(known) else np.zeros(0, np.int64)

    def document(self, split: str, document: Structured, prefix: str) -> Document | None:
        """A document of the corpus, given the split of its file and a prefix for its id; None if it is dropped."""
        blocks = self._blocks(document, self.notes)
        if not blocks:
            self.notes.drop("empty text", document.place)
            return None
        pair = None
        if self.shape == "summaries" and self.has_gold:
            pair = self._summary(document, blocks)
            if pair is None:
                return None
        split = self._split(split, blocks)
        if self.shape == "segments":
            if len(blocks) == 1:
                self.notes.warn(f"a document has {ONE_SECTION}", document.place)
            if split == "test" and self._is_shared(blocks, document.place):
                return None
        check_unicode(document.id or "", "the id", document.place)
        own = "/".join(filter(None, (prefix, document.id)))
        return Document(own or document.name, document.name, document.place, blocks, split, pair)

    def _blocks(self, document: Structured, notes: Notes) -> list[Block]:
        blocks: list[Block] = []
        for part in document.parts:
            pieces = list(self._part(part, document.line))
            if len(pieces) > 1:
                notes.warn(f"a section over {BLOCK_LIMIT:,} characters was divided", document.place)
            blocks += pieces
        return blocks

    def _part(self, part: Part, line: int) -> Iterator[Block]:
        """A part as a block, or as several if it is too long."""
        if isinstance(part, str) and self.layout.sentences == "line":
            part = re.split(r"\r\n|\r|\n", part)
        if isinstance(part, str):
            for piece in pieces_of(one_line(part)):
                yield Block(piece, line, next(iter(self.split_sentences([piece]))))
            return
        held: list[str] = []
        size = 0
        for sentence in itertools.chain.from_iterable(pieces_of(one_line(text)) for text in part):
            if held and size + len(sentence) > BLOCK_LIMIT:
                yield block_of(held, line)
                held, size = [], 0
            held.append(sentence)
            size += len(sentence) + 1
        if held:
            yield block_of(held, line)

    def _split(self, split: str, blocks: Sequence[Block]) -> str:
        """The split of a document; its text is the key, so that equal documents get the same one."""
        return self.split_of(digest([block.text for block in blocks])) if split == "train" else split

    def _summary(self, document: Structured, blocks: Sequence[Block]) -> str | None:
        """The reference summaries, parted by blank lines, each with one sentence on a line; None if there are none."""
        references = [[line for text in reference if (line := one_line(text))] for reference in document.references]
        references = [reference for reference in references if reference]
        if not references:
            self.notes.drop("no summary", document.place)
            return None
        words = _words(" ".join(" ".join(reference) for reference in references))
        if len(" ".join(references[0]).split()) < self.layout.min_summary_words:
            self.notes.drop(f"a summary of fewer than {self.layout.min_summary_words} words", document.place)
            return None
        if not any(words & _words(block.text) for block in blocks):
            self.notes.warn("a summary shares no word with its text", document.place)
        return "\n\n".join("\n".join(reference) for reference in references)

    def _is_shared(self, blocks: Sequence[Block], place: str) -> bool:
        """Count a test document; True if it is dropped because it shares a sentence with training."""
        hashes = np.array(list(map(_hash, _sentences(blocks))), np.int64)
        shares = bool(np.isin(hashes, self._known).any())
        self.tested += 1
        self.shared += shares
        if shares and self.layout.drop_shared:
            self.notes.drop("test documents that share a sentence with training", place)
        return shares and self.layout.drop_shared


def _sentences(blocks: Iterable[Block]) -> Iterator[str]:
    return (block.text[start:end] for block in blocks for start, end in block.sentences or ())


def _hash(sentence: str) -> int:
    return int.from_bytes(hashlib.blake2b(sentence.encode(), digest_size=8).digest(), "big", signed=True)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))
