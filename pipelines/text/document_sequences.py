"""Sequences of documents with summaries or with sections, ``build-sequences --packing examples``.

**Summaries**: a row is a document, ``[CLS] sentence [SEP]`` for each sentence, and its label says of each sentence whether the
greedy oracle takes it.  Sentences of at most 5 words are left out, longer ones are cut after 200 words, and there are at most
100.  A sentence that does not fit is left out with all that follow.  A training document keeps at least 3 sentences, or is
dropped; any other document has a row with at least one sentence, so that evaluation misses none.  The oracle reads the first
100 sentences in lower case, before any of them is left out.

**Segments**: a row is the boundary between two sentences, ``[CLS] left [SEP] right``, where left and right are the nearest
pieces of the document on both sides, each at most half of what fits.  The label is 1 where a section ends.  The paper pads
short left contexts behind ``[CLS]``.  Here nothing is padded: masks hide padding, so attention sees the same pieces, but
the first rows of a document have their separator at an earlier position than the others.

Sources: Liu & Lapata 2019, published code; Lukasik et al. 2020; Li et al. 2022, published code of both tasks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from guidance.errors import InputError
from guidance.tasks.summaries import greedy_oracle
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.tables import DOCUMENTS
from pipelines.text.corpus_files import SPLITS, read_blocks
from pipelines.text.encoding import Encoder, block_columns
from pipelines.text.packing import NOT_TEXT, Packed, Tokens
from pipelines.text.sequence_files import SequenceFile, document_schema, warn
from pipelines.text.tokenizer_files import load_tokenizer, plain_tokenizer, special_ids, tokenizer_files

FEWEST_WORDS, MOST_WORDS = 6, 200
"""Words of a sentence, for summaries: shorter sentences are left out, longer ones are cut."""

MOST_SENTENCES = 100
"""Sentences of a document that count for its summary, before and after short ones are left out."""

FEWEST_SENTENCES = 3
"""Sentences of a training document."""

_COLUMNS = ("document", "block", "split", "start", "first_sentence", "text", "sentences")
_ROWS = 1000
"""Sequences that are written at once."""


@dataclass(frozen=True)
class Text:
    """A document of a dataset.

    Attributes:
        number: its row in ``documents.parquet``.
        sentences: their texts; ``starts``: where each begins, in code points of the document.
        ends_section: for each sentence whether it is the last one of its block.
        blocks: its rows of ``blocks.parquet``.
    """

    number: int
    split: str
    sentences: list[str]
    starts: list[int]
    ends_section: list[bool]
    blocks: Any


def texts_of(corpus: Artifact) -> Iterator[Text]:
    """The documents of a dataset, in their order."""
    pending: list[Any] = []
    for batch in read_blocks(corpus, _COLUMNS):
        split = batch.schema.get_field_index("split")
        table = pa.Table.from_batches([batch])
        table = pa.concat_tables([*pending, table.set_column(split, "split", table["split"].cast(pa.string()))])
        bounds = np.flatnonzero(np.diff(table["document"].to_numpy(), prepend=-1))
        for start, end in itertools.pairwise(bounds):
            yield _text(table.slice(start, end - start))
        pending = [table.slice(bounds[-1])]
    yield from map(_text, pending)


def _text(blocks: Any) -> Text:
    sentences, starts, ends = [], [], []
    for block in blocks.select(["text", "start", "sentences"]).to_pylist():
        for span in block["sentences"]:
            sentences.append(block["text"][span["start"] : span["end"]])
            starts.append(block["start"] + span["start"])
            ends.append(False)
        if block["sentences"]:
            ends[-1] = True
    (batch,) = blocks.combine_chunks().to_batches()
    return Text(blocks["document"][0].as_py(), blocks["split"][0].as_py(), sentences, starts, ends, batch)


@dataclass(frozen=True)
class Row:
    """A sequence: its tokens, and what `document_schema` has besides.

    Attributes:
        columns: ``id, document, sentence, start, end`` of its tokens.
    """

    columns: Tokens
    special: Any
    text: Any
    segment: Any
    label: str
    document: int
    sentences: Sequence[int]


def build(run: Run) -> None:
    """Write the documents of a dataset as sequences; see `pipelines.stages.sequences.run`."""
    corpus: Artifact = run.inputs["corpus"]
    files = tokenizer_files(run.inputs["tokenizer"])
    tokenizer = load_tokenizer(files)
    special = special_ids(files, tokenizer)
    encoder = Encoder(tokenizer, special)
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    shape = corpus.counts["shape"]
    layout: _Summaries | _Segments
    if shape == "summaries":
        layout = _Summaries(run.config.max_length, special, references(corpus), corpus.counts["summary_sentences"])
    else:
        layout = _Segments(run.config.max_length, special)
    total = int(corpus.counts.get("documents", 0)) or None
    written: dict[str, _Writer] = {}
    with contextlib.ExitStack() as stack, run.progress.task("sequences", total=total, unit="documents") as bar:
        for text in texts_of(corpus):
            blocks = block_columns(text.blocks)
            tokens, _ = encoder(blocks, tokenizer.encode_batch(blocks["text"], add_special_tokens=False))
            for row in layout.rows(text, tokens, counts[text.split]):
                if text.split not in written:
                    file = SequenceFile(text.split, document_schema(), special["unk"], run, stack)
                    written[text.split] = _Writer(file)
                written[text.split].add(row)
            bar.advance(1)
        for writer in written.values():
            writer.flush()
    if not written:
        raise InputError(f"{corpus.reference} has no document that a sequence can be made of")
    for name, data in plain_tokenizer(files, tokenizer).items():
        run.out.write(f"tokenizer/{name}", data)
    run.out.counts |= {
        "max_length": run.config.max_length,
        "vocab_size": tokenizer.get_vocab_size(),
        "special_tokens": special,
        "shape": shape,
        **{key: corpus.counts[key] for key in ("summary_sentences", "sharing_test_documents") if key in corpus.counts},
        "splits": {split: {**written[split].file.counts, **counts[split]} for split in SPLITS if split in written},
    }
    warn(run, encoder.replaced)


class _Writer:
    """Collects the rows of a split."""

    def __init__(self, file: SequenceFile) -> None:
        self.file = file
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == _ROWS:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        tokens = Tokens(*(np.concatenate(parts) for parts in zip(*(row.columns for row in rows), strict=True)))
        offsets = np.cumsum([0, *(len(row.special) for row in rows)]).astype(np.int32)
        packed = Packed(tokens, np.concatenate([row.special for row in rows]), offsets)
        self.file.write(
            packed,
            np.concatenate([row.text for row in rows]),
            pa.array([row.label for row in rows], pa.string()),
            pa.array([row.document for row in rows], pa.int32()),
            np.concatenate([row.segment for row in rows]),
            pa.array([row.sentences for row in rows], pa.list_(pa.int32())),
        )


def references(corpus: Artifact) -> list[list[str]]:
    """The reference summaries of each document, each with one sentence on a line."""
    with corpus.open(DOCUMENTS) as raw:
        return [(pair or "").split("\n\n") for pair in open_parquet(raw).read(columns=["pair"])["pair"].to_pylist()]


def oracle(sentences: Sequence[str], reference: str, size: int) -> list[int]:
    """The sentences that the greedy oracle takes, in lower case as the published code reads them."""
    return greedy_oracle([s.lower() for s in sentences], reference.lower().split("\n"), size)


class _Summaries:
    """Lays out documents with summaries."""

    def __init__(
        self, length: int, special: dict[str, int | None], summaries: Sequence[Sequence[str]], size: int
    ) -> None:
        self._length, self._begin, self._separator = length, special["cls"], special["sep"]
        self._references, self._size = summaries, size

    def rows(self, text: Text, tokens: Tokens, counts: Counter[str]) -> Iterator[Row]:
        """The row of a document; none if it is dropped."""
        is_training = text.split == "train"
        chosen = set(oracle(text.sentences[:MOST_SENTENCES], self._references[text.number][0], self._size))
        counts["empty_oracles"] += not chosen
        words = [sentence.split() for sentence in text.sentences]
        kept = [number for number, found in enumerate(words) if len(found) >= FEWEST_WORDS]
        if not kept and not is_training:
            kept = list(range(len(words)))
        bounds = np.searchsorted(tokens.sentence, np.arange(len(words) + 1))
        pieces = [(n, self._pieces(text, n, bounds, tokens)) for n in kept[:MOST_SENTENCES]]
        pieces = [(number, found) for number, found in pieces if len(found)]
        if is_training and len(pieces) < FEWEST_SENTENCES:
            counts["short_documents"] += 1
            return
        lengths = np.cumsum([len(found) + 2 for _, found in pieces])
        fitting = int((lengths <= self._length).sum())
        counts["cut_documents"] += fitting < len(pieces)
        if not fitting and pieces and not is_training:
            pieces, fitting = [(pieces[0][0], pieces[0][1][: self._length - 2])], 1
        if not fitting:
            counts["short_documents"] += 1
            return
        yield self._row(text, pieces[:fitting], tokens, chosen)

    def _pieces(self, text: Text, number: int, bounds: Any, tokens: Tokens) -> Any:
        """The places among the tokens of those of a sentence, cut after `MOST_WORDS` words."""
        found = np.arange(bounds[number], bounds[number + 1])
        words = text.sentences[number].split()
        if len(words) > MOST_WORDS:
            end = text.starts[number] + len(" ".join(words[:MOST_WORDS]))
            found = found[tokens.end[found] <= end]
        return found

    def _row(self, text: Text, pieces: Sequence[tuple[int, Any]], tokens: Tokens, chosen: set[int]) -> Row:
        sizes = np.array([len(found) + 2 for _, found in pieces])
        segment = np.repeat(np.arange(len(pieces)), sizes).astype(np.int32)
        ends = np.cumsum(sizes)
        special = np.zeros(ends[-1], bool)
        special[ends - sizes] = special[ends - 1] = True
        columns = _spread(tokens, np.concatenate([found for _, found in pieces]), special)
        columns.id[ends - sizes], columns.id[ends - 1] = self._begin, self._separator
        numbers = [number for number, _ in pieces]
        label = " ".join("1" if number in chosen else "0" for number in numbers)
        return Row(columns, special, (segment % 2).astype(np.int8), segment, label, text.number, numbers)


class _Segments:
    """Lays out the boundaries between the sentences of documents."""

    def __init__(self, length: int, special: dict[str, int | None]) -> None:
        self._side, self._begin, self._separator = (length - 2) // 2, special["cls"], special["sep"]

    def rows(self, text: Text, tokens: Tokens, counts: Counter[str]) -> Iterator[Row]:
        """One row for each sentence but the last."""
        if len(text.sentences) < 2:
            counts["one_sentence"] += 1
            return
        counts["one_section"] += not any(text.ends_section[:-1])
        # where each sentence but the first begins among the tokens
        bounds = np.searchsorted(tokens.sentence, np.arange(1, len(text.sentences))).tolist()
        for number, bound in enumerate(bounds):
            left = np.arange(max(0, bound - self._side), bound)
            right = np.arange(bound, min(bound + self._side, len(tokens.id)))
            special = np.zeros(len(left) + len(right) + 2, bool)
            special[[0, len(left) + 1]] = True
            columns = _spread(tokens, np.concatenate([left, right]), special)
            columns.id[0], columns.id[len(left) + 1] = self._begin, self._separator
            position = np.arange(len(special))
            yield Row(
                columns,
                special,
                (position > len(left) + 1).astype(np.int8),  # the separator is of the first type
                (position > len(left)).astype(np.int32),  # but of the right context
                str(int(text.ends_section[number])),
                text.number,
                [number],
            )


def _spread(tokens: Tokens, places: Any, special: Any) -> Tokens:
    """The tokens at some places, with room for special tokens between them."""
    found = []
    for column in tokens:
        wide = np.full(len(special), NOT_TEXT, column.dtype)
        wide[~special] = column[places]
        found.append(wide)
    return Tokens(*found)
