"""Drafts: Parquet files of blocks that are split into sentences, but not yet numbered, compared or assigned to splits.

Each part of the text gives one draft.  `pipelines.text.corpus_writer` makes a corpus of consecutive drafts.  A row is a block,
or a document without text, which follows its blocks.  The last row group has one row: in its ``text``, as JSON, what is known
about the draft as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.engine.shards import parquet_file
from pipelines.storage.files import open_parquet
from pipelines.text.blocks import Block, Document, Notes, Span
from pipelines.text.corpus_files import block_schema
from pipelines.text.sentences import Splitter

BATCH_CHARACTERS = 4 << 20
BATCH_BLOCKS = 20_000
"""How many characters or blocks a row group has before the next begins, in drafts and in corpora."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x84\x86-\x9f]")
_TEXTS = ("id", "source", "place", "split", "pair", "label")
_COUNTS = ("blocks", "num_sentences", "characters")
OF_DOCUMENTS = (*_TEXTS, "digest", *_COUNTS)
"""Columns of documents; ``digest`` is missing in documents that are divided among drafts."""

_SCHEMA = pa.schema(
    [
        pa.field("document", pa.int32()),  # running number in the draft
        pa.field("text", pa.string()),
        block_schema().field("sentences").with_nullable(True),
        pa.field("words", pa.int32()),
        *(pa.field(name, pa.string()) for name in _TEXTS),
        pa.field("digest", pa.binary()),
        *(pa.field(name, pa.int64()) for name in _COUNTS),
    ]
)


class DraftWriter:
    """Takes documents one by one and writes a draft to a ``ParquetWriter``; ``line_files`` are the names of the files that
    turned out to have one sentence a line.  Memory is bounded by a row group."""

    def __init__(self, file: Any, split_sentences: Splitter, notes: Notes) -> None:
        self.line_files: list[str] = []
        self._file, self._split_sentences, self._notes = file, split_sentences, notes
        self._number, self._characters = 0, 0
        self._continues = self._is_open = False
        self._texts, self._spans, self._numbers = list[str](), list[list[Span] | None](), list[int]()
        self._documents: list[dict[str, Any]] = []
        self._sentences: Counter[int] = Counter()

    def add(self, document: Document, *, continues: bool = False, is_open: bool = False) -> None:
        """Draft a document, unless it is empty.  If an earlier draft has its beginning it ``continues``, and if a later one has
        its end it ``is_open``; then it counts even if its part in this draft is empty."""
        self._continues, self._is_open = self._continues or continues, is_open
        is_whole, sha256 = not (continues or is_open), hashlib.sha256()
        blocks, characters, is_visible = 0, 0, False
        for block in document.blocks:
            if is_whole:
                sha256.update(block.text.encode() + b"\n")
            is_visible = self._check_characters(block, document.source) or is_visible
            self._texts.append(block.text)
            self._spans.append(block.sentences)
            self._numbers.append(self._number)
            blocks, characters = blocks + 1, characters + len(block.text)
            self._characters += len(block.text)
            if self._characters >= BATCH_CHARACTERS or len(self._texts) >= BATCH_BLOCKS:
                self._flush()
        if is_whole and not blocks:
            self._notes.drop("empty", document.place)
            return
        if is_whole and not is_visible:
            self._notes.warn("a document has only invisible characters", document.place)
        row = {name: getattr(document, name) for name in _TEXTS}
        row |= {"document": self._number, "blocks": blocks, "characters": characters}
        self._documents.append(row | {"digest": sha256.digest() if is_whole else None})
        self._number += 1

    def _check_characters(self, block: Block, source: str) -> bool:
        """Warn of control characters and byte-order marks; True if the block has a visible character."""
        text = block.text
        if text.isprintable():
            return True
        place = f"{source!r}, line {block.line}"
        if _CONTROL.search(text):
            self._notes.warn("control characters were kept", place)
        if "\ufeff" in text:
            self._notes.warn("a byte-order mark inside the text was kept", place)
        return any(letter.isprintable() and not letter.isspace() for letter in text)

    def _flush(self) -> None:
        """Write the blocks and documents so far."""
        texts = self._texts
        unsplit = [text for text, spans in zip(texts, self._spans, strict=True) if spans is None]
        split = iter(self._split_sentences(unsplit) if unsplit else [])
        spans = [next(split) if own is None else own for own in self._spans]
        for number, own in zip(self._numbers, spans, strict=True):
            self._sentences[number] += len(own)
        kind = _SCHEMA.field("sentences").type
        flat = [pa.array([span[side] for own in spans for span in own], pa.int32()) for side in (0, 1)]
        offsets = pa.array([0, *itertools.accumulate(map(len, spans))], pa.int32())
        columns = {
            "document": self._numbers,
            "text": texts,
            "sentences": pa.ListArray.from_arrays(
                offsets, pa.StructArray.from_arrays(flat, fields=list(kind.value_type)), type=kind
            ),
            "words": [len(text.split()) for text in texts],
        }
        nulls = {field.name: pa.nulls(len(texts), field.type) for field in _SCHEMA}
        blocks = pa.table(nulls | columns, schema=_SCHEMA)
        documents = [own | {"num_sentences": self._sentences.pop(own["document"], 0)} for own in self._documents]
        tables = [blocks, pa.Table.from_pylist(documents, schema=_SCHEMA)]
        self._file.write_table(pa.concat_tables(tables).combine_chunks())
        self._texts, self._spans, self._numbers, self._documents, self._characters = [], [], [], [], 0

    def finish(self) -> None:
        """Write what is left, and what is known about the draft."""
        if self._texts or self._documents:
            self._flush()
        about = {
            "documents": self._number,
            "continues": self._continues,
            "is_open": self._is_open,
            "notes": vars(self._notes),
            "line_files": self.line_files,
        }
        self._file.write_table(pa.Table.from_pylist([{"text": json.dumps(about)}], schema=_SCHEMA))


@contextlib.contextmanager
def draft_writer(path: Path, split_sentences: Splitter, notes: Notes) -> Iterator[DraftWriter]:
    """A writer of a draft, which is complete when the context ends."""
    with parquet_file(path, _SCHEMA, compression="lz4", use_dictionary=["source"]) as file:
        writer = DraftWriter(file, split_sentences, notes)
        yield writer
        writer.finish()


@dataclass(frozen=True)
class Draft:
    """A draft on disk.

    Attributes:
        documents: number of its documents, including those that it has only a part of.
        continues: whether its first document begins in an earlier draft.
        is_open: whether its last document ends in a later draft.
        notes: drops and warnings; line_files: see `DraftWriter`.
    """

    path: Path
    documents: int
    continues: bool
    is_open: bool
    notes: Notes
    line_files: list[str]

    @classmethod
    def open(cls, path: Path) -> Draft:
        with open(path, "rb") as raw:
            file = open_parquet(raw)
            about = json.loads(file.read_row_group(file.num_row_groups - 1, columns=["text"])["text"][0].as_py())
        notes = about.pop("notes")
        return cls(path, **about, notes=Notes(Counter(notes["dropped"]), Counter(notes["warned"]), notes["first"]))

    def blocks(self) -> Iterator[pa.Table]:
        """Its blocks as a series of tables, each with the number of its document in the draft."""
        return self._rows("text", ["document", "text", "sentences", "words"])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Its documents, or parts of documents: what stands in the columns `OF_DOCUMENTS`."""
        for table in self._rows("place", OF_DOCUMENTS):
            columns = (column.to_pylist() for column in table.columns)
            yield from (dict(zip(OF_DOCUMENTS, values, strict=True)) for values in zip(*columns, strict=True))

    def texts(self, document: int) -> Iterator[str]:
        """The texts of the blocks of one document."""
        for table in self._rows("text", ["document", "text"]):
            yield from table.filter(pc.equal(table["document"], document))["text"].to_pylist()

    def _rows(self, given: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows that have a value in the column ``given``."""
        with open(self.path, "rb") as raw:
            file = open_parquet(raw)
            for group in range(file.num_row_groups - 1):
                table = file.read_row_group(group, columns=list(columns))
                yield table.filter(table[given].is_valid())
