"""The work of ``build-cooccur``: text to ids, ids to pairs, and merging partial files of either.

There are two maps.  The first encodes text and stores the ids, since reading them back takes a hundredth of the time of
encoding again.  The second counts pairs in far larger pieces, since the counts of a piece are as large as a few megabytes
of text.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from guidance.errors import InputError
from pipelines.engine.shards import Shard, ShareDone, map_shards, merge_tree, parquet_file, row_groups, shards_of
from pipelines.engine.stage import Work
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import DigestWriter, open_parquet
from pipelines.storage.tables import OF_COUNTS, schema_of
from pipelines.text.corpus_files import BLOCK_OF_COLUMN, training_blocks
from pipelines.text.encoding import BLOCK_COLUMNS, Encoder, tokenizer_folder, tokens_of

PIECE = 32_000_000
"""Approximate number of characters whose pairs are counted at once.  It determines how many files the second map writes."""

BAND = 1 << 23
"""Cells of the table in memory at once while merging, 8 bytes each."""


# the first map: text to ids


def encode(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Write the training text of a shard as ids, one row per batch.

    A row has the ids in order, the length of each unit (a sentence, or a block with ``cross``), which windows do not cross,
    and how often each id occurs.
    """
    schema = encoded_schema()
    with parquet_file(path, schema) as file:
        for blocks in shard.tables((*BLOCK_COLUMNS, "block")):
            blocks = training_blocks(blocks, settings["block"])
            for tokens in tokens_of(settings["tokenizer"], [blocks]):
                units = (tokens.document.astype(np.int64) << 32) + tokens.sentence
                if settings["cross"]:  # the unit is the block: the last one that does not begin after the sentence
                    firsts = (blocks["document"].to_numpy() << 32) + blocks["first_sentence"].to_numpy()
                    units = firsts.searchsorted(units, side="right")
                bounds = np.flatnonzero(np.diff(units, prepend=-1, append=-1))
                ids, counts = np.unique(tokens.id, return_counts=True)
                row = [tokens.id, np.diff(bounds), ids, counts]
                arrays = [pa.array([column], field.type) for column, field in zip(row, schema, strict=True)]
                file.write_table(pa.table(arrays, schema=schema))


def encoded_schema() -> Any:
    """Columns of a partial file of the first map."""
    kinds = {"token": pa.int32(), "length": pa.int32(), "id": pa.int32(), "count": pa.int64()}
    return pa.schema(
        [pa.field(name, pa.list_(pa.field("element", kind, False)), False) for name, kind in kinds.items()]
    )


def merge_frequencies(paths: Sequence[Path], settings: Mapping[str, Any], path: Path) -> None:
    """Merge partial files: sum how often each id occurs."""
    counts = sum_of_frequencies(paths, np.zeros(settings["size"], np.int64))
    ids = np.flatnonzero(counts)
    schema = pa.schema([field for field in encoded_schema() if field.name in ("id", "count")])
    with parquet_file(path, schema) as file:
        arrays = [pa.array([column], field.type) for column, field in zip((ids, counts[ids]), schema, strict=True)]
        file.write_table(pa.table(arrays, schema=schema))


def sum_of_frequencies(paths: Sequence[Path], counts: Any) -> Any:
    """``counts``, one number per id, to which the counts of partial files are added in place."""
    for path in paths:
        for table in row_groups(path, ["id", "count"]):
            ids, numbers = (table[name].combine_chunks().flatten().to_numpy() for name in ("id", "count"))
            counts[ids] += numbers  # a row has each id only once
    return counts


# the second map: ids to pairs


def count_schema() -> Any:
    """The schema of ``counts.parquet``."""
    return schema_of(OF_COUNTS)


@dataclass(frozen=True)
class PartialFiles:
    """Some partial files of the first map whose pairs are counted together."""

    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name that depends only on the files, since their names contain their digests."""
        names = "\n".join(Path(path).name for path in self.paths)
        return "pairs-" + hashlib.sha256(names.encode()).hexdigest()[:32]


def count(piece: PartialFiles, settings: Mapping[str, Any], path: Path) -> None:
    """Count the pairs of a piece; the partial file has the columns of ``counts.parquet``."""
    from pipelines.statistics.pair_counting import count_pairs

    ids, options = settings["ids"], {"window": settings["window"], "presence": settings["presence"]}
    with _count_file(path) as file:
        # no variable holds the rows, so that count_pairs can free them once it has replaced them by something smaller
        for arrays in count_pairs(*_rows_of(piece, ids), len(ids), **options):
            file.write_table(pa.table(list(arrays), schema=count_schema()))


def _rows_of(piece: PartialFiles, ids: Sequence[int]) -> tuple[Any, Any]:
    """The row of each token of a piece, ``len(ids)`` for tokens that are not counted; and where units begin."""
    row_of = np.full(max(ids) + 2, len(ids), np.uint16)
    row_of[list(ids)] = np.arange(len(ids), dtype=np.uint16)
    rows, lengths = [np.empty(0, np.uint16)], [np.zeros(1, np.int64)]
    for source in piece.paths:
        for table in row_groups(Path(source), ["token", "length"]):
            tokens, unit_lengths = (table[name].combine_chunks().flatten().to_numpy() for name in ("token", "length"))
            rows.append(row_of[np.minimum(tokens, len(row_of) - 1)])
            lengths.append(unit_lengths)
    return np.concatenate(rows), np.concatenate(lengths).cumsum()


def merge_pairs(paths: Sequence[Path], settings: Mapping[str, Any], path: Path) -> None:
    """Merge partial files, a band of rows at a time: memory is bounded by a band and a batch of each file."""
    size = settings["rows"]
    band = max(1, BAND // size)
    with contextlib.ExitStack() as stack, _count_file(path) as out:
        files = [open_parquet(stack.enter_context(open(path, "rb"))) for path in paths]
        streams = [_Bands(map(arrays_of, file.iter_batches(batch_size=1 << 16))) for file in files]
        for first in range(0, size, band):
            counts = np.zeros((min(band, size - first), size), np.int64)
            for stream in streams:
                for i, j, number in stream.below(first + band):
                    counts[i - first, j] += number
            i, j = counts.nonzero()
            columns = [(i + first).astype(np.int32), j.astype(np.int32), counts[i, j]]
            if len(i):
                out.write_table(pa.table(columns, schema=count_schema()))


class _Bands:
    """A stream of sorted pairs, taken band by band."""

    def __init__(self, batches: Iterator[tuple[Any, Any, Any]]) -> None:
        self._batches = batches
        self._pending: tuple[Any, Any, Any] | None = next(batches, None)

    def below(self, row: int) -> Iterator[tuple[Any, Any, Any]]:
        """The next pairs, as long as i is below ``row``."""
        while self._pending is not None:
            stop = int(self._pending[0].searchsorted(row))
            yield cast("tuple[Any, Any, Any]", tuple(column[:stop] for column in self._pending))
            if stop < len(self._pending[0]):
                self._pending = cast("tuple[Any, Any, Any]", tuple(column[stop:] for column in self._pending))
                return
            self._pending = next(self._batches, None)


def arrays_of(batch: Any) -> tuple[Any, Any, Any]:
    """The arrays i, j and count of a batch of pairs."""
    i, j, number = (batch.column(name).to_numpy() for name in ("i", "j", "count"))
    return i, j, number


@contextlib.contextmanager
def _count_file(path: Path) -> Iterator[Any]:
    """A writer for a partial file of counts; delta encoding of sorted numbers takes half the time and space of dictionaries."""
    differences = dict.fromkeys(count_schema().names, "DELTA_BINARY_PACKED")
    options = {"compression": "zstd", "use_dictionary": False, "column_encoding": differences}
    with DigestWriter(path) as file, pq.ParquetWriter(file, count_schema(), **options) as writer:
        yield writer


# both


def count_all(work: Work[Any]) -> tuple[list[Path], Encoder, Any, Any]:
    """The partial files of the second map, the encoder, how often each id occurs (int64), and the ids of the counted tokens, most
    frequent first.  Raises ShareDone if ``--shard`` asked for a share, which is done."""
    from pipelines.statistics.pair_counting import most_frequent

    config, corpus, tokenizer = work.config, work.inputs["corpus"], work.inputs["tokenizer"]
    encoder = Encoder(tokenizer)
    size = 1 + max(encoder.tokenizer.get_vocab().values(), default=-1)
    encoded = _encode_all(work, corpus, tokenizer_folder(tokenizer))
    merged = merge_tree(merge_frequencies, encoded, {"size": size}, config)
    frequencies = sum_of_frequencies([merged], np.zeros(size, np.int64))
    ids = most_frequent(frequencies, config.top, exclude=encoder.special_tokens())
    if not len(ids):
        raise InputError(f"{corpus.reference} has no training text that this tokenizer turns into tokens")
    window = None if config.window == "sentence" else int(config.window)
    settings = {"ids": ids.tolist(), "window": window, "presence": config.presence}
    # pieces of about `PIECE` characters are independent of ``--shard``, so that all shares agree
    number = min(len(encoded), max(1, round(corpus.counts.get("characters", 0) / PIECE)))
    bounds = [len(encoded) * piece // number for piece in range(number + 1)]
    pieces = [PartialFiles(tuple(map(str, encoded[start:stop]))) for start, stop in itertools.pairwise(bounds)]
    return map_shards(count, pieces, settings, work.partial / "pairs", config, work.progress), encoder, frequencies, ids


def _encode_all(work: Work[Any], corpus: Artifact, folder_of_tokenizer: str) -> list[Path]:
    """The partial files of the first map.  With ``--shard`` raises ShareDone unless all shards are encoded now."""
    config, shards, folder = work.config, shards_of(corpus, work.config.shard_size), work.partial / "ids"
    settings = {"tokenizer": folder_of_tokenizer, "cross": config.cross_sentences}
    settings["block"] = BLOCK_OF_COLUMN.get(config.column)
    try:
        return map_shards(encode, shards, settings, folder, config, work.progress)
    except ShareDone:
        done = {path.name.split(".")[0]: path for path in folder.glob("*.partial")}
        if missing := sum(shard.name not in done for shard in shards):
            log.info("%d shards are not encoded yet; once they are, run the same shares again to count pairs", missing)
            raise
        return [done[shard.name] for shard in shards]
