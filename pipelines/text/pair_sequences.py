"""Sequences for translation, ``build-sequences --packing pairs``: one row for each example with two texts.

The first text is the source, between a begin and a separator token like every sequence.  The second is the target: its ids,
then the separator of its tokenizer.  Training prepends the decoder's start token.

A pair with an empty side is dropped.  A pair with a side that is too long is dropped from the training split, since half a
sentence is not a translation.  In the other splits it is cut, so that evaluation misses no example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from guidance.errors import InputError
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Artifact
from pipelines.text.corpus_files import SPLITS, check_pairs, whole_documents
from pipelines.text.encoding import Encoder, Tokens, block_columns
from pipelines.text.sequence_files import Counts, Packed, counts_of_splits, one_each, pair_schema, write_sequences


def build(run: Run) -> None:
    """Write the pairs of a corpus as sequences; see `pipelines.stages.sequences.build`."""
    corpus: Artifact = run.inputs["corpus"]
    check_pairs(corpus)
    source = target = Encoder(run.inputs["tokenizer"])
    encoders = {"tokenizer": source}
    if "target_tokenizer" in run.inputs:
        encoders["target-tokenizer"] = target = Encoder(run.inputs["target_tokenizer"])
    counts, length = counts_of_splits(), run.config.max_length
    with run.progress.task("sequences", total=corpus.counts.get("documents") or None, unit="pairs") as bar:

        def pairs() -> Iterator[tuple[str, Packed, list[Any]]]:
            for table in whole_documents(corpus):
                yield from _pairs(table, source, target, length, counts)
                bar.advance(int((table["block"].to_numpy() == 0).sum()))

        write_sequences(
            run,
            encoders,
            pair_schema(),
            pairs(),
            counts,
            InputError(f"{corpus.reference} has no pair of at most {length} tokens", hint="raise --max-length"),
            target_vocab_size=target.tokenizer.get_vocab_size(),
            target_special_tokens=target.special,
        )


def _pairs(
    table: pa.Table, source: Encoder, target: Encoder, length: int, counts: Counts
) -> Iterator[tuple[str, Packed, list[Any]]]:
    """The pairs to keep from a table of whole documents, by split; the others are counted in ``counts``."""
    block, document = (table[name].to_numpy() for name in ("block", "document"))
    complete = np.zeros(len(block), bool)
    complete[:-1] = (block[:-1] == 0) & (block[1:] == 1) & (document[1:] == document[:-1])
    incomplete = table.filter(pa.array((block == 0) & ~complete))["split"].to_pylist()
    for split, number in Counter(incomplete).items():
        counts[split]["empty_pairs"] += number
    if not complete.any():
        return
    first, second = (
        block_columns(table.filter(pa.array(chosen)).combine_chunks().to_batches()[0])
        for chosen in (complete, np.roll(complete, 1))
    )
    (sources, source_sizes), (targets, target_sizes) = source(first), target(second)
    empty = (source_sizes == 0) | (target_sizes == 0)
    long = ((source_sizes > length - 2) | (target_sizes > length - 1)) & ~empty
    splits = np.array(first["split"], dtype=object)
    for split in SPLITS:
        in_split, own = splits == split, counts[split]
        own["empty_pairs"] += int((in_split & empty).sum())
        own["long_pairs" if split == "train" else "cut_pairs"] += int((in_split & long).sum())
        kept = in_split & ~empty & ~(long & (split == "train"))
        if kept.any():
            tokens, sizes = _first_tokens(sources, source_sizes, kept, length - 2)
            packed = one_each(tokens, sizes, source.begin, source.separator)
            tokens, sizes = _first_tokens(targets, target_sizes, kept, length - 1)
            offsets = np.concatenate([[0], np.cumsum(sizes + 1)]).astype(np.int32)
            ids = np.full(offsets[-1], target.separator, np.int32)  # one is left behind each target
            ids[np.arange(len(tokens.id)) + np.repeat(np.arange(len(sizes)), sizes)] = tokens.id
            kind = pair_schema().field("target").type
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids), type=kind)
            own["target_tokens"] += len(ids)
            own["target_unknown_tokens"] += int((tokens.id == target.special["unk"]).sum())
            yield split, packed, [column]


def _first_tokens(tokens: Tokens, sizes: Any, kept: Any, limit: int) -> tuple[Tokens, Any]:
    """The first tokens of the kept rows, at most ``limit`` of each, and how many each row has."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return tokens.at(kept[rows] & (within < limit)), np.minimum(sizes[kept], limit)
