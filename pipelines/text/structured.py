"""Documents of tasks that need their structure: summaries, and topic segments.

Every reader gives `Structured` documents; `pipelines.text.document_formats` lists the readers.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.storage.manifest import digest
from pipelines.text.blocks import BLOCK_LIMIT, Block, Document, Example, Notes, cut_position
from pipelines.text.readers import LINE_LIMIT, decode, open_text
from pipelines.text.records import check_unicode, parse_json
from pipelines.text.sentences import Splitter

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
    """

    id: str | None
    name: str
    line: int
    parts: Sequence[Part]
    references: Sequence[Sequence[str]] = ()

    @property
    def place(self) -> str:
        """Where it begins, for messages."""
        return f"{self.name!r}, line {self.line}" if self.id is not None else repr(self.name)


@dataclass(frozen=True)
class Columns:
    """Where readers find what they read; see the fields of the same names in `pipelines.stages.dataset.Config`."""

    encoding: str
    text_column: str
    id_column: str | None
    summary_column: str | None
    sections_column: str | None
    separator: str


def one_line(text: str) -> str:
    """A text in NFC with one space for all white space."""
    return _SPACE.sub(" ", unicodedata.normalize("NFC", text)).strip()


def whole_text(path: Path, name: str, encoding: str, notes: Notes) -> str:
    """The text of a file.

    Raises:
        InputError: it has more than `LINE_LIMIT` characters, or is no text.
    """
    found, size = [], 0
    with open_text(path, name, encoding) as stream:
        for chunk in decode(stream, name, encoding, notes):
            found.append(chunk)
            size += len(chunk)
            if size > LINE_LIMIT:
                raise InputError(f"{name!r}: over {LINE_LIMIT:,} characters", hint="divide it into several files")
    return "".join(found)


def json_list(path: Path, name: str, encoding: str, notes: Notes) -> list[dict[str, Any]]:
    """The objects of a file that is one JSON list.

    Raises:
        InputError: it is something else.
    """
    found = parse_json(whole_text(path, name, encoding, notes).strip(), repr(name))
    if not isinstance(found, list):
        raise InputError(f"{name!r}: expected a JSON list of documents, found {type(found).__name__}")
    for number, entry in enumerate(found, 1):
        if not isinstance(entry, dict):
            raise InputError(f"{name!r}, document {number}: expected a JSON object, found {type(entry).__name__}")
    return found


def text_list(value: Any, what: str, place: str) -> list[str]:
    """A list of strings, or one string as a list.

    Raises:
        InputError: it is something else, or has half of a surrogate pair.
    """
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f"{place}: {what} must be a string or a list of strings")
    for text in found:
        check_unicode(text, what, place)
    return found


@dataclass
class Documents:
    """Makes documents of a corpus from structured ones, and counts what is odd about them.

    Attributes:
        split_sentences: for parts that are not split; keep_lines: each line of such a part is a sentence.
        split_of: the split of a training document, given a key that depends on its text.
        min_words: documents whose summary has fewer words are dropped.
        has_gold: whether documents without a summary are dropped.
        drop_shared: drop test documents that share a sentence with a training document.
        shared, tested: how many test documents share a sentence with training, and how many there are.
    """

    shape: str
    split_sentences: Splitter
    split_of: Callable[[str], str]
    notes: Notes
    keep_lines: bool = False
    min_words: int = 0
    drop_shared: bool = False
    has_gold: bool = True
    shared: int = 0
    tested: int = 0
    _known: Any = field(default_factory=lambda: array("q"))

    def survey(self, documents: Iterable[tuple[str, Structured]]) -> None:
        """Remember the sentences of the training documents, 8 bytes for each."""
        for split, document in documents:
            blocks = self._blocks(document, Notes())
            if blocks and self._split(split, blocks, document) == "train":
                self._known.extend(map(_hash, _sentences(blocks)))

    def finish_survey(self) -> None:
        """Make the remembered sentences ready for look-ups."""
        import numpy as np

        self._known = np.unique(np.frombuffer(self._known, np.int64)) if len(self._known) else np.zeros(0, np.int64)

    def document(self, split: str, given: Structured, prefix: str) -> Document | None:
        """A document of the corpus; None if it is dropped.

        Args:
            split: that of its file; ``prefix``: put before its id.
        """
        blocks = self._blocks(given, self.notes)
        if not blocks:
            self.notes.drop("empty text", given.place)
            return None
        pair = None
        if self.shape == "summaries" and self.has_gold:
            pair = self._summary(given, blocks)
            if pair is None:
                return None
        split = self._split(split, blocks, given)
        if self.shape == "segments":
            if len(blocks) == 1:
                self.notes.warn("a document has one section, so no boundary", given.place)
            if split == "test" and self._is_shared(blocks, given.place):
                return None
        check_unicode(given.id or "", "the id", given.place)
        own = "/".join(filter(None, (prefix, given.id)))
        return Document(own or given.name, given.name, given.place, blocks, Example(split, pair, None))

    def _blocks(self, given: Structured, notes: Notes) -> list[Block]:
        found: list[Block] = []
        for part in given.parts:
            pieces = list(self._part(part, given.line))
            if len(pieces) > 1:
                notes.warn(f"a section over {BLOCK_LIMIT:,} characters was divided", given.place)
            found += pieces
        return found

    def _part(self, part: Part, line: int) -> Iterator[Block]:
        """A part as a block, or as several if it is too long."""
        if isinstance(part, str) and self.keep_lines:
            part = re.split(r"\r\n|\r|\n", part)
        if isinstance(part, str):
            text = one_line(part)
            while text:
                cut = cut_position(text) if len(text) > BLOCK_LIMIT else len(text)
                piece, text = text[:cut].strip(), text[cut:].strip()
                yield Block(piece, line, next(iter(self.split_sentences([piece]))))
            return
        held: list[str] = []
        size = 0
        for sentence in filter(None, map(one_line, part)):
            sentence = sentence[:BLOCK_LIMIT]
            if held and size + len(sentence) > BLOCK_LIMIT:
                yield _block(held, line)
                held, size = [], 0
            held.append(sentence)
            size += len(sentence) + 1
        if held:
            yield _block(held, line)

    def _split(self, split: str, blocks: Sequence[Block], given: Structured) -> str:
        # keyed by the text, so that equal documents get the same split
        return self.split_of(digest([block.text for block in blocks])) if split == "train" else split

    def _summary(self, given: Structured, blocks: Sequence[Block]) -> str | None:
        """The reference summaries, parted by blank lines, each with one sentence on a line; None if there are none."""
        references = [[line for text in reference if (line := one_line(text))] for reference in given.references]
        references = [reference for reference in references if reference]
        if not references:
            self.notes.drop("no summary", given.place)
            return None
        words = _words(" ".join(" ".join(reference) for reference in references))
        if len(" ".join(references[0]).split()) < self.min_words:
            self.notes.drop(f"a summary of fewer than {self.min_words} words", given.place)
            return None
        if not any(words & _words(block.text) for block in blocks):
            self.notes.warn("a summary shares no word with its text", given.place)
        return "\n\n".join("\n".join(reference) for reference in references)

    def _is_shared(self, blocks: Sequence[Block], place: str) -> bool:
        """Count a test document; True if it is dropped because it shares a sentence with training."""
        import numpy as np

        hashes = np.array(list(map(_hash, _sentences(blocks))), np.int64)
        shares = bool(np.isin(hashes, self._known).any())
        self.tested += 1
        self.shared += shares
        if shares and self.drop_shared:
            self.notes.drop("test documents that share a sentence with training", place)
        return shares and self.drop_shared


def _block(sentences: Sequence[str], line: int) -> Block:
    spans, position = [], 0
    for sentence in sentences:
        spans.append((position, position + len(sentence)))
        position += len(sentence) + 1
    return Block(" ".join(sentences), line, spans)


def _sentences(blocks: Iterable[Block]) -> Iterator[str]:
    return (block.text[start:end] for block in blocks for start, end in block.sentences or ())


def _hash(sentence: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.blake2b(sentence.encode(), digest_size=8).digest(), "big", signed=True)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))
