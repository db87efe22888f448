"""Writes the two tables of a corpus, ``blocks.parquet`` and ``documents.parquet``, with memory bounded by a batch.

Documents go to a draft file as they arrive.  A second pass over the draft decides what depends on the whole corpus: the
splits, which depend on the number of documents, and the removal of long duplicates.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from guidance.errors import InputError
from pipelines.storage.artifacts import Builder
from pipelines.storage.files import open_parquet
from pipelines.storage.tables import BLOCKS, DOCUMENTS
from pipelines.text.blocks import Block, Document, Notes
from pipelines.text.corpus_files import SPLITS, block_schema, document_schema
from pipelines.text.sentences import Splitter

DRAFT = "draft.parquet"
FEW_DOCUMENTS = 20
GROUP_SENTENCES = 200

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x84\x86-\x9f]")
_BUFFER = 8 << 20
_BATCH_CHARACTERS = 4 << 20
_BATCH_BLOCKS = 20_000
_COUNTED = ("documents", "blocks", "sentences", "words", "characters")


def fraction_of(key: str) -> float:
    """A number in [0, 1) that depends only on the key, so a document gets the same split in every corpus."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def split_of(key: str, valid: float, test: float) -> str:
    """The split for a key: a document id, or the key of a group of sentences."""
    fraction = fraction_of(key)
    return "valid" if fraction < valid else "test" if fraction < valid + test else "train"


class CorpusWriter:
    """Takes documents one by one; `finish` writes the tables.

    Attributes:
        documents: number of documents drafted so far, including large duplicates.
    """

    def __init__(self, out: Builder, split_sentences: Splitter, notes: Notes) -> None:
        self._out, self._split_sentences, self._notes = out, split_sentences, notes
        self.documents = 0
        self._duplicates: set[int] = set()
        self._rows: list[tuple[int, int, int, Block]] = []
        self._pending_characters = 0
        self._sentences: tuple[int, int] = (-1, 0)
        self._has_splits = False
        # a private database that spills to a temporary file, so the number of ids and digests is not bounded by memory
        self._seen = sqlite3.connect("", isolation_level=None)
        self._seen.execute("PRAGMA journal_mode=OFF")
        self._seen.execute("PRAGMA cache_size=-65536")
        self._seen.execute("CREATE TABLE digests (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        self._seen.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, place TEXT) WITHOUT ROWID")
        self._seen.execute(
            "CREATE TABLE documents (number INTEGER PRIMARY KEY, id BLOB, source TEXT, split TEXT, pair BLOB, label BLOB)"
        )
        self._seen.execute("BEGIN")
        self._writing: Any = out.parquet(DRAFT, _draft_schema())
        self._draft = self._writing.__enter__()

    def close(self) -> None:
        """Close the draft and the database, also after an error."""
        self._seen.close()
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.__exit__(*sys.exc_info())

    def add(self, document: Document) -> None:
        """Draft a document, unless it is empty or its text is a duplicate.  Examples of a task may be duplicates.

        Raises:
            InputError: another document has the same id.
        """
        if document.id is not None:
            self._claim(document.id, document.place)
        blocks = iter(document.blocks)
        head: list[Block] = []
        size = 0
        sha256 = hashlib.sha256()
        for block in blocks:
            head.append(block)
            size += len(block.text)
            sha256.update(block.text.encode() + b"\n")
            if size > _BUFFER:
                break
        if not head:
            self._notes.drop("empty", document.place)
            return
        example = document.example
        small = size <= _BUFFER
        if example:
            self._has_splits = True
            if not self._is_new(sha256.digest()):
                self._notes.warn("an example repeats the text of an earlier one; it was kept", document.place)
        elif small and not self._is_new(sha256.digest()):
            self._notes.drop("duplicate", document.place)
            return
        start = number = 0
        visible = False
        for number, block in enumerate(itertools.chain(head, blocks)):
            if number >= len(head):
                sha256.update(block.text.encode() + b"\n")
            visible = visible or self._check_characters(block, document.source)
            self._append(number, start, block)
            start += len(block.text) + 1
        if not visible:
            self._notes.warn("a document has only invisible characters", document.place)
        if not example and not small and not self._is_new(sha256.digest()):
            self._notes.drop("duplicate", document.place)
            self._duplicates.add(self.documents)
        id_ = document.id
        if id_ is None:
            id_ = sha256.hexdigest()[:16]
            if self.documents not in self._duplicates:
                self._claim(id_, document.place)
        split, *texts = (example.split, example.pair, example.label) if example else (None, None, None)
        pair, label = (value if value is None else value.encode() for value in texts)
        row = (self.documents, id_.encode(), document.source, split, pair, label)
        self._seen.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)", row)
        self.documents += 1

    def _claim(self, id_: str, place: str) -> None:
        try:
            self._seen.execute("INSERT INTO ids VALUES (?, ?)", (id_.encode(), place))
        except sqlite3.IntegrityError:
            before = self._seen.execute("SELECT place FROM ids WHERE id = ?", (id_.encode(),)).fetchone()[0]
            raise InputError(f"{place}: duplicate id {id_[:60]!r}, first used at {before}") from None

    def _is_new(self, digest: bytes) -> bool:
        return self._seen.execute("INSERT OR IGNORE INTO digests VALUES (?)", (digest,)).rowcount == 1

    def _check_characters(self, block: Block, source: str) -> bool:
        """Warn of control characters and byte-order marks; True if the block has a visible character."""
        text = block.text
        if text.isascii() and text.isprintable():
            return True
        place = f"{source!r}, line {block.line}"
        if _CONTROL.search(text):
            self._notes.warn("control characters were kept", place)
        if "\ufeff" in text:
            self._notes.warn("a byte-order mark inside the text was kept", place)
        return any(letter.isprintable() and not letter.isspace() for letter in text)

    def _append(self, number: int, start: int, block: Block) -> None:
        self._rows.append((self.documents, number, start, block))
        self._pending_characters += len(block.text)
        if self._pending_characters >= _BATCH_CHARACTERS or len(self._rows) >= _BATCH_BLOCKS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        rows, self._rows, self._pending_characters = self._rows, [], 0
        unsplit = [row[3].text for row in rows if row[3].sentences is None]
        found = iter(self._split_sentences(unsplit) if unsplit else [])
        first, starts, ends, offsets = [], [], [], [0]
        document, running = self._sentences
        for row in rows:
            spans = row[3].sentences if row[3].sentences is not None else next(found)
            if row[0] != document:
                document, running = row[0], 0
            first.append(running)
            running += len(spans)
            starts += [span[0] for span in spans]
            ends += [span[1] for span in spans]
            offsets.append(len(starts))
        self._sentences = (document, running)
        schema = _draft_schema()
        kind = schema.field("sentences").type.value_type
        spans_array = pa.StructArray.from_arrays(
            [pa.array(starts, pa.int32()), pa.array(ends, pa.int32())], fields=list(kind)
        )
        texts = [row[3].text for row in rows]
        self._draft.write_table(
            pa.table(
                [
                    pa.array([row[0] for row in rows], pa.int64()),
                    pa.array([row[1] for row in rows], pa.int32()),
                    pa.array([row[2] for row in rows], pa.int64()),
                    pa.array(first, pa.int32()),
                    pa.array(texts, pa.string()),
                    pa.ListArray.from_arrays(
                        pa.array(offsets, pa.int32()), spans_array, type=schema.field("sentences").type
                    ),
                    pa.array([len(text.split()) for text in texts], pa.int32()),
                    pa.array([len(text) for text in texts], pa.int32()),
                ],
                schema=schema,
            )
        )

    def finish(self, *, valid: float, test: float) -> dict[str, Any]:
        """Decide the splits, write the tables and return the counts.

        Raises:
            InputError: no document is left.
        """

        self._flush()
        writing, self._writing = self._writing, None
        writing.__exit__(None, None, None)
        kept = self.documents - len(self._duplicates)
        if not kept:
            dropped = ", ".join(f"{count:,} {why}" for why, count in sorted(self._notes.dropped.items()))
            raise InputError("no records" + (f": {dropped}" if dropped else ""), hint="check that the files have text")
        draft = open_parquet(self._out.path / DRAFT)
        groups = self._assign_groups(draft, valid, test) if kept < FEW_DOCUMENTS and not self._has_splits else None
        counts = self._write_tables(draft, groups, valid, test)
        draft.close()
        self._out.remove(DRAFT)
        for split, fraction in (("valid", valid), ("test", test)):
            if fraction and not counts["splits"].get(split):
                self._notes.warn(f"no text fell into {split}", "the corpus is too small")
        return counts

    def _assign_groups(self, draft: Any, valid: float, test: float) -> dict[tuple[int, int], str]:
        """The split of each group of `GROUP_SENTENCES` sentences, for a corpus under `FEW_DOCUMENTS` documents."""
        ids = {number: id_.decode() for number, id_ in self._seen.execute("SELECT number, id FROM documents")}
        keys: dict[tuple[int, int], str] = {}
        for batch in draft.iter_batches(columns=["document", "first_sentence"]):
            for number, first in zip(*(values.to_pylist() for values in batch.columns), strict=True):
                if number not in self._duplicates:
                    group = first // GROUP_SENTENCES
                    keys[number, group] = f"{ids[number]}\x00{group}"
        splits = {group: split_of(key, valid, test) for group, key in keys.items()}
        if valid and "valid" not in splits.values() and len(splits) > 1:
            splits[min(keys, key=lambda group: fraction_of(keys[group]))] = "valid"
        return splits

    def _write_tables(
        self, draft: Any, groups: dict[tuple[int, int], str] | None, valid: float, test: float
    ) -> dict[str, Any]:
        import pyarrow as pa

        schema, split_index = block_schema(), {split: index for index, split in enumerate(SPLITS)}
        per_split: dict[str, Counter[str]] = {split: Counter(dict.fromkeys(_COUNTED, 0)) for split in SPLITS}
        records = self._kept_documents()
        current: _Row | None = None
        finished: list[_Row] = []
        number_of_documents = 0
        with self._out.parquet(BLOCKS, schema) as blocks, self._out.parquet(DOCUMENTS, document_schema()) as documents:
            for group_number in range(draft.num_row_groups):
                table = draft.read_row_group(group_number)
                keep = [number not in self._duplicates for number in table.column("document").to_pylist()]
                if not any(keep):
                    continue
                if not all(keep):
                    table = table.filter(pa.array(keep))
                renumbered, splits = [], []
                for number, first, words, characters, sentences in _rows_of_blocks(table):
                    if current is None or current.draft_number != number:
                        finished += [current] if current else []
                        _, id_, source, given, pair, label = next(records)
                        whole = given or (split_of(id_, valid, test) if groups is None else "")
                        current = _Row(number, number_of_documents, id_, source, pair, label, whole)
                        number_of_documents += 1
                    split = groups[number, first // GROUP_SENTENCES] if groups is not None else current.whole
                    per_split[split].update(
                        documents=split not in current.splits,
                        blocks=1,
                        sentences=sentences,
                        words=words,
                        characters=characters,
                    )
                    current.add(split, sentences, characters)
                    renumbered.append(current.document)
                    splits.append(split_index[split])
                split_column = pa.DictionaryArray.from_arrays(pa.array(splits, pa.int8()), pa.array(SPLITS))
                table = table.set_column(0, "document", pa.array(renumbered, pa.int64()))
                table = table.add_column(2, "split", split_column).select(schema.names)
                blocks.write_table(pa.table(table.columns, schema=schema))
                if len(finished) >= _BATCH_BLOCKS:
                    documents.write_table(_document_table(finished))
                    finished = []
            documents.write_table(_document_table([*finished, *([current] if current else [])]))
        found = {split: dict(count) for split, count in per_split.items() if count["blocks"]}
        total = {name: sum(count[name] for count in found.values()) for name in _COUNTED}
        return total | {"documents": number_of_documents, "splits": found}

    def _kept_documents(self) -> Iterator[tuple[Any, ...]]:
        for number, id_, source, split, *texts in self._seen.execute("SELECT * FROM documents ORDER BY number"):
            if number not in self._duplicates:
                yield number, id_.decode(), source, split, *(t if t is None else t.decode() for t in texts)


def _draft_schema() -> Any:
    import pyarrow as pa

    final = block_schema()
    names = ("document", "block", "start", "first_sentence", "text", "sentences")
    counts = [pa.field("words", pa.int32(), False), pa.field("characters", pa.int32(), False)]
    return pa.schema([*(final.field(name) for name in names), *counts])


def _rows_of_blocks(table: Any) -> Iterator[tuple[int, int, int, int, int]]:
    """For each block: document number in the draft, first sentence, and the counts of words, characters and sentences."""
    columns = (table.column(name).to_pylist() for name in ("document", "first_sentence", "words", "characters"))
    sentences = table.column("sentences").combine_chunks().value_lengths().to_pylist()
    return zip(*columns, sentences, strict=True)


@dataclass
class _Row:
    """A row of ``documents.parquet`` whose counts are being summed.

    Attributes:
        draft_number: number of the document in the draft, before duplicates were removed.
        whole: split of the whole document; "" if its groups of sentences are split separately.
    """

    draft_number: int
    document: int
    id: str
    source: str
    pair: str | None
    label: str | None
    whole: str
    blocks: int = 0
    sentences: int = 0
    characters: int = 0
    splits: set[str] = field(default_factory=set)

    @property
    def split(self) -> str:
        return next(iter(self.splits)) if len(self.splits) == 1 else "mixed"

    def add(self, split: str, sentences: int, characters: int) -> None:
        """Add the counts of one block."""
        self.splits.add(split)
        self.blocks += 1
        self.sentences += sentences
        self.characters += characters


def _document_table(rows: list[_Row]) -> Any:
    import pyarrow as pa

    schema = document_schema()
    plain = [{name: getattr(row, name) for name in schema.names} for row in rows]
    return pa.Table.from_pylist(plain, schema=schema)
