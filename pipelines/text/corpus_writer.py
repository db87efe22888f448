"""Joins drafts into the two tables of a corpus, ``blocks.parquet`` and ``documents.parquet``.

A first pass over the drafts decides what depends on the whole corpus: which documents are duplicates, and how many are
left.  A second pass numbers documents, blocks and sentences, assigns splits, and writes.  Memory is bounded by a batch.  The
result depends on the sequence of documents alone, not on how they are divided into drafts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError
from pipelines.progress import Progress, log
from pipelines.storage.artifacts import Builder
from pipelines.storage.tables import BLOCKS, DOCUMENTS
from pipelines.text.blocks import Document, Notes
from pipelines.text.corpus_files import SPLITS, block_schema, document_schema
from pipelines.text.drafts import BATCH_BLOCKS, BATCH_CHARACTERS, Draft, draft_writer
from pipelines.text.sentences import Splitter

if TYPE_CHECKING:
    import numpy as np

FEW_DOCUMENTS = 20
"""With fewer documents, splits consist of stretches of sentences."""

STRETCHES = 100
"""How many stretches of sentences there are at least, if there are as many sentences."""

STRETCH_LIMIT = 200
"""Sentences in the longest stretch, unless there would be more than `MOST_STRETCHES`."""

MOST_STRETCHES = 100_000

_DRAFT = "draft.parquet"
_COUNTED = ("blocks", "sentences", "words", "characters")


def fraction_of(key: str) -> float:
    """A number in [0, 1) that depends only on the key, so a document gets the same split in every corpus."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def split_of(key: str, valid: float, test: float) -> str:
    """The split of a document, given its id."""
    fraction = fraction_of(key)
    return "valid" if fraction < valid else "test" if fraction < valid + test else "train"


class CorpusWriter:
    """Takes documents one by one; `finish` writes the tables."""

    def __init__(self, out: Builder, split_sentences: Splitter, notes: Notes) -> None:
        self._out, self._notes = out, notes
        self._stack = contextlib.ExitStack()
        self._draft = self._stack.enter_context(draft_writer(out.path / _DRAFT, split_sentences, Notes()))

    def close(self) -> None:
        """Close the draft, also after an error."""
        self._stack.close()

    def add(self, document: Document) -> None:
        """Draft a document, unless it is empty."""
        self._draft.add(document)

    def finish(self, *, valid: float, test: float) -> dict[str, Any]:
        """Write the tables; see `write_corpus`."""
        self._draft.finish()
        self.close()
        path = self._out.path / _DRAFT
        counts = write_corpus([path], self._out, self._notes, valid=valid, test=test, of_examples=True)
        path.unlink()
        return counts


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
) -> dict[str, Any]:
    """Write the tables of a corpus from its drafts, given in the order of the text; returns the counts.

    Args:
        of_examples: whether documents are the examples of a task, whose splits are counted in examples.
        valid, test: the fractions for validation and testing, from 0 to 1.  Documents that have a split already keep it.
        sources: where the text comes from, for messages.

    Raises:
        InputError: no document is left, or two have the same id.
    """
    opened = [Draft.open(path) for path in drafts]
    survey = _survey(opened, notes)
    if not survey.documents:
        dropped = ", ".join(f"{count:,} {why}" for why, count in sorted(notes.dropped.items()))
        raise InputError(
            "no records" + (f" in {sources}" if sources else "") + (f": {dropped}" if dropped else ""),
            hint="check that the files have text",
        )
    with (progress or Progress()).task("Write", total=survey.documents, unit="documents") as bar:
        numbering = _Numbering(survey, valid, test)
        with out.parquet(BLOCKS, block_schema()) as blocks, out.parquet(DOCUMENTS, document_schema()) as documents:
            for table in _row_groups(numbering.tables(opened)):
                blocks.write_table(table)
                if len(numbering.finished) >= BATCH_BLOCKS:
                    bar.advance(len(numbering.finished))
                    documents.write_table(_document_table(numbering.finished))
                    numbering.finished = []
            documents.write_table(_document_table(numbering.finished))
    counts = numbering.counts()
    if of_examples:
        unit, reason = "examples", "those with the same text stay together, and there are few"
    elif survey.few is None:
        unit, reason = "sentences", "a document is never divided; --documents paragraph or line makes smaller ones"
    else:
        unit, reason = "sentences", f"there are only {counts['sentences']:,} sentences"
    _check_sizes(counts, {"valid": valid, "test": test}, notes, unit, reason)
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


@dataclass
class _Survey:
    """What the first pass decides.

    Attributes:
        keep: for each draft and each of its documents whether it is kept.
        documents: number of documents that are kept.
        few: ids and numbers of sentences of the kept documents, if they are fewer than `FEW_DOCUMENTS` and have no splits.
        digests: of documents that are kept and whose first row lacks the digest, by draft and number in it.
    """

    keep: list[np.ndarray] = field(default_factory=list)
    documents: int = 0
    few: list[tuple[str, int]] | None = field(default_factory=list)
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)


@dataclass
class _Open:
    """A document that may have parts in several drafts; ``parts`` are draft and number in it."""

    id: str | None
    place: str
    parts: list[tuple[int, int]]
    sentences: int
    sha256: Any = field(default_factory=hashlib.sha256)


def _survey(drafts: Sequence[Draft], notes: Notes) -> _Survey:
    import numpy as np

    found = _Survey()
    is_open: _Open | None = None
    with contextlib.closing(_Seen()) as seen:

        def decide(document: _Open, digest: bytes, has_split: bool) -> None:
            if document.id is not None:
                seen.claim(document.id, document.place)
            is_new = seen.is_new(digest)
            if not is_new and has_split:
                notes.warn("an example repeats the text of an earlier one; it was kept", document.place)
            elif not is_new:
                notes.drop("duplicate", document.place)
                for draft, number in document.parts:
                    found.keep[draft][number] = False
                return
            found.documents += 1
            if found.few is not None:
                found.few.append((document.id or digest.hex()[:16], document.sentences))
                if has_split or len(found.few) >= FEW_DOCUMENTS:
                    found.few = None

        for index, draft in enumerate(drafts):
            notes.add(draft.notes)
            found.keep.append(np.ones(draft.documents, bool))
            for number, about, sentences in _documents(draft):
                document = _Open(about["id"], about["place"], [(index, number)], sentences)
                if is_open is not None:
                    if draft.continues and number == 0:
                        is_open.parts.append((index, number))
                        is_open.sentences += sentences
                        document = is_open
                    else:
                        decide(is_open, is_open.sha256.digest(), False)
                    is_open = None
                digest = about["digest"]
                if digest is None:
                    digest = draft.digests.get(number)
                    if digest is None:  # it is divided among drafts
                        for text in draft.texts(number):
                            document.sha256.update(text.encode() + b"\n")
                        digest = document.sha256.digest()
                    found.digests[document.parts[0]] = digest
                if draft.is_open and number == draft.documents - 1:
                    is_open = document
                else:
                    decide(document, digest, about["split"] is not None)
            # a part of a document may be empty
            if is_open and (not draft.is_open or (draft.documents > 1 and is_open.parts[-1][0] < index)):
                decide(is_open, is_open.sha256.digest(), False)
                is_open = None
    return found


def _documents(draft: Draft) -> Iterator[tuple[int, dict[str, Any], int]]:
    """The documents of a draft that have blocks in it: number, columns about them, and number of sentences in it."""
    import numpy as np

    columns = ["id", "source", "place", "digest", "split"]
    last: tuple[int, dict[str, Any], int] | None = None
    for table in draft.tables(["document", "num_sentences", *columns]):
        starts = np.flatnonzero(table["source"].is_valid().to_numpy())
        sentences = np.concatenate([[0], np.cumsum(table["num_sentences"].to_numpy())])
        numbers = table["document"].to_numpy()[starts].tolist()
        before = int(sentences[starts[0]]) if len(starts) else int(sentences[-1])
        if last is not None:
            last = (last[0], last[1], last[2] + before)
            if len(starts):
                yield last
        sizes = np.diff(sentences[[*starts, -1]]).tolist()
        values = zip(*(table[name].take(starts).to_pylist() for name in columns), strict=True)
        rows = [
            (number, dict(zip(columns, about, strict=True)), size)
            for number, about, size in zip(numbers, values, sizes, strict=True)
        ]
        yield from rows[:-1]
        last = rows[-1] if rows else last
    if last is not None:
        yield last


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
    import numpy as np

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


def _check_sizes(counts: dict[str, Any], wanted: dict[str, float], notes: Notes, unit: str, reason: str) -> None:
    """Say how large each split is, and warn, with the reason, where that is far from what was asked for."""
    key = "documents" if unit == "examples" else unit
    total = max(1, counts[key])
    found = {split: count[key] for split, count in counts["splits"].items()}
    log.info("%s", ", ".join(f"{split} {count:,} {unit} ({count / total:.1%})" for split, count in found.items()))
    for split, fraction in wanted.items():
        count = found.get(split, 0)
        if fraction and not 0.5 * fraction <= count / total <= 1.5 * fraction:
            asked = f"{100 * fraction:.3g} % was asked for"
            notes.warn(f"{split} has {count:,} {unit} of {total:,}, {count / total:.1%}; {asked}", reason)


# numbering and writing


class _Numbering:
    """Numbers documents, blocks and sentences, and assigns splits.

    Attributes:
        finished: rows of ``documents.parquet`` that are complete.
    """

    def __init__(self, survey: _Survey, valid: float, test: float) -> None:
        import numpy as np

        self.finished: list[_Row] = []
        self._survey, self._fractions = survey, (valid, test)
        self._size, few = stretches(survey.few, valid, test) if survey.few is not None else (0, None)
        if few is not None:
            self._few = np.concatenate(few)
            self._offsets = np.cumsum([0, *map(len, few)])
            self._changes = np.cumsum([0, *(self._few[1:] != self._few[:-1])])
        self._row = _Row(-1)
        self._document, self._block, self._start, self._sentence = -1, 0, 0, 0
        self._per_split = {name: np.zeros(len(SPLITS), np.int64) for name in ("documents", *_COUNTED)}

    def tables(self, drafts: Sequence[Draft]) -> Iterator[tuple[Any, np.ndarray]]:
        """The rows of ``blocks.parquet``, with the number of characters of each."""
        import numpy as np
        import pyarrow as pa

        goes_on = False
        for index, draft in enumerate(drafts):
            keep, continues = self._survey.keep[index], draft.continues and goes_on
            last = -1
            for table in draft.tables():
                kept = keep[table["document"].to_numpy()]
                if not kept.all():
                    table = table.filter(pa.array(kept))
                if not table.num_rows:
                    continue
                numbers = table["document"].to_numpy()
                begins = table["source"].is_valid().to_numpy()
                if continues:
                    begins = begins & (numbers != 0)
                last = int(numbers[-1])
                yield self._numbered(table, np.asarray(begins), index)
            goes_on = draft.is_open and (last == draft.documents - 1 or (last < 0 and goes_on and draft.documents == 1))
        if self._row.document >= 0:
            self.finished.append(self._row)

    def _numbered(self, table: Any, begins: np.ndarray, draft: int) -> tuple[Any, np.ndarray]:
        import numpy as np
        import pyarrow as pa

        document = self._document + np.cumsum(begins)
        sentences = table["num_sentences"].to_numpy()
        first = _since(sentences, begins, self._sentence)
        if self._survey.few is not None:
            table, begins = self._cut(table, begins, document, first)
            document = self._document + np.cumsum(begins)
            sentences = table["num_sentences"].to_numpy()
            first = _since(sentences, begins, self._sentence)
        characters, words = table["characters"].to_numpy(), table["words"].to_numpy()
        block = _since(np.ones(len(begins), np.int64), begins, self._block)
        start = _since(characters.astype(np.int64) + 1, begins, self._start)
        self._block, self._start = int(block[-1]) + 1, int(start[-1] + characters[-1]) + 1
        self._sentence, self._document = int(first[-1] + sentences[-1]), int(document[-1])
        sums = dict(zip(_COUNTED, (np.ones_like(block), sentences, words, characters), strict=True))
        split = self._add_documents(table, begins, document, first, sums, draft)
        for name, values in sums.items():
            for code in range(len(SPLITS)):
                self._per_split[name][code] += int(values[split == code].sum(dtype=np.int64))
        schema = block_schema()
        columns = [
            pa.array(document, pa.int64()),
            pa.array(block, pa.int32()),
            pa.DictionaryArray.from_arrays(pa.array(split, pa.int8()), pa.array(SPLITS)),
            pa.array(start, pa.int64()),
            pa.array(first, pa.int32()),
            table["text"],
            table["sentences"],
        ]
        return pa.table(columns, schema=schema), characters

    def _add_documents(
        self,
        table: Any,
        begins: np.ndarray,
        document: np.ndarray,
        first: np.ndarray,
        sums: dict[str, np.ndarray],
        draft: int,
    ) -> np.ndarray:
        """Add to the rows of ``documents.parquet``; returns the split of each block as an index in `SPLITS`."""
        import numpy as np

        starts = np.flatnonzero(begins)
        bounds = starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])
        totals = [np.add.reduceat(sums[name], bounds).tolist() for name in ("blocks", "sentences", "characters")]
        parts = zip(*totals, strict=True)
        codes = []
        if len(bounds) > len(starts):  # the first rows belong to the document before
            self._row.add(*next(parts))
            codes.append(self._row.code)
        columns = ("id", "source", "digest", "split", "pair", "label")
        about = zip(*(table[name].take(starts).to_pylist() for name in columns), strict=True)
        numbers, rows = table["document"].to_numpy()[starts].tolist(), document[starts].tolist()
        for number, row, (id_, source, digest, given, pair, label), part in zip(
            numbers, rows, about, parts, strict=True
        ):
            if self._row.document >= 0:
                self.finished.append(self._row)
            id_ = id_ or (digest or self._survey.digests[draft, number]).hex()[:16]
            own = self._codes_of(row, id_, given)
            for code in own:
                self._per_split["documents"][code] += 1
            codes.append(own[0])
            name = SPLITS[own[0]] if len(own) == 1 else "mixed"
            self._row = _Row(row, id_, source, pair, label, name, own[0], *part)
        if self._survey.few is not None:
            return self._few[self._stretch(document, first)]
        return np.repeat(np.array(codes, np.int8), np.diff([*bounds, len(begins)]))

    def _codes_of(self, document: int, id_: str, given: str | None) -> list[int]:
        """The splits of a document, as indices in `SPLITS`."""
        import numpy as np

        if self._survey.few is None:
            return [SPLITS.index(given or split_of(id_, *self._fractions))]
        return np.unique(self._few[self._offsets[document] : self._offsets[document + 1]]).tolist()

    def _stretch(self, document: np.ndarray, sentence: np.ndarray) -> np.ndarray:
        """The number of the stretch in which each sentence is.

        Args:
            document: the number of each sentence's document.
            sentence: its number in that document.
        """
        import numpy as np

        return np.minimum(self._offsets[document] + sentence // self._size, self._offsets[document + 1] - 1)

    def _cut(self, table: Any, begins: np.ndarray, document: np.ndarray, first: np.ndarray) -> tuple[Any, np.ndarray]:
        """Divide the blocks whose sentences fall into different splits; ``begins`` stays with the first piece."""
        import numpy as np
        import pyarrow as pa

        last = first + np.maximum(table["num_sentences"].to_numpy(), 1) - 1
        changes = [self._changes[self._stretch(document, sentence)] for sentence in (first, last)]
        tables, marks, done = [], [], 0
        for row in np.flatnonzero(changes[0] != changes[1]).tolist():
            whole = table.slice(row, 1).to_pylist()[0]
            number = int(document[row])
            sentence = int(first[row]) + np.arange(whole["num_sentences"])
            code = self._few[self._stretch(np.full(len(sentence), number), sentence)]
            bounds = [0, *(np.flatnonzero(code[1:] != code[:-1]) + 1).tolist(), len(code)]
            pieces = [_piece(whole, start, stop) for start, stop in itertools.pairwise(bounds)]
            tables += [table.slice(done, row - done), pa.Table.from_pylist(pieces, schema=table.schema)]
            marks += [begins[done:row], begins[row : row + 1], np.zeros(len(pieces) - 1, bool)]
            done = row + 1
        if not tables:
            return table, begins
        return pa.concat_tables([*tables, table.slice(done)]), np.concatenate([*marks, begins[done:]])

    def counts(self) -> dict[str, Any]:
        """The counts of the corpus, in all and for each split."""
        found = {
            split: {name: int(values[code]) for name, values in self._per_split.items()}
            for code, split in enumerate(SPLITS)
            if self._per_split["blocks"][code]
        }
        total = {name: sum(count[name] for count in found.values()) for name in self._per_split}
        return total | {"documents": self._survey.documents, "splits": found}


def _piece(block: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some sentences of a block, as a block."""
    spans = block["sentences"][start:stop]
    origin, end = spans[0]["start"], spans[-1]["end"]
    text = block["text"][origin:end]
    moved = [{"start": span["start"] - origin, "end": span["end"] - origin} for span in spans]
    counts = {"num_sentences": len(moved), "words": len(text.split()), "characters": len(text)}
    return block | {"text": text, "sentences": moved} | counts


def _since(values: np.ndarray, begins: np.ndarray, before: int) -> np.ndarray:
    """For each row the sum of the values of earlier rows of its document, of which earlier tables had ``before``."""
    import numpy as np

    total = np.cumsum(values, dtype=np.int64) - values
    return total - np.maximum.accumulate(np.where(begins, total, -before))


def _row_groups(tables: Iterable[tuple[Any, np.ndarray]]) -> Iterator[Any]:
    """Tables of `BATCH_CHARACTERS` or `BATCH_BLOCKS`, so that row groups do not depend on how rows arrive."""
    import numpy as np
    import pyarrow as pa

    held: list[Any] = []
    size = rows = 0
    for table, characters in tables:
        ends, at = np.cumsum(characters, dtype=np.int64), 0
        while at < len(ends):
            before = int(ends[at - 1]) if at else 0
            full = int(np.searchsorted(ends, before + BATCH_CHARACTERS - size)) + 1
            stop = min(full, at + BATCH_BLOCKS - rows, len(ends))
            held.append(table.slice(at, stop - at))
            size, rows, at = size + int(ends[stop - 1]) - before, rows + stop - at, stop
            if size >= BATCH_CHARACTERS or rows >= BATCH_BLOCKS:
                yield pa.concat_tables(held).combine_chunks()
                held, size, rows = [], 0, 0
    if held:
        yield pa.concat_tables(held).combine_chunks()


@dataclass
class _Row:
    """A row of ``documents.parquet`` whose counts are being summed; ``code`` is its only split as an index in `SPLITS`."""

    document: int
    id: str = ""
    source: str = ""
    pair: str | None = None
    label: str | None = None
    split: str = ""
    code: int = 0
    blocks: int = 0
    sentences: int = 0
    characters: int = 0

    def add(self, blocks: int, sentences: int, characters: int) -> None:
        """Add the counts of a part."""
        self.blocks += blocks
        self.sentences += sentences
        self.characters += characters


def _document_table(rows: list[_Row]) -> Any:
    import pyarrow as pa

    schema = document_schema()
    return pa.table({name: [getattr(row, name) for row in rows] for name in schema.names}, schema=schema)
