"""Files of sequences: their columns, the writer, and warnings about what was written."""

from __future__ import annotations

from typing import Any

from pipelines.engine.stage import Run
from pipelines.storage.columns import column, list_column
from pipelines.text.packing import Packed


def sequence_schema() -> Any:
    """Columns of a file of sequences: lists of equal length with one entry per token, -1 for special tokens."""
    import pyarrow as pa

    return pa.schema(
        [
            list_column("id", pa.int32(), "piece of the vocabulary"),
            list_column("document", pa.int32(), "row in the corpus's documents.parquet"),
            list_column("sentence", pa.int32(), "running number in the document"),
            list_column("start", pa.int64(), "code points in the document, its blocks joined by one newline"),
            list_column("end", pa.int64(), "code points in the document, exclusive"),
            list_column("special", pa.bool_(), "true for tokens that are not text"),
        ]
    )


def pair_schema() -> Any:
    """Columns of a file of pairs: those of a sequence for the source, and the target, whose length may differ."""
    import pyarrow as pa

    return sequence_schema().append(
        list_column("target", pa.int32(), "piece of the target's vocabulary, its end token last")
    )


def example_schema() -> Any:
    """Columns of a file of examples: those of a sequence, the text that each token belongs to, the label, and the example."""
    import pyarrow as pa

    text = list_column("text", pa.int8(), "0 for the first text with its begin token and separators, 1 for the second")
    label = pa.field("label", pa.string(), metadata={"unit": "label of the example; null if it has none"})
    return (
        sequence_schema().append(text).append(label).append(column("example", pa.int32(), "row in documents.parquet"))
    )


def word_schema() -> Any:
    """Columns of a file of tagged words: those of an example, and the word of each token; the label has a tag for each word."""
    import pyarrow as pa

    return example_schema().append(
        list_column("word", pa.int32(), "number of its word in the example; -1 for special tokens")
    )


def document_schema() -> Any:
    """Columns of a file of documents with summaries or sections: those of examples, and what is said of each sentence."""
    import pyarrow as pa

    segment = list_column(
        "segment", pa.int32(), "running number in the sequence of the part that each token belongs to"
    )
    numbers = list_column(
        "sentences", pa.int32(), "running numbers in the document of the sentences that the label is about"
    )
    return example_schema().append(segment).append(numbers)


class SequenceFile:
    """Writes the file of one split.

    Attributes:
        counts: number of ``sequences``, of ``tokens`` (including special ones) and of ``unknown_tokens`` (text only).
    """

    def __init__(self, split: str, schema: Any, unknown: int | None, run: Run, stack: Any) -> None:
        self._file = stack.enter_context(run.out.parquet(f"{split}.parquet", schema))
        self._schema, self._unknown = schema, unknown
        self.counts = {"sequences": 0, "tokens": 0, "unknown_tokens": 0}

    def write(self, packed: Packed, *more: Any) -> None:
        """Add sequences; ``more`` are the schema's further columns: arrow arrays, or lists; or numpy arrays over tokens."""
        import numpy as np
        import pyarrow as pa

        more = tuple(
            pa.ListArray.from_arrays(pa.array(packed.offsets), pa.array(column))
            if isinstance(column, np.ndarray)
            else column
            for column in more
        )
        arrays = [
            pa.ListArray.from_arrays(pa.array(packed.offsets), pa.array(column), type=field.type)
            for column, field in zip([*packed.tokens, packed.special], self._schema, strict=False)
        ]
        self._file.write_table(pa.table([*arrays, *more], schema=self._schema))
        self.counts["sequences"] += len(packed.offsets) - 1
        self.counts["tokens"] += len(packed.special)
        if self._unknown is not None:
            self.counts["unknown_tokens"] += int((packed.tokens.id == self._unknown).sum())


_WARNINGS = {
    "cut_sentences": "sentences were longer than a sequence and were cut",
    "cut_examples": "examples were longer than a sequence and were cut",
    "divided_examples": "examples were longer than a sequence and were divided into windows that overlap",
    "cut_documents": "documents were longer than a sequence: their last sentences are left out",
    "short_documents": "documents had too few sentences and were dropped",
    "empty_oracles": "documents share no word with their summary, so that no sentence is right",
    "one_sentence": "documents have one sentence, so no boundary, and were dropped",
    "one_section": "documents have one section, so no boundary is right",
    "cut_pairs": "pairs had a side longer than a sequence and were cut",
    "long_pairs": "pairs had a side longer than a sequence and were dropped",
    "empty_pairs": "pairs had a side without tokens and were dropped",
}


def warn(run: Run, replaced: int) -> None:
    """Warn of cut, dropped and unknown text, from the counts of the splits.

    Args:
        replaced: number of text tokens that spelled a special token; see `Encoder.replaced`.
    """
    if replaced:
        run.warn(f"{replaced:,} pieces of text spelled a special token and became unknown tokens")
    for split, counts in run.out.counts["splits"].items():
        run.warn(*(f"{split}: {counts[key]:,} {what}" for key, what in _WARNINGS.items() if counts.get(key)))
        for side in ("", "target_"):
            unknown, all_ = counts.get(f"{side}unknown_tokens", 0), counts.get(f"{side}tokens", 0)
            if unknown > 0.05 * all_:
                run.warn(f"{split}: {unknown:,} of {all_:,} {side.replace('_', ' ')}tokens are unknown")
