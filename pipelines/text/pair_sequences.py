"""Sequences for translation, ``build-sequences --packing pairs``: one row for each example with two texts.

The first text is the source, between a begin and a separator token like every sequence.  The second is the target: its ids,
then the separator of its tokenizer.  Training prepends the decoder's start token.

A pair with an empty side is dropped.  A pair with a side that is too long is dropped from the training split, since half a
sentence is not a translation.  In the other splits it is cut, so that evaluation misses no example.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from guidance.errors import InputError
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Artifact
from pipelines.text.corpus_files import SPLITS, check_pairs, whole_documents
from pipelines.text.encoding import Encoder, block_columns
from pipelines.text.packing import Tokens, one_each
from pipelines.text.sequence_files import SequenceFile, pair_schema, warn
from pipelines.text.tokenizer_files import load_tokenizer, plain_tokenizer, special_ids, tokenizer_files


def build(run: Run) -> None:
    """Write the pairs of a corpus as sequences; see `pipelines.stages.sequences.run`."""
    corpus: Artifact = run.inputs["corpus"]
    check_pairs(corpus)
    source = _Side.of(run, "tokenizer")
    target = _Side.of(run, "target_tokenizer") if "target_tokenizer" in run.inputs else source
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    files: dict[str, SequenceFile] = {}
    total = int(corpus.counts.get("documents", 0)) or None
    with contextlib.ExitStack() as stack, run.progress.task("sequences", total=total, unit="pairs") as bar:
        for table in whole_documents(corpus):
            for split, pairs in _pairs(table, source, target, run.config.max_length, counts):
                if split not in files:
                    files[split] = SequenceFile(split, pair_schema(), source.special["unk"], run, stack)
                pairs.write(files[split], source, target, counts[split])
            bar.advance(int((table["block"].to_numpy() == 0).sum()))
    if not files:
        raise InputError(
            f"{corpus.reference} has no pair of at most {run.config.max_length} tokens", hint="raise --max-length"
        )
    for side in {id(side): side for side in (source, target)}.values():
        for name, data in plain_tokenizer(side.files, side.tokenizer).items():
            run.out.write(f"{side.role.replace('_', '-')}/{name}", data)
    run.out.counts |= {
        "max_length": run.config.max_length,
        "vocab_size": source.tokenizer.get_vocab_size(),
        "special_tokens": source.special,
        "target_vocab_size": target.tokenizer.get_vocab_size(),
        "target_special_tokens": target.special,
        "splits": {split: {**files[split].counts, **counts[split]} for split in SPLITS if split in files},
    }
    warn(run, source.encoder.replaced + (target.encoder.replaced if target is not source else 0))


@dataclass(frozen=True)
class _Side:
    """One side's tokenizer; ``role`` is the name of the stage's input that it comes from."""

    role: str
    files: dict[str, bytes]
    tokenizer: Any
    special: dict[str, int | None]
    encoder: Any

    @classmethod
    def of(cls, run: Run, role: str) -> _Side:
        files = tokenizer_files(run.inputs[role])
        tokenizer = load_tokenizer(files)
        special = special_ids(files, tokenizer)
        return cls(role, files, tokenizer, special, Encoder(tokenizer, special))

    def encode(self, blocks: dict[str, Any]) -> tuple[Tokens, Any]:
        """The tokens of some blocks, and the number of tokens of each block."""
        encodings = self.tokenizer.encode_batch(blocks["text"], add_special_tokens=False)
        return self.encoder(blocks, encodings)[0], np.fromiter(
            (len(e.ids) for e in encodings), np.int64, len(encodings)
        )


@dataclass(frozen=True)
class _Pairs:
    """Some pairs: for each side all tokens, concatenated, and the number of tokens of each pair."""

    source: Tokens
    source_sizes: Any
    target: Tokens
    target_sizes: Any

    def write(self, file: SequenceFile, source: _Side, target: _Side, counts: Counter[str]) -> None:
        begin, separator, end = source.special["cls"], source.special["sep"], target.special["sep"]
        assert begin is not None and separator is not None and end is not None
        offsets = np.concatenate([[0], np.cumsum(self.target_sizes + 1)]).astype(np.int32)
        ids = np.full(offsets[-1], end, np.int32)
        ids[np.arange(len(self.target.id)) + np.repeat(np.arange(len(self.target_sizes)), self.target_sizes)] = (
            self.target.id
        )
        targets = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids), type=pair_schema().field("target").type)
        file.write(one_each(self.source, self.source_sizes, begin, separator), targets)
        counts["target_tokens"] += len(ids)
        counts["target_unknown_tokens"] += int((self.target.id == target.special["unk"]).sum())


def _pairs(
    table: pa.Table, source: _Side, target: _Side, length: int, counts: dict[str, Counter[str]]
) -> Iterator[tuple[str, _Pairs]]:
    """The pairs to keep from a table of whole documents, by split; the others are counted in ``counts``."""
    block, document = (table[name].to_numpy() for name in ("block", "document"))
    complete = np.zeros(len(block), bool)
    complete[:-1] = (block[:-1] == 0) & (block[1:] == 1) & (document[1:] == document[:-1])
    incomplete = table.filter(pa.array((block == 0) & ~complete))["split"].to_pylist()
    for split, number in Counter(incomplete).items():
        counts[split]["empty_pairs"] += number
    if not complete.any():
        return
    sides = [_rows(table, chosen) for chosen in (complete, np.roll(complete, 1))]
    (sources, source_sizes), (targets, target_sizes) = source.encode(sides[0]), target.encode(sides[1])
    empty = (source_sizes == 0) | (target_sizes == 0)
    long = ((source_sizes > length - 2) | (target_sizes > length - 1)) & ~empty
    splits = np.array(sides[0]["split"], dtype=object)
    for split in SPLITS:
        in_split = splits == split
        counts[split]["empty_pairs"] += int((in_split & empty).sum())
        counts[split]["long_pairs" if split == "train" else "cut_pairs"] += int((in_split & long).sum())
        kept = in_split & ~empty & ~(long & (split == "train"))
        if kept.any():
            sides_kept = (
                *_first_tokens(sources, source_sizes, kept, length - 2),
                *_first_tokens(targets, target_sizes, kept, length - 1),
            )
            yield split, _Pairs(*sides_kept)


def _rows(table: pa.Table, chosen: Any) -> dict[str, Any]:
    (batch,) = table.filter(pa.array(chosen)).combine_chunks().to_batches()
    return block_columns(batch)


def _first_tokens(tokens: Tokens, sizes: Any, kept: Any, limit: int) -> tuple[Tokens, Any]:
    """The first tokens of the kept rows, at most ``limit`` of each, and how many each row has."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = kept[rows] & (within < limit)
    return Tokens(*(column[chosen] for column in tokens)), np.minimum(sizes[kept], limit)
