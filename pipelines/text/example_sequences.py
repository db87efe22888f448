"""Sequences of a task's examples, ``build-sequences --packing examples``: one row for each example of a dataset.

A row is ``[CLS] text [SEP]``, or ``[CLS] text [SEP] pair [SEP]`` for examples with two texts.  A tokenizer whose own
template has two separators between texts, as RoBERTa's has, gets two.  Every example has a row, in the order of the dataset:
texts that are too long are cut, the longer one of a pair first, and a text without tokens leaves its special tokens.

A question with several choices has a row for each choice, the choice as its second text; what it is about is cut first, in
dialogues from its beginning.

Tagged words have a further column, the number of the word that each token belongs to.  They are not cut: an example that is
too long has several rows, one after the other, that overlap by half and begin with a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from guidance.errors import InputError
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.tables import DOCUMENTS
from pipelines.text.corpus_files import SPLITS, whole_documents
from pipelines.text.encoding import Encoder, Tokens, block_columns
from pipelines.text.sequence_files import (
    Counts,
    Packed,
    counts_of_splits,
    example_schema,
    lay_out,
    word_schema,
    write_sequences,
)
from pipelines.text.tokenizer_files import separators_between


def build(run: Run) -> None:
    """Write the examples of a dataset as sequences; see `pipelines.stages.sequences.build`."""
    corpus: Artifact = run.inputs["corpus"]
    encoder, counts = Encoder(run.inputs["tokenizer"]), counts_of_splits()
    labels, shape = _labels(corpus), corpus.counts.get("shape", "examples")
    layout = _Layout(run.config.max_length, encoder, shape, bool(corpus.counts.get("dialogues")))
    with run.progress.task("sequences", total=len(labels), unit="examples") as bar:

        def sequences() -> Iterator[tuple[str, Packed, list[Any]]]:
            for table in whole_documents(corpus):
                yield from layout.sequences(table, labels, counts)
                bar.advance(int((table["block"].to_numpy() == 0).sum()))

        write_sequences(
            run,
            {"tokenizer": encoder},
            word_schema() if shape == "tags" else example_schema(),
            sequences(),
            counts,
            InputError(f"{corpus.reference} has no examples"),
            shape=shape,
        )


def _labels(corpus: Artifact) -> list[str | None]:
    """The label of each document.  Raises InputError if a document has more texts than an example has."""
    with corpus.open(DOCUMENTS) as raw:
        table = open_parquet(raw).read(columns=["label", "blocks"])
    if "shape" not in corpus.counts and table.num_rows and table["blocks"].to_numpy().max() > 2:
        raise InputError(
            f"{corpus.reference} is running text, not examples of a task",
            hint="--packing full-sentences, or build it with: guide build-dataset",
        )
    labels: list[str | None] = table["label"].to_pylist()
    return labels


def _spans(first: Any, size: Any) -> Any:
    """The places of the tokens of some spans, which may overlap, one span after the other."""
    return np.arange(size.sum()) + np.repeat(first - (np.cumsum(size) - size), size)


def _windows(order: Any, first: Any, size: Any, words: Any, room: int) -> tuple[Any, Any, Any, int]:
    """Blocks, and where each begins among the tokens and how many it has, with those of more than ``room`` tokens divided.

    The windows of a block overlap by half of ``room``, or by more, so that each begins with the first token of a word; a word
    of more than ``room`` tokens loses its last ones.  The number of blocks that were divided comes last.
    """
    windows = []
    for block, start, length in zip(order.tolist(), first.tolist(), size.tolist(), strict=True):
        begins = np.flatnonzero(np.diff(words[start : start + length], prepend=-1))  # the first token of each word
        here = 0
        while here + room < length:
            windows.append((block, start + here, room))
            beginning = begins[begins <= here + room // 2]
            after = begins[begins > here]
            if not len(after):
                break
            here = max(int(beginning[-1]), int(after[0]))
        else:
            windows.append((block, start + here, length - here))
    blocks, firsts, sizes = np.array(windows, np.int64).reshape(-1, 3).T
    return blocks, firsts, sizes, int((size > room).sum())


def _words(blocks: Any, encodings: Any) -> Any:
    """For each token of some blocks, the number of its word in the block; words are parted by single spaces."""
    words = [np.zeros(0, np.int32)]
    for text, encoding in zip(blocks["text"], encodings, strict=True):
        spaces = np.flatnonzero(np.frombuffer(text.encode("utf-32-le"), np.uint32) == ord(" "))
        # the space before a word may belong to its first token
        inside = np.array([end - 1 for _, end in encoding.offsets], np.int64)
        words.append(np.searchsorted(spaces, inside).astype(np.int32))
    return np.concatenate(words)


class _Layout:
    """Puts the texts of examples between special tokens.

    Args:
        shape: of the dataset.  Of two texts the longer one is cut first, but of ``choices`` the first one.
        from_start: whether first texts lose their beginning.
    """

    def __init__(self, length: int, encoder: Encoder, shape: str, from_start: bool) -> None:
        self._length, self._encoder, self._shape, self._from_start = length, encoder, shape, from_start
        self._between = separators_between(encoder.tokenizer)

    def sequences(
        self, table: pa.Table, labels: list[str | None], counts: Counts
    ) -> Iterator[tuple[str, Packed, list[Any]]]:
        """The sequences of a table of whole documents, by split."""
        (batch,) = table.combine_chunks().to_batches()
        blocks, number = block_columns(batch), table["block"].to_numpy()
        encodings = self._encoder.encode(blocks)
        tokens, sizes = self._encoder(blocks, encodings)
        words = _words(blocks, encodings) if self._shape == "tags" else None
        splits = np.array(blocks["split"], dtype=object)
        for split in SPLITS:
            kept = splits == split
            if not kept.any():
                continue
            order = np.flatnonzero(kept)
            # the first block of an example stands again before its third and every later one
            again = np.flatnonzero(number[order] > 1)
            order = np.insert(order, again, (order - number[order])[again])
            first, size, divided = (np.cumsum(sizes) - sizes)[order], sizes[order], 0
            if words is not None:
                order, first, size, divided = _windows(order, first, size, words, self._length - 2)
            is_pair = number[order] > 0
            taken = _spans(first, size)
            packed, parts, cut, places = self(tokens.at(taken), size, is_pair)
            counts[split]["cut_examples"] += cut
            if cut:
                counts[split]["cut_tokens"] += len(taken) - len(places)
            if divided:
                counts[split]["divided_examples"] += divided
            documents = blocks["document"][order][~is_pair]
            its_labels = pa.array([labels[document] for document in documents.tolist()], pa.string())
            columns: list[Any] = [parts, its_labels, pa.array(documents, pa.int32())]
            if words is not None:
                numbers = np.full(len(packed.tokens.id), -1, np.int32)
                numbers[places] = words[taken]
                columns.append(numbers)
            yield split, packed, columns

    def __call__(self, tokens: Tokens, sizes: Any, is_pair: Any) -> tuple[Packed, Any, int, Any]:
        """Sequences of examples, the number of each token's text (0 or 1), how many examples were cut, and where the tokens
        that were kept are in the sequences.

        Args:
            tokens: of all blocks, one block after the other; ``sizes``: how many each block has.
            is_pair: whether a block is the second text of the example before it.
        """
        example = np.cumsum(~is_pair) - 1  # of each block
        two = np.zeros(example[-1] + 1, bool)
        two[example[is_pair]] = True
        first, second = sizes[~is_pair], np.zeros(len(two), np.int64)
        second[two] = sizes[is_pair]
        room = self._length - np.where(two, 2 + self._between, 2)
        # the longer text is cut first; of an odd number of tokens the first text gets one more
        least = room if self._shape == "choices" else room // 2
        kept_second = np.minimum(second, np.maximum(room - first, least))
        kept_first = np.minimum(first, room - kept_second)
        kept = np.where(is_pair, kept_second[example], kept_first[example])

        ends = np.cumsum(kept_first + kept_second + np.where(two, 2 + self._between, 2))
        starts = np.concatenate([[0], ends[:-1]])
        start_of_block = np.where(is_pair, (starts + 1 + kept_first + self._between)[example], (starts + 1)[example])
        within = np.arange(len(tokens.id)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        if self._from_start:
            within -= np.repeat(np.where(is_pair, 0, sizes - kept), sizes)
        chosen = (within >= 0) & (within < np.repeat(kept, sizes))
        places = (np.repeat(start_of_block, sizes) + within)[chosen]

        packed = lay_out(tokens.at(chosen), places, ends, self._encoder.begin, self._encoder.separator)
        position = np.arange(ends[-1]) - np.repeat(starts, ends - starts)
        # as BERT counts them: the first separator belongs to the first text, the last one to the second
        second_begins = np.where(two, kept_first + 1 + self._between, self._length + 1)
        parts = (position >= np.repeat(second_begins, ends - starts)).astype(np.int8)
        num_cut = int(((kept_first < first) | (kept_second < second)).sum())
        return packed, parts, num_cut, places
