"""Drafts: Parquet files of blocks that are split into sentences, but not yet numbered, compared or assigned to splits.

Each part of the text gives one draft.  `pipelines.text.corpus_writer` makes a corpus of consecutive drafts.  The columns
about documents are set in the first row of each document.  The last row group has one row: in its ``text``, as JSON, what is
known about the draft as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.engine.shards import parquet_file
from pipelines.storage.files import open_parquet
from pipelines.text.blocks import Block, Document, Notes, Span
from pipelines.text.corpus_files import block_schema
from pipelines.text.sentences import Splitter

BATCH_CHARACTERS = 4 << 20
BATCH_BLOCKS = 20_000
"""A row group ends after so many characters or blocks, in drafts and in corpora."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x84\x86-\x9f]")
_OF_DOCUMENTS = ("id", "source", "place", "digest", "split", "pair", "label")


def draft_schema() -> Any:
    """Columns of a draft; see the module."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("document", pa.int32(), False),  # running number in the draft
            pa.field("text", pa.string(), False),
            pa.field("sentences", block_schema().field("sentences").type, False),
            pa.field("num_sentences", pa.int32(), False),
            pa.field("words", pa.int32(), False),
            pa.field("characters", pa.int32(), False),
            *(pa.field(name, pa.binary() if name == "digest" else pa.string()) for name in _OF_DOCUMENTS),
        ]
    )


class DraftWriter:
    """Takes documents one by one and writes a draft.  Memory is bounded by a row group."""

    def __init__(self, file: Any, split_sentences: Splitter, notes: Notes) -> None:
        """Write to ``file``, a ``pyarrow.parquet.ParquetWriter`` for `draft_schema`."""
        self._file, self._split_sentences, self._notes = file, split_sentences, notes
        self._documents = 0
        self._digests: dict[int, str] = {}
        self._continues = self._is_open = False
        self._clear()

    def _clear(self) -> None:
        self._texts: list[str] = []
        self._spans: list[list[Span] | None] = []
        self._numbers: list[int] = []
        self._firsts: list[int] = []
        self._about: dict[str, list[Any]] = {name: [] for name in _OF_DOCUMENTS}
        self._characters = 0

    def add(self, document: Document, *, continues: bool = False, is_open: bool = False) -> None:
        """Draft a document, unless it is empty.

        Args:
            continues: whether an earlier draft has the document's beginning.
            is_open: whether a later draft has its end.

        A document that is divided among drafts counts even if its part in this one is empty.
        """
        self._continues, self._is_open = self._continues or continues, is_open
        is_whole, sha256 = not (continues or is_open), hashlib.sha256()
        first, batch, is_empty, is_visible = len(self._texts), self._about, True, False
        for block in document.blocks:
            if is_empty:
                first, batch, is_empty = len(self._texts), self._about, False
                self._begin(document)
            text = block.text
            if is_whole:
                sha256.update(text.encode() + b"\n")
            is_visible = self._check_characters(block, document.source) or is_visible
            self._texts.append(text)
            self._spans.append(block.sentences)
            self._numbers.append(self._documents)
            self._characters += len(text)
            if self._characters >= BATCH_CHARACTERS or len(self._texts) >= BATCH_BLOCKS:
                self._flush()
        if is_empty and is_whole:
            self._notes.drop("empty", document.place)
            return
        self._documents += 1
        if is_whole:
            if not is_visible:
                self._notes.warn("a document has only invisible characters", document.place)
            if batch is self._about:
                assert self._firsts[-1] == first
                batch["digest"][-1] = sha256.digest()
            else:  # its first row is written already
                self._digests[self._documents - 1] = sha256.hexdigest()

    def _begin(self, document: Document) -> None:
        self._firsts.append(len(self._texts))
        example = document.example
        of_example = (example.split, example.pair, example.label) if example else (None, None, None)
        for name, value in zip(
            _OF_DOCUMENTS, (document.id, document.source, document.place, None, *of_example), strict=True
        ):
            self._about[name].append(value)

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
        import pyarrow as pa

        if not self._texts:
            return
        unsplit = [text for text, spans in zip(self._texts, self._spans, strict=True) if spans is None]
        found = iter(self._split_sentences(unsplit) if unsplit else [])
        spans = [next(found) if given is None else given for given in self._spans]
        flat = [span for given in spans for span in given]
        counts = [len(given) for given in spans]
        schema = draft_schema()
        kind = schema.field("sentences").type
        offsets = pa.array([0, *_running(counts)], pa.int32())
        ends = pa.StructArray.from_arrays(
            [pa.array([start for start, _ in flat], pa.int32()), pa.array([end for _, end in flat], pa.int32())],
            fields=list(kind.value_type),
        )
        columns = {
            "document": self._numbers,
            "text": self._texts,
            "sentences": pa.ListArray.from_arrays(offsets, ends, type=kind),
            "num_sentences": counts,
            "words": [len(text.split()) for text in self._texts],
            "characters": list(map(len, self._texts)),
        }
        for name in _OF_DOCUMENTS:
            columns[name] = [None] * len(self._texts)
            for row, value in zip(self._firsts, self._about[name], strict=True):
                columns[name][row] = value
        self._file.write_table(pa.table(columns, schema=schema))
        self._clear()

    def finish(self, **more: Any) -> None:
        """Write what is left, and what is known about the draft, with ``more`` for `Draft.more`."""
        import pyarrow as pa

        self._flush()
        about = {
            "documents": self._documents,
            "continues": self._continues,
            "is_open": self._is_open,
            "digests": self._digests,
            "dropped": self._notes.dropped,
            "warned": self._notes.warned,
            "first": self._notes.first,
            "more": more,
        }
        schema = draft_schema()
        row = dict.fromkeys(schema.names) | {"document": -1, "text": json.dumps(about), "sentences": []}
        row |= dict.fromkeys(("num_sentences", "words", "characters"), 0)
        self._file.write_table(pa.Table.from_pylist([row], schema=schema))


def _running(counts: Sequence[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        total += count
        yield total


@contextlib.contextmanager
def draft_writer(path: Path, split_sentences: Splitter, notes: Notes) -> Iterator[DraftWriter]:
    """A writer of a draft; call its ``finish`` at the end."""
    with parquet_file(path, draft_schema(), compression="lz4", use_dictionary=["source"]) as file:
        yield DraftWriter(file, split_sentences, notes)


@dataclass(frozen=True)
class Draft:
    """A draft on disk.

    Attributes:
        documents: number of its documents, including those that it has only a part of.
        continues: whether its first document begins in an earlier draft.
        is_open: whether its last document ends in a later draft.
        digests: of whole documents whose first row lacks the digest, since it was written before their end was read.
        notes: drops and warnings.
        more: what was given to `DraftWriter.finish`.
    """

    path: Path
    documents: int
    continues: bool
    is_open: bool
    digests: dict[int, bytes]
    notes: Notes
    more: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Draft:
        with open(path, "rb") as raw:
            file = open_parquet(raw)
            about = json.loads(file.read_row_group(file.num_row_groups - 1, columns=["text"])["text"][0].as_py())
        notes = Notes(Counter(about["dropped"]), Counter(about["warned"]), about["first"])
        digests = {int(number): bytes.fromhex(digest) for number, digest in about["digests"].items()}
        return cls(path, about["documents"], about["continues"], about["is_open"], digests, notes, about["more"])

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Its blocks as a series of ``pyarrow.Table``."""
        with open(self.path, "rb") as raw:
            file = open_parquet(raw)
            for group in range(file.num_row_groups - 1):
                yield file.read_row_group(group, columns=columns)

    def texts(self, document: int) -> Iterator[str]:
        """The texts of the blocks of one document."""
        import pyarrow.compute as pc

        for table in self.tables(["document", "text"]):
            yield from table.filter(pc.equal(table["document"], document))["text"].to_pylist()
