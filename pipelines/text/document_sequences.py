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
from pipelines.text.corpus_files import whole_documents
from pipelines.text.encoding import Encoder, Tokens, block_columns
from pipelines.text.sequence_files import Packed, counts_of_splits, document_schema, lay_out, one_each, write_sequences

FEWEST_WORDS, MOST_WORDS = 6, 200
"""Words of a sentence, for summaries: shorter sentences are left out, longer ones are cut."""

MOST_SENTENCES = 100
"""Sentences of a document that count for its summary, before and after short ones are left out."""

FEWEST_SENTENCES = 3
"""Sentences of a training document."""

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
    for table in whole_documents(corpus):
        bounds = np.flatnonzero(np.diff(table["document"].to_numpy(), prepend=-1, append=-1))
        for start, end in itertools.pairwise(bounds):
            yield _text(table.slice(start, end - start))


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
    """A sequence, and what `document_schema` has besides."""

    packed: Packed
    text: Any
    segment: Any
    label: str
    document: int
    sentences: Sequence[int]


def build(run: Run) -> None:
    """Write the documents of a dataset as sequences; see `pipelines.stages.sequences.build`."""
    corpus: Artifact = run.inputs["corpus"]
    encoder, counts = Encoder(run.inputs["tokenizer"]), counts_of_splits()
    shape, length = corpus.counts["shape"], run.config.max_length
    gold = references(corpus) if shape == "summaries" else []
    with run.progress.task("sequences", total=corpus.counts.get("documents") or None, unit="documents") as bar:

        def sequences() -> Iterator[tuple[str, Packed, list[Any]]]:
            held: dict[str, list[Row]] = {split: [] for split in counts}
            for text in texts_of(corpus):
                tokens, _ = encoder(block_columns(text.blocks))
                rows, of_text = held[text.split], (text, tokens, counts[text.split], length, encoder)
                size = corpus.counts.get("summary_sentences")
                for row in _summary(*of_text, gold[text.number][0], size) if gold else _boundaries(*of_text):
                    rows.append(row)
                    if len(rows) == _ROWS:
                        yield text.split, *_joined(rows)
                        rows.clear()
                bar.advance(1)
            yield from ((split, *_joined(rows)) for split, rows in held.items() if rows)

        write_sequences(
            run,
            {"tokenizer": encoder},
            document_schema(),
            sequences(),
            counts,
            InputError(
                f"{corpus.reference} has no document that a sequence can be made of",
                hint="a document to divide has two sentences at least" if shape == "segments" else None,
            ),
            shape=shape,
            **{
                key: own for key, own in corpus.counts.items() if key in ("summary_sentences", "sharing_test_documents")
            },
        )


def _joined(rows: Sequence[Row]) -> tuple[Packed, list[Any]]:
    """Some rows as sequences, and their further columns."""
    tokens = Tokens(*(np.concatenate(parts) for parts in zip(*(row.packed.tokens for row in rows), strict=True)))
    offsets = np.cumsum([0, *(len(row.text) for row in rows)]).astype(np.int32)
    return Packed(tokens, np.concatenate([row.packed.special for row in rows]), offsets), [
        np.concatenate([row.text for row in rows]),
        pa.array([row.label for row in rows], pa.string()),
        pa.array([row.document for row in rows], pa.int32()),
        np.concatenate([row.segment for row in rows]),
        pa.array([row.sentences for row in rows], pa.list_(pa.int32())),
    ]


def references(corpus: Artifact) -> list[list[str]]:
    """The reference summaries of each document, each with one sentence on a line."""
    with corpus.open(DOCUMENTS) as raw:
        return [(pair or "").split("\n\n") for pair in open_parquet(raw).read(columns=["pair"])["pair"].to_pylist()]


def oracle(sentences: Sequence[str], reference: str, size: int) -> list[int]:
    """The sentences that the greedy oracle takes, in lower case as the published code reads them."""
    return greedy_oracle([s.lower() for s in sentences], reference.lower().split("\n"), size)


def _summary(
    text: Text, tokens: Tokens, counts: Counter[str], length: int, encoder: Encoder, reference: str, size: int
) -> Iterator[Row]:
    """The row of a document with a summary; none if it is dropped."""
    is_training = text.split == "train"
    chosen = set(oracle(text.sentences[:MOST_SENTENCES], reference, size))
    counts["empty_oracles"] += bool(reference) and not chosen
    words = [sentence.split() for sentence in text.sentences]
    kept = [number for number, own in enumerate(words) if len(own) >= FEWEST_WORDS]
    if not kept and not is_training:
        kept = list(range(len(words)))
    bounds = np.searchsorted(tokens.sentence, np.arange(len(words) + 1))
    pieces = []  # numbers of sentences, and the places of their tokens, cut after `MOST_WORDS` words
    for number in kept[:MOST_SENTENCES]:
        places = np.arange(bounds[number], bounds[number + 1])
        if len(words[number]) > MOST_WORDS:
            end = text.starts[number] + len(" ".join(words[number][:MOST_WORDS]))
            places = places[tokens.end[places] <= end]
        if len(places):
            pieces.append((number, places))
    lengths = np.cumsum([len(places) + 2 for _, places in pieces])
    fitting = int((lengths <= length).sum())
    if is_training and len(pieces) < FEWEST_SENTENCES:
        fitting = 0
    else:
        counts["cut_documents"] += fitting < len(pieces)
    whole = sum(len(places) for _, places in pieces)
    if not fitting and pieces and not is_training:
        pieces, fitting = [(pieces[0][0], pieces[0][1][: length - 2])], 1
    if not fitting:
        counts["short_documents"] += 1
        return
    numbers, taken = zip(*pieces[:fitting], strict=True)
    sizes = np.array(list(map(len, taken)))
    if lost := whole - int(sizes.sum()):
        counts["cut_tokens"] += lost
    segment = np.repeat(np.arange(fitting), sizes + 2).astype(np.int32)
    label = " ".join("1" if number in chosen else "0" for number in numbers)
    packed = one_each(tokens.at(np.concatenate(taken)), sizes, encoder.begin, encoder.separator)
    yield Row(packed, (segment % 2).astype(np.int8), segment, label, text.number, numbers)


def _boundaries(text: Text, tokens: Tokens, counts: Counter[str], length: int, encoder: Encoder) -> Iterator[Row]:
    """A row for each boundary between two sentences of a document."""
    if len(text.sentences) < 2:
        counts["one_sentence"] += 1
        return
    counts["one_section"] += not any(text.ends_section[:-1])
    side = (length - 2) // 2
    # where each sentence but the first begins among the tokens
    bounds = np.searchsorted(tokens.sentence, np.arange(1, len(text.sentences))).tolist()
    for number, bound in enumerate(bounds):
        start, end = max(0, bound - side), min(bound + side, len(tokens.id))
        separator, position = 1 + bound - start, np.arange(end - start + 2)
        places, ends = np.delete(position, [0, separator]), np.array([len(position)])
        yield Row(
            lay_out(tokens.at(slice(start, end)), places, ends, encoder.begin, encoder.separator),
            (position > separator).astype(np.int8),  # the separator is of the first type
            (position >= separator).astype(np.int32),  # but of the right context
            str(int(text.ends_section[number])),
            text.number,
            [number],
        )
