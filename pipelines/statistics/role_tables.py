"""Looks up the words of any stretch of a corpus: their text, trees and idf.

Reads only the row groups that it needs; memory holds only their index (`pipelines.engine.shards.footer`) and the idf table.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from guidance.errors import NumericalError
from guidance.patterns.features import FEATURES
from guidance.statistics.roles import COLUMNS, Pieces, Rarity, Roles, Words, parts_of_speech, relations, role_columns
from guidance.statistics.words import word_spans
from pipelines.engine.shards import footer, open_checked, remembered
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.storage.tables import BLOCKS, IDF, TREES
from pipelines.text.blocks import BLOCK_LIMIT

FAR = 1 << 62
"""A position beyond the end of every document."""


class RoleTables:
    """Looks up words in a corpus and in the ``idf`` and ``deps`` artifacts built from it.

    Args:
        corpus: folder of the corpus.
        idf, deps: folders of these artifacts, or None.
        stop_words: stop words of the language, or None.
    """

    def __init__(
        self, corpus: str, idf: str | None = None, deps: str | None = None, stop_words: Sequence[str] | None = None
    ) -> None:
        self.corpus, self.idf, self.deps = Path(corpus), idf, deps
        self._stop_words = frozenset(stop_words) if stop_words is not None else None

    def roles(self, pieces: Pieces) -> Roles:
        """The role columns of some sequences; see `guidance.statistics.roles.role_columns`."""
        return role_columns(pieces, self.words(pieces))

    def of_examples(self, documents: Sequence[int], encodings: Sequence[Any]) -> Roles:
        """The role columns of a task's examples, encoded as ``[CLS] text [SEP]`` or ``[CLS] text [SEP] pair [SEP]``.

        Args:
            documents: for each example its row in the corpus from ``build-dataset``, in increasing order.
            encodings: for each example what a Hugging Face tokenizer returns (``BatchEncoding.encodings``, or
                ``tokenizers.Tokenizer.encode_batch``) for the document's first block and, for a pair, its second block.
                The tokenizer may truncate them while it encodes.

        Returns:
            Columns over the tokens of all encodings, concatenated.
        """
        return self.roles(self._pieces_of_examples(documents, encodings))

    def _pieces_of_examples(self, documents: Sequence[int], encodings: Sequence[Any]) -> Pieces:
        if any(later <= earlier for earlier, later in itertools.pairwise(documents)):
            raise ValueError("the documents of examples must be in increasing order")
        wanted = TextRange(np.array(documents, np.int64), (0, FAR), (0, FAR)) if len(documents) else TextRange.empty()
        blocks: dict[tuple[int, int], tuple[int, int, list[int]]] = {}
        for table in rows_in(self.corpus / BLOCKS, (*_BLOCK_COLUMNS, "block"), wanted, "start", wanted.places, 0):
            for row in table.drop_columns(["text"]).to_pylist():
                starts = [span["start"] for span in row["sentences"]]
                blocks[row["document"], row["block"]] = (row["start"], row["first_sentence"], starts)
        bounds, rows = [0], []
        for document, encoding in zip(documents, encodings, strict=True):
            known = (encoding.sequence_ids, encoding.special_tokens_mask, encoding.offsets)
            for part, is_special, (start, end) in zip(*known, strict=True):
                if is_special and part is not None:
                    raise ValueError(
                        "a truncated encoding no longer tells text from pair: let the tokenizer truncate while it encodes"
                    )
                if part is None:
                    rows.append((-1, -1, -1, -1))
                    continue
                first, sentence, starts = blocks[document, part]
                within = max(0, bisect.bisect_right(starts, max(start, end - 1)) - 1)
                rows.append((document, sentence + within, first + start, first + end))
            bounds.append(len(rows))
        return Pieces(np.array(bounds, np.int64), *np.array(rows, np.int64).reshape(-1, 4).T)

    def texts(self, pieces: Pieces) -> list[str]:
        """The text of each piece; "" for special tokens."""
        ordinary = np.flatnonzero(pieces.document >= 0)
        if not len(ordinary):
            return [""] * len(pieces.document)
        wanted = TextRange.of(pieces, ordinary)
        blocks: dict[int, list[tuple[int, str]]] = {}
        for table in rows_in(self.corpus / BLOCKS, _BLOCK_COLUMNS, wanted, "start", wanted.places, 2 * BLOCK_LIMIT):
            for row in _block_rows([table]):
                blocks.setdefault(row["document"], []).append((row["start"], row["text"]))
        texts = []
        for document, start, end in zip(
            pieces.document.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True
        ):
            rows = blocks.get(document, [])
            last = bisect.bisect_right(rows, start, key=lambda row: row[0]) - 1
            texts.append(rows[last][1][start - rows[last][0] : end - rows[last][0]] if last >= 0 else "")
        return texts

    def words(self, pieces: Pieces) -> Words:
        """The words of the sentences that the pieces belong to, and perhaps more, in the order of the text."""
        ordinary = np.flatnonzero(pieces.document >= 0)
        if not len(ordinary):
            return self._join([], None, TextRange.empty())
        wanted = TextRange.of(pieces, ordinary)
        blocks = list(rows_in(self.corpus / BLOCKS, _BLOCK_COLUMNS, wanted, "start", wanted.places, 2 * BLOCK_LIMIT))
        trees = None
        if self.deps:
            trees = list(rows_in(Path(self.deps) / TREES, _TREE_COLUMNS, wanted, "sentence", wanted.sentences, 0))
        return self._join(blocks, trees, wanted)

    def _join(self, blocks: list[Any], trees: list[Any] | None, wanted: TextRange) -> Words:
        parts = [] if trees is None else [_parsed(table) for table in trees]
        parsed = np.concatenate([part["sentences"] for part in parts]) if parts else np.zeros((0, 2), np.int64)
        split = _split(blocks, None if trees is None else parsed, wanted)
        keys = ("document", "start", "end", "head")
        columns = {key: np.concatenate([*(part[key] for part in parts), split[key]]) for key in keys}
        firsts = np.cumsum([0, *(len(part["document"]) for part in parts)])
        for part, first in zip(parts, firsts, strict=False):
            rows = slice(first, first + len(part["document"]))
            columns["head"][rows] += np.where(part["head"] >= 0, first, 0)
        forms = [form for part in (*parts, split) for form in part["form"]]
        order = np.lexsort((columns["end"], columns["start"], columns["document"]))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        head = columns["head"]
        head = np.where(head >= 0, rank[head], -1)[order] if len(head) else head
        features: dict[str, Any] = {}
        if trees is not None:
            count = len(split["document"])
            pairs = (pair for part in parts for pair in zip(part["lemma"], part["form"], strict=True))
            lemmas = [lemma or form for lemma, form in pairs]  # some parsers give no lemmas
            numbers, negation = relations([label for part in parts for label in part["relation"]], lemmas)
            tags = parts_of_speech([tag for part in parts for tag in part["upos"]])
            for name, values in (("relation", numbers), ("pos", tags), ("negation", negation)):
                rest = np.full(count, FEATURES[name].fill, COLUMNS[name])
                features[name] = np.concatenate([values, rest])[order]
        if self._stop_words is not None:
            stops = self._stop_words
            features["stop_word"] = np.fromiter((form in stops for form in forms), bool, len(forms))[order]
        document, start, end = (columns[key][order] for key in keys[:3])
        if self.idf:
            rarity = rarity_of(self.idf)
            features["idf"] = np.fromiter(map(rarity.__getitem__, forms), np.float32, len(forms))[order]
        return Words(document, start, end, head if trees is not None else None, features)


_BLOCK_COLUMNS = ("document", "start", "first_sentence", "text", "sentences")
_TREE_COLUMNS = ("document", "sentence", "start", "end", "form", "lemma", "upos", "head", "relation")


def _parsed(table: Any) -> dict[str, Any]:
    """The words of some parsed sentences as flat columns; ``sentences`` has the (document, sentence) of those with
    words."""
    lists = {name: table.column(name).combine_chunks() for name in _TREE_COLUMNS[2:]}
    sizes = lists["start"].value_lengths().to_numpy()
    document, sentence = (table.column(name).to_numpy().astype(np.int64) for name in ("document", "sentence"))
    flat = {name: column.flatten() for name, column in lists.items()}
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    head = flat["head"].to_numpy().astype(np.int64)
    if any(not np.array_equal(column.value_lengths().to_numpy(), sizes) for column in lists.values()):
        raise ArtifactDamaged("deps.parquet: the columns of a sentence have different lengths")
    if len(head) and (head.min() < -1 or (head >= np.repeat(sizes, sizes)).any()):
        raise ArtifactDamaged("deps.parquet: a head lies outside its sentence")
    has_words = sizes > 0
    return {
        "sentences": np.stack([document[has_words], sentence[has_words]], axis=1),
        "document": np.repeat(document, sizes),
        "start": flat["start"].to_numpy().astype(np.int64),
        "end": flat["end"].to_numpy().astype(np.int64),
        "head": np.where(head >= 0, head + first, -1),
        "form": [form.lower() for form in flat["form"].to_pylist()],
        **{name: flat[name].to_pylist() for name in ("lemma", "upos", "relation")},
    }


def _block_rows(blocks: list[Any]) -> Iterator[dict[str, Any]]:
    for table in blocks:
        texts = table.column("text").to_pylist()
        for document, start, text in zip(
            *(table.column(c).to_pylist() for c in ("document", "start")), texts, strict=True
        ):
            yield {"document": document, "start": start, "text": text}


def _split(blocks: list[Any], parsed: Any, wanted: TextRange) -> dict[str, Any]:
    """The words of sentences without a tree, split by `word_spans`.  ``parsed`` are the sentences that have a tree, as pairs of
    document and sentence; None if there are none."""
    document: list[int] = []
    spans: list[tuple[int, int]] = []
    forms: list[str] = []

    def add(number: int, start: int, text: str) -> None:
        own = word_spans(text)
        document.extend([number] * len(own))
        spans.extend((start + first, start + last) for first, last in own)
        forms.extend(text[first:last].lower() for first, last in own)

    if parsed is None:
        for row in _block_rows(blocks):
            add(row["document"], row["start"], row["text"])
    else:
        known = {*map(tuple, parsed.tolist())}
        for table in blocks:
            numbers, starts, firsts = (table.column(c).to_numpy() for c in ("document", "start", "first_sentence"))
            column = table.column("sentences").combine_chunks()
            sizes = column.value_lengths().to_numpy()
            row_of = np.repeat(np.arange(len(sizes)), sizes)
            sentence = np.arange(len(row_of)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + firsts[row_of]
            first, last = (column.flatten().field(name).to_numpy() for name in ("start", "end"))
            inside = wanted.holds(numbers[row_of], sentence, wanted.sentences, 0)
            texts = table.column("text")
            for n in np.flatnonzero(inside).tolist():
                row = row_of[n]
                if (int(numbers[row]), int(sentence[n])) not in known:
                    text = texts[int(row)].as_py()[first[n] : last[n]]
                    add(int(numbers[row]), int(starts[row]) + int(first[n]), text)
    bounds = np.array(spans, np.int64).reshape(-1, 2)
    return {
        "document": np.array(document, np.int64),
        "start": bounds[:, 0],
        "end": bounds[:, 1],
        "head": np.full(len(document), -1, np.int64),
        "form": forms,
    }


def rarity_of(folder: str) -> Rarity:
    """The table of an ``idf`` artifact.  Raises NumericalError if a value is negative or not finite."""
    return _rarity(str(Path(folder) / IDF))


@remembered
def _rarity(path: str) -> Rarity:
    with open_checked(path) as file:
        table = file.read(["token", "idf"])
        values, tokens = table.column("idf").to_numpy(), table.column("token").to_pylist()
    if not np.isfinite(values).all() or (values < 0).any():
        raise NumericalError(f"{path}: an idf value is negative or not finite")
    return Rarity(zip(tokens, values.tolist(), strict=True))


def pieces_of(rows: Any) -> Pieces:
    """The tokens of a table of sequences.  Raises ArtifactDamaged if the columns of a sequence have different
    lengths."""
    lists = [rows.column(name).combine_chunks() for name in ("document", "sentence", "start", "end")]
    sizes = lists[0].value_lengths().to_numpy()
    if any(not np.array_equal(column.value_lengths().to_numpy(), sizes) for column in lists):
        raise ArtifactDamaged("a file of sequences has columns of different lengths")
    flat = (column.flatten().to_numpy().astype(np.int64) for column in lists)
    return Pieces(np.concatenate([[0], np.cumsum(sizes)]), *flat)


class TextRange:
    """The stretch of the corpus that some pieces cover.

    Attributes:
        documents: the documents, sorted.
        places: first code point in the first document, and last one in the last document.
        sentences: likewise for numbers of sentences.
    """

    def __init__(self, documents: Any, places: tuple[int, int], sentences: tuple[int, int]) -> None:
        self.documents, self.places, self.sentences = documents, places, sentences

    @classmethod
    def of(cls, pieces: Pieces, ordinary: Any) -> TextRange:
        """The stretch of some pieces; ``ordinary`` are the indices of those that are not special tokens, at least one."""
        documents = np.unique(pieces.document[ordinary])
        first = ordinary[pieces.document[ordinary] == documents[0]]
        last = ordinary[pieces.document[ordinary] == documents[-1]]
        return cls(
            documents,
            (int(pieces.start[first].min()), int(pieces.end[last].max())),
            (int(pieces.sentence[first].min()), int(pieces.sentence[last].max())),
        )

    @classmethod
    def empty(cls) -> TextRange:
        """A range without documents."""
        return cls(np.zeros(0, np.int64), (0, 0), (0, 0))

    def holds(self, document: Any, place: Any, bounds: tuple[int, int], length: Any) -> Any:
        """Which rows of a table overlap with the stretch, a boolean array.

        Args:
            document, place, length: for each row its document, where it begins there, and how long it is.
            bounds: the limits that ``place`` is compared with: `places` or `sentences`.
        """
        first, last = self.documents[0], self.documents[-1]
        after = (document > first) | (place + length >= bounds[0])
        before = (document < last) | (place <= bounds[1])
        return np.isin(document, self.documents) & after & before


def rows_in(
    path: Path, columns: Sequence[str], wanted: TextRange, place: str, bounds: tuple[int, int], reach: int
) -> Iterator[Any]:
    """The rows of a table, sorted by the text, that overlap with a range: a ``pyarrow.Table`` for each row group.

    Args:
        place: name of the column that says where in its document a row begins.
        bounds: the limits in ``wanted`` that belong to this column.
        reach: how far a row can extend beyond where it begins.
    """
    if not len(wanted.documents):
        return
    low, high = (int(wanted.documents[0]), bounds[0] - reach), (int(wanted.documents[-1]), bounds[1])
    with open_checked(path) as file:
        for number, (first, last) in enumerate(_extents(str(path), place)):
            if first <= high and last >= low:
                table = file.read_row_group(number, columns=list(columns))
                numbers, places = (table.column(name).to_numpy() for name in ("document", place))
                lengths = pc.utf8_length(table["text"]).to_numpy() if "text" in columns else 0
                inside = wanted.holds(numbers, places, bounds, lengths)
                if inside.any():
                    yield table.filter(pa.array(inside)).combine_chunks()


@remembered
def _extents(path: str, place: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The first and last (document, place) of each row group; 0 and `FAR` where the statistics do not tell the place."""
    metadata = footer(path)
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    extents = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        documents, places = (group.column(names.index(name)).statistics for name in ("document", place))
        if documents is None or places is None or not documents.has_min_max or not places.has_min_max:
            extents.append(((0, 0), (FAR, FAR)))
        elif documents.min == documents.max:
            extents.append(((documents.min, places.min), (documents.max, places.max)))
        else:
            extents.append(((documents.min, 0), (documents.max, FAR)))
    return extents
