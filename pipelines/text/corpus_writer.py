"""Joins drafts into the two tables of a corpus, ``blocks.parquet`` and ``documents.parquet``.

A first pass over the drafts decides what depends on the whole corpus: which documents are duplicates, how many are left, and
which split each one gets.  A second pass numbers blocks and sentences.  Memory is bounded by a batch, and a byte for each
document.  The result depends on the sequence of documents alone, not on how they are divided into drafts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from guidance.errors import InputError, counted
from pipelines.engine.shards import regrouped
from pipelines.progress import Progress, log
from pipelines.storage.artifacts import Builder
from pipelines.storage.tables import BLOCKS, DOCUMENTS
from pipelines.text.blocks import Notes
from pipelines.text.corpus_files import SPLITS, block_schema, document_schema, fraction_of, split_of
from pipelines.text.drafts import BATCH_BLOCKS, BATCH_CHARACTERS, Draft

FEW_DOCUMENTS = 20
"""With fewer documents, splits consist of stretches of sentences."""

STRETCHES = 100
"""How many stretches of sentences there are at least, if there are as many sentences."""

STRETCH_LIMIT = 200
"""Sentences in the longest stretch, unless there would be more than `MOST_STRETCHES`."""

MOST_STRETCHES = 100_000

_COUNTED = ("documents", "blocks", "sentences", "words", "characters")
_DROPPED = -1
"""Instead of the number of a split."""


def write_corpus(
    drafts: Sequence[Path],
    out: Builder,
    notes: Notes,
    *,
    valid: float,
    test: float,
    progress: Progress | None = None,
    sources: str = "",
    of_examples: bool = False,
    apart: Collection[str] = (),
) -> dict[str, Any]:
    """Write the tables of a corpus from its drafts, given in the order of the text; returns the counts.

    Args:
        of_examples: whether documents are the examples of a task, whose splits are counted in examples.
        valid, test: the fractions for validation and testing.  Documents that have a split already keep it.
        apart: splits that were given in files of their own.  The fractions are fractions of the rest.
        sources: where the text comes from, for messages.
    """
    opened = [Draft.open(path) for path in drafts]
    with out.parquet(DOCUMENTS, document_schema()) as file, contextlib.closing(_Seen()) as seen:
        kept = _Documents(file, seen, notes, valid, test)
        kept.read(opened)
        if not kept.number:
            dropped = ", ".join(f"{count:,} {why}" for why, count in sorted(notes.dropped.items()))
            raise InputError(
                "no records" + (f" in {sources}" if sources else "") + (f": {dropped}" if dropped else ""),
                hint="check that the files have text",
            )
        few, totals = kept.few(), kept.totals
        with (
            (progress or Progress()).task("Write", total=kept.number, unit="documents") as bar,
            out.parquet(BLOCKS, block_schema()) as blocks,
        ):
            written = 0
            tables = _numbered(opened, kept.splits, few, totals)
            for table in regrouped(tables, [BATCH_CHARACTERS, BATCH_BLOCKS]):
                blocks.write_table(table)
                done = table["document"][-1].as_py() + 1
                bar.advance(done - written)
                written = done
        kept.finish(few)
    splits = {
        split: {name: int(totals[name][code]) for name in _COUNTED}
        for code, split in enumerate(SPLITS)
        if totals["blocks"][code]
    }
    counts: dict[str, Any] = {name: sum(own[name] for own in splits.values()) for name in _COUNTED}
    counts |= {"documents": kept.number, "splits": splits}
    if of_examples:
        unit, reason = "examples", "those with the same text stay together, and there are few"
    elif few is None and counts["sentences"] > counts["documents"]:
        unit, reason = "sentences", "a document is never divided; --documents line makes the smallest ones"
    elif few is None:
        unit, reason = "sentences", f"documents are chosen by chance, and there are only {counts['documents']:,}"
    else:
        unit, reason = "sentences", f"the text has only {counted(counts['sentences'], 'sentence')}"
    _check_sizes(counts, {"valid": valid, "test": test}, apart, notes, unit, reason)
    return counts


# which documents are kept


class _Seen:
    """Ids and digests so far, in a private database that spills to a temporary file: their number is not bounded by memory."""

    def __init__(self) -> None:
        self._tables = sqlite3.connect("", isolation_level=None)
        for command in (
            "PRAGMA journal_mode=OFF",
            "PRAGMA cache_size=-65536",
            "CREATE TABLE digests (digest BLOB PRIMARY KEY) WITHOUT ROWID",
            "CREATE TABLE ids (id BLOB PRIMARY KEY, place TEXT) WITHOUT ROWID",
            "BEGIN",
        ):
            self._tables.execute(command)

    def claim(self, id_: str, place: str) -> None:
        """Raise InputError if the id was claimed before."""
        try:
            self._tables.execute("INSERT INTO ids VALUES (?, ?)", (id_.encode(), place))
        except sqlite3.IntegrityError:
            before = self._tables.execute("SELECT place FROM ids WHERE id = ?", (id_.encode(),)).fetchone()[0]
            raise InputError(f"{place}: duplicate id {id_[:60]!r}, first used at {before}") from None

    def is_new(self, digest: bytes) -> bool:
        return self._tables.execute("INSERT OR IGNORE INTO digests VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        self._tables.close()


class _Documents:
    """Decides which documents are kept and in which split, and writes ``documents.parquet``.

    Attributes:
        number: how many are kept.
        splits: for each draft and each of its documents the split, as an index in `SPLITS`, or `_DROPPED`.
        totals: how many documents each split has; room for the other counts.
    """

    def __init__(self, file: Any, seen: _Seen, notes: Notes, valid: float, test: float) -> None:
        self.number = 0
        self.splits: list[np.ndarray] = []
        self.totals = {name: np.zeros(len(SPLITS), np.int64) for name in _COUNTED}
        self._file, self._seen, self._notes, self._fractions = file, seen, notes, (valid, test)
        self._rows: list[dict[str, Any]] = []
        self._has_splits = False

    def read(self, drafts: Sequence[Draft]) -> None:
        """Decide on the documents of all drafts; a document may have parts in several."""
        row, parts = dict[str, Any](), list[tuple[int, int]]()
        for index, draft in enumerate(drafts):
            self._notes.add(draft.notes)
            self.splits.append(np.full(draft.documents, _DROPPED, np.int8))
            for number, part in enumerate(draft.rows()):
                if number == 0 and draft.continues and parts:
                    row |= {name: row[name] + part[name] for name in ("blocks", "num_sentences", "characters")}
                else:
                    row, parts = part, []
                parts.append((index, number))
                if not draft.is_open or number < draft.documents - 1:
                    self._decide(row, parts, drafts)
                    parts = []

    def _decide(self, row: dict[str, Any], parts: Sequence[tuple[int, int]], drafts: Sequence[Draft]) -> None:
        if not row["blocks"]:
            return
        if (digest := row["digest"]) is None:
            sha256 = hashlib.sha256()
            for text in itertools.chain.from_iterable(drafts[index].texts(number) for index, number in parts):
                sha256.update(text.encode() + b"\n")
            digest = sha256.digest()
        if row["id"] is not None:
            self._seen.claim(row["id"], row["place"])
        if not self._seen.is_new(digest):
            if row["split"] is None:
                self._notes.drop("duplicate", row["place"])
                return
            self._notes.warn("an example repeats the text of an earlier one; it was kept", row["place"])
        self._has_splits = self._has_splits or row["split"] is not None
        id_ = row["id"] or digest.hex()[:16]
        code = SPLITS.index(row["split"] or split_of(id_, *self._fractions))
        for index, number in parts:
            self.splits[index][number] = code
        row.update(document=self.number, id=id_, split=SPLITS[code], sentences=row["num_sentences"])
        self.totals["documents"][code] += 1
        self._rows.append(row)
        self.number += 1
        if len(self._rows) == BATCH_BLOCKS:
            self._write()

    def _write(self) -> None:
        schema = document_schema()
        columns = {name: [row[name] for row in self._rows] for name in schema.names}
        self._file.write_table(pa.table(columns, schema=schema))
        self._rows = []

    def few(self) -> _Stretches | None:
        """The stretches of which the splits consist if documents are few."""
        if self.number >= FEW_DOCUMENTS or self._has_splits:
            return None
        return _Stretches([(row["id"], row["sentences"]) for row in self._rows], *self._fractions)

    def finish(self, few: _Stretches | None) -> None:
        """Write the last documents."""
        if few is not None:
            self.totals["documents"][:] = 0
            for number, row in enumerate(self._rows):
                codes = few.of_document(number)
                row |= {"blocks": few.blocks[number], "characters": few.characters[number]}
                row["split"] = SPLITS[codes[0]] if len(codes) == 1 else "mixed"
                self.totals["documents"][codes] += 1
        if self._rows:
            self._write()


# splits


def stretches(documents: Sequence[tuple[str, int]], valid: float, test: float) -> tuple[int, list[np.ndarray]]:
    """Splits for few documents: each is cut into stretches of sentences, of which some go to valid and test.

    Stretches are ranked by a hash, and taken from the lowest on until the fraction of sentences is reached; one is left for
    training.  A fraction below half a sentence gives none.

    Args:
        documents: id and number of sentences of each.

    Returns:
        Sentences in a stretch, and for each document an array: the index in `SPLITS` of each of its stretches.
    """
    total = sum(count for _, count in documents)
    size = max(1, min(total // STRETCHES, STRETCH_LIMIT), total // MOST_STRETCHES)
    splits = [np.zeros(max(1, -(-count // size)), np.int8) for _, count in documents]
    ranked = sorted(
        (fraction_of(f"{documents[document][0]}\0{number}"), document, number)
        for document, own in enumerate(splits)
        for number in range(len(own))
    )
    waiting = iter(ranked[:-1])
    for split, fraction in (("valid", valid), ("test", test)):
        goal, taken = fraction * total, 0
        while 0.5 <= goal > taken and (following := next(waiting, None)) is not None:
            _, document, number = following
            splits[document][number] = SPLITS.index(split)
            taken += min(size, documents[document][1] - number * size)
    return size, splits


class _Stretches:
    """The stretches of few documents, see `stretches`.  ``blocks`` and ``characters`` say how many each document has, once its
    blocks are cut."""

    def __init__(self, documents: Sequence[tuple[str, int]], valid: float, test: float) -> None:
        self._size, splits = stretches(documents, valid, test)
        self._splits = np.concatenate(splits)
        self._offsets = np.cumsum([0, *map(len, splits)])
        self._changes = np.cumsum([0, *(self._splits[1:] != self._splits[:-1])])
        self.blocks, self.characters = np.zeros((2, len(documents)), np.int64)

    def of_document(self, document: int) -> list[int]:
        """The splits of a document."""
        return np.unique(self._splits[self._offsets[document] : self._offsets[document + 1]]).tolist()

    def splits(self, document: np.ndarray, sentence: np.ndarray) -> np.ndarray:
        """The split of each sentence, given the number of its document and its number there."""
        return self._splits[self._at(document, sentence)]

    def _at(self, document: np.ndarray, sentence: np.ndarray) -> np.ndarray:
        return np.minimum(self._offsets[document] + sentence // self._size, self._offsets[document + 1] - 1)

    def cut(self, table: pa.Table, document: np.ndarray, first: np.ndarray) -> tuple[pa.Table, np.ndarray]:
        """Divide the blocks whose sentences fall into different splits; returns the blocks and their documents."""
        last = first + np.maximum(_number_of_sentences(table), 1) - 1
        changes = [self._changes[self._at(document, sentence)] for sentence in (first, last)]
        tables, repeats, done = [], np.ones(len(document), np.int64), 0
        for row in np.flatnonzero(changes[0] != changes[1]).tolist():
            whole = table.slice(row, 1).to_pylist()[0]
            sentence = int(first[row]) + np.arange(len(whole["sentences"]))
            code = self.splits(np.full(len(sentence), document[row]), sentence)
            bounds = [0, *(np.flatnonzero(code[1:] != code[:-1]) + 1).tolist(), len(code)]
            pieces = [_piece(whole, start, stop) for start, stop in itertools.pairwise(bounds)]
            tables += [table.slice(done, row - done), pa.Table.from_pylist(pieces, schema=table.schema)]
            repeats[row], done = len(pieces), row + 1
        return pa.concat_tables([*tables, table.slice(done)]), np.repeat(document, repeats)


def _check_sizes(
    counts: dict[str, Any], wanted: dict[str, float], apart: Collection[str], notes: Notes, unit: str, reason: str
) -> None:
    """Say how large each split is, and warn, with the reason, where that is far from what was asked for."""
    key = "documents" if unit == "examples" else unit
    total = max(1, counts[key])
    sizes = {split: count[key] for split, count in counts["splits"].items()}
    parts = (f"{split} {counted(count, unit[:-1])} ({count / total:.1%})" for split, count in sizes.items())
    log.info("%s", ", ".join(parts))
    divided = max(1, sum(count for split, count in sizes.items() if split not in apart))
    for split, fraction in wanted.items():
        count = sizes.get(split, 0)
        if fraction and not 0.5 * fraction <= count / divided <= 1.5 * fraction:
            have = counted(count, unit.removesuffix("s"))
            notes.warn(
                f"{split} has {have} of {divided:,}, {count / divided:.1%} instead of {100 * fraction:.3g}%", reason
            )


# numbering


def _numbered(
    drafts: Sequence[Draft], splits: Sequence[np.ndarray], few: _Stretches | None, totals: dict[str, np.ndarray]
) -> Iterator[tuple[pa.Table, list[np.ndarray]]]:
    """The rows of ``blocks.parquet`` as tables, each with two weights of its rows for `regrouped`: the number of characters, and 1.
    Adds what it counts to ``totals``."""
    known, document_before = 0, -1
    before = {"block": 0, "sentence": 0, "start": 0}  # of the document that goes on
    for draft, codes in zip(drafts, splits, strict=True):
        kept = codes != _DROPPED
        known -= int(draft.continues and len(kept) and kept[0])
        rows = known + np.cumsum(kept) - 1
        known = int(rows[-1]) + 1 if len(rows) else known
        for table in draft.blocks():
            number = table["document"].to_numpy()
            if not kept[number].all():
                table, number = table.filter(pa.array(kept[number])), number[kept[number]]
            if not len(number):
                continue
            document = rows[number]
            if few is not None:
                begins = np.diff(document, prepend=document_before) != 0
                first = _since(_number_of_sentences(table), begins, before["sentence"])
                table, document = few.cut(table, document, first)
            begins = np.diff(document, prepend=document_before) != 0
            sentences, words = _number_of_sentences(table), table["words"].to_numpy()
            characters = pc.utf8_length(table["text"]).to_numpy()
            ones = np.ones(len(document), np.int64)
            block = _since(ones, begins, before["block"])
            first = _since(sentences, begins, before["sentence"])
            start = _since(characters.astype(np.int64) + 1, begins, before["start"])
            before = {
                "block": int(block[-1]) + 1,
                "sentence": int(first[-1] + sentences[-1]),
                "start": int(start[-1] + characters[-1]) + 1,
            }
            document_before = int(document[-1])
            split = codes[number] if few is None else few.splits(document, first)
            if few is not None:
                np.add.at(few.blocks, document, 1)
                np.add.at(few.characters, document, characters)
            for name, values in zip(_COUNTED[1:], (ones, sentences, words, characters), strict=True):
                for code in range(len(SPLITS)):
                    totals[name][code] += int(values[split == code].sum(dtype=np.int64))
            columns = [
                pa.array(document, pa.int64()),
                pa.array(block, pa.int32()),
                pa.DictionaryArray.from_arrays(pa.array(split, pa.int8()), pa.array(SPLITS)),
                pa.array(start, pa.int64()),
                pa.array(first, pa.int32()),
                table["text"],
                table["sentences"],
            ]
            yield pa.table(columns, schema=block_schema()), [characters, ones]


def _number_of_sentences(table: pa.Table) -> np.ndarray:
    numbers: np.ndarray = pc.list_value_length(table["sentences"]).to_numpy()
    return numbers


def _piece(block: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some sentences of a block, as a block."""
    spans = block["sentences"][start:stop]
    origin, end = spans[0]["start"], spans[-1]["end"]
    text = block["text"][origin:end]
    moved = [{"start": span["start"] - origin, "end": span["end"] - origin} for span in spans]
    return block | {"text": text, "sentences": moved, "words": len(text.split())}


def _since(values: np.ndarray, begins: np.ndarray, before: int) -> np.ndarray:
    """For each row the sum of the values of earlier rows of its document, of which earlier tables had ``before``."""
    total = np.cumsum(values, dtype=np.int64) - values
    return total - np.maximum.accumulate(np.where(begins, total, -before))
