"""Stage ``build-cooccur``: how often the frequent tokens of a tokenizer stand together in the training text of a corpus.

Writes ``vocabulary.parquet``, the tokens that are counted, most frequent first; ``counts.parquet``, the pairs that occur,
as an upper triangle with its diagonal, sorted; and the tokenizer's files under ``tokenizer/``.  Counts are of ordered
pairs of distinct positions.  How counts become scores is decided when they are read: see `load_table`.

Two maps: the first encodes text and keeps the ids (reading them back takes a hundredth of the time of encoding again),
the second counts pairs, in far larger pieces, as the counts of a piece take as much room as a few megabytes of text.

Source: Xing et al. 2020, section 3.3; the window is ours: one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from guidance.errors import InputError
from pipelines import executor
from pipelines.artifacts import Artifact
from pipelines.files import DigestWriter, open_parquet
from pipelines.manifest import ArtifactMismatch
from pipelines.progress import Progress, log
from pipelines.sequences import load_tokenizer, plain_tokenizer, special_ids, tokenizer_files
from pipelines.shards import (
    Shard,
    ShareDone,
    evenly,
    map_shards,
    merge_tree,
    parquet_file,
    row_groups,
    run_sharded,
    shards_of,
)
from pipelines.stage import Result, Run, Stage, knob
from pipelines.store import Store
from pipelines.tokens import COLUMNS, open_tokenizer, tokenizer_folder, tokens_of

if TYPE_CHECKING:
    from guidance.features import Cooccurrence

__all__ = ["STAGE", "Config", "Counts", "count_schema", "load_table", "run", "vocabulary_schema"]

VOCABULARY, COUNTS = "vocabulary.parquet", "counts.parquet"
ROWS = 1 << 20
"""Rows of a row group of ``counts.parquet``."""

PIECE = 32_000_000
"""Characters whose pairs are counted at once, about; it decides how many files the second map leaves."""

BAND = 1 << 23
"""Cells of the table that are merged at once, at 8 bytes."""

WIDEST = 10_000


class Config(executor.Config):
    """Which tokens are counted, and what counts as together."""

    top: int = Field(
        5000, ge=1, le=65_000, description="How many tokens, the most frequent; special ones are never among them."
    )
    window: str = Field(
        "sentence", description="What is together: a whole sentence, or this many places to either side in it."
    )
    cross_sentences: bool = Field(
        False, description="Windows go on in the next sentence of the same block (a paragraph, a line)."
    )
    presence: bool = Field(False, description="Count a pair once a sentence, however often its tokens are there.")
    shard_size: int = knob(4_000_000, "Characters of a shard, about.", ge=1)

    @field_validator("window")
    @classmethod
    def _check_window(cls, value: str) -> str:
        if value == "sentence":
            return value
        if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= WIDEST:
            raise ValueError(f"a window is `sentence` or a number from 1 to {WIDEST}")
        return str(int(value))

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        if self.window == "sentence" and self.cross_sentences:
            raise ValueError("--cross-sentences needs a --window of so many places")
        if self.window != "sentence" and self.presence:
            raise ValueError("--presence counts a pair once a sentence: it goes with --window sentence alone")
        return self


def vocabulary_schema() -> Any:
    """Columns of ``vocabulary.parquet``."""
    import pyarrow as pa

    return pa.schema(
        [
            _field("row", pa.int32(), "row and column in the counts, from 0"),
            _field("id", pa.int32(), "piece of the tokenizer's vocabulary"),
            _field("token", pa.string(), "as the tokenizer writes it"),
            _field("count", pa.int64(), "occurrences in the training text"),
        ]
    )


def count_schema() -> Any:
    """Columns of ``counts.parquet``: the pairs that occur, sorted."""
    import pyarrow as pa

    return pa.schema(
        [
            _field("i", pa.int32(), "row in vocabulary.parquet"),
            _field("j", pa.int32(), "row in vocabulary.parquet, not below i"),
            _field(
                "count",
                pa.int64(),
                "pairs of places; two places with the same token count twice, once from each",
            ),
        ]
    )


def _field(name: str, kind: Any, unit: str) -> Any:
    import pyarrow as pa

    return pa.field(name, kind, nullable=False, metadata={"unit": unit})


def run(
    corpus: str,
    tokenizer: str,
    config: Config,
    *,
    store: Store,
    name: str | None = None,
    force: bool = False,
    wait: bool = True,
    progress: Progress | None = None,
) -> Result | None:
    """Count pairs; the tokenizer is a reference, or a Hugging Face folder with a ``tokenizer.json``.

    With ``--shard i/n`` a share is done and None comes back: of encoding, or, once all is encoded, of counting.

    Raises:
        InputError: no such artifact; a damaged tokenizer; no training text.
    """
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(store.load(corpus, kind="corpus", verify=not config.shard))
        inputs: dict[str, Any] = {"corpus": text, "tokenizer": open_tokenizer(tokenizer, store, stack)}

        def share(folder: Path, progress: Progress) -> None:
            _Counting(inputs, config, folder, progress).run()

        options: dict[str, Any] = {"name": name, "force": force, "wait": wait, "progress": progress}
        return run_sharded(STAGE, config, inputs, share, store=store, **options)


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    config: Config = run.config
    corpus: Artifact = run.inputs["corpus"]
    if not corpus.counts.get("splits", {}).get("train"):
        raise InputError(f"{corpus.reference} has no training text to count", hint="build it with a smaller --valid")
    counting = _Counting(run.inputs, config, run.partial, run.progress)
    paths = counting.run()
    with run.progress.task("Merge"):
        merged = merge_tree(merge_pairs, paths, {"rows": len(counting.ids)}, config)
    _write_vocabulary(counting, run)
    pairs = positions = 0
    with run.out.parquet(COUNTS, count_schema()) as file:
        for table in evenly(row_groups(merged), ROWS):
            file.write_table(table)
            i, j, count = _arrays(table)
            pairs += len(i)
            positions += 2 * int(count.sum()) - int(count[i == j].sum())
    run.out.counts |= {
        "vocabulary": len(counting.ids),
        "of": counting.vocabulary_size,
        "tokens": int(counting.frequencies.sum()),
        "counted_tokens": int(counting.frequencies[counting.ids].sum()),
        "pairs": pairs,
        "places": positions,
    }
    for name, data in plain_tokenizer(counting.files).items():
        run.out.write(f"tokenizer/{name}", data)
    if len(counting.ids) < config.top:
        run.out.warnings.append(f"only {len(counting.ids):,} tokens occur, fewer than --top {config.top:,}")
    if not pairs:
        run.out.warnings.append("no two of the tokens ever stand together")
    for warning in run.out.warnings:
        log.warning("%s", warning)


def _write_vocabulary(counting: _Counting, run: Run) -> None:
    import pyarrow as pa

    tokens = [counting.tokenizer.id_to_token(int(id_)) for id_ in counting.ids]
    columns = [range(len(tokens)), counting.ids, tokens, counting.frequencies[counting.ids]]
    with run.out.parquet(VOCABULARY, vocabulary_schema()) as file:
        arrays = [pa.array(column, field.type) for column, field in zip(columns, vocabulary_schema(), strict=True)]
        file.write_table(pa.table(arrays, schema=vocabulary_schema()))


class _Counting:
    """The two maps, and the vocabulary that is known between them.

    Attributes:
        files: the tokenizer's.
        frequencies: how often each id occurs, int64.
        ids: the tokens that are counted, most frequent first.
    """

    def __init__(self, inputs: Mapping[str, Any], config: Config, folder: Path, progress: Progress) -> None:
        self._config, self._folder, self._progress = config, folder, progress
        self._corpus: Artifact = inputs["corpus"]
        self._tokenizer_folder = tokenizer_folder(inputs["tokenizer"])
        self.files = tokenizer_files(inputs["tokenizer"])
        self.tokenizer = load_tokenizer(self.files)
        self._special = special_ids(self.files, self.tokenizer)
        self.vocabulary_size = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        self.frequencies: Any = None
        self.ids: Any = None

    def run(self) -> list[Path]:
        """The partial files of the second map.

        Raises:
            ShareDone: only a share was asked for.
        """
        from pipelines.pair_counting import most_frequent

        encoded = self._encode()
        self.frequencies = self._frequencies(encoded)
        self.ids = most_frequent(self.frequencies, self._config.top, exclude=self._excluded())
        if not len(self.ids):
            raise InputError(f"{self._corpus.reference} has no training text that gives tokens with this tokenizer")
        window = None if self._config.window == "sentence" else int(self._config.window)
        settings = {"ids": self.ids.tolist(), "window": window, "presence": self._config.presence}
        pieces: Any = self._pieces(encoded)  # no shards, but as good: they have a name
        return map_shards(cast("Any", count), pieces, settings, self._folder / "pairs", self._config, self._progress)

    def _encode(self) -> list[Path]:
        """The partial files of the first map; a share of it ends here, unless all others are done."""
        shards = shards_of(self._corpus, self._config.shard_size)
        settings = {"tokenizer": self._tokenizer_folder, "cross": self._config.cross_sentences}
        folder = self._folder / "ids"
        try:
            return map_shards(encode, shards, settings, folder, self._config, self._progress)
        except ShareDone:
            there = {path.name.split(".")[0]: path for path in folder.glob("*.partial")}
            missing = sum(shard.name not in there for shard in shards)
            if missing:
                log.info("%d shards are not encoded yet; after that the same shares count pairs", missing)
                raise
            return [there[shard.name] for shard in shards]

    def _frequencies(self, encoded: Sequence[Path]) -> Any:
        import numpy as np

        merged = merge_tree(merge_frequencies, encoded, {"size": self.vocabulary_size}, self._config)
        return _sum_of_frequencies([merged], np.zeros(self.vocabulary_size, np.int64))

    def _excluded(self) -> set[int]:
        """Ids that are no text."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {id_ for id_ in self._special.values() if id_ is not None} | {id_ for id_, t in added if t.special}

    def _pieces(self, encoded: Sequence[Path]) -> list[Piece]:
        """Neighbouring files in pieces of about `PIECE`; who counts them does not matter, or shares would be lost."""
        number = min(len(encoded), max(1, round(self._corpus.counts.get("characters", 0) / PIECE)))
        bounds = [len(encoded) * piece // number for piece in range(number + 1)]
        return [Piece(tuple(map(str, encoded[start:stop]))) for start, stop in itertools.pairwise(bounds)]


# the first map: text to ids


def encode(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """The training text of a shard as ids: one row a batch, with the ids in their order, the length of each unit that a
    window may not leave, and how often each id is there."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = _encoded_schema()
    with parquet_file(path, schema) as file:
        for blocks in shard.tables(COLUMNS):
            blocks = blocks.filter(pc.equal(blocks["split"].cast("string"), "train"))
            for tokens in tokens_of(settings["tokenizer"], [blocks]):
                units = (tokens.document.astype(np.int64) << 32) + tokens.sentence
                if settings["cross"]:  # its block, whose first sentence is the last one that is not behind it
                    firsts = (blocks["document"].to_numpy() << 32) + blocks["first_sentence"].to_numpy()
                    units = firsts.searchsorted(units, side="right")
                bounds = np.flatnonzero(np.diff(units, prepend=-1, append=-1))
                ids, counts = np.unique(tokens.id, return_counts=True)
                row = [tokens.id, np.diff(bounds), ids, counts]
                arrays = [pa.array([column], field.type) for column, field in zip(row, schema, strict=True)]
                file.write_table(pa.table(arrays, schema=schema))


def _encoded_schema() -> Any:
    import pyarrow as pa

    def column(name: str, kind: Any) -> Any:
        return pa.field(name, pa.list_(pa.field("element", kind, False)), False)

    return pa.schema(
        [
            column("token", pa.int32()),
            column("length", pa.int32()),
            column("id", pa.int32()),
            column("count", pa.int64()),
        ]
    )


def merge_frequencies(paths: Sequence[Path], settings: Mapping[str, Any], path: Path) -> None:
    """Add up how often each id is there."""
    import numpy as np
    import pyarrow as pa

    counts = _sum_of_frequencies(paths, np.zeros(settings["size"], np.int64))
    ids = np.flatnonzero(counts)
    schema = pa.schema([field for field in _encoded_schema() if field.name in ("id", "count")])
    with parquet_file(path, schema) as file:
        arrays = [pa.array([column], field.type) for column, field in zip((ids, counts[ids]), schema, strict=True)]
        file.write_table(pa.table(arrays, schema=schema))


def _sum_of_frequencies(paths: Sequence[Path], counts: Any) -> Any:
    for path in paths:
        for table in row_groups(path, ["id", "count"]):
            ids, found = (table[name].combine_chunks().flatten().to_numpy() for name in ("id", "count"))
            counts[ids] += found  # one row, so each id is there once
    return counts


# the second map: ids to pairs


@dataclass(frozen=True)
class Piece:
    """Some files of the first map whose pairs are counted together."""

    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """The same for the same files: their names hold their digests."""
        names = "\n".join(Path(path).name for path in self.paths)
        return "pairs-" + hashlib.sha256(names.encode()).hexdigest()[:32]


def count(piece: Piece, settings: Mapping[str, Any], path: Path) -> None:
    """The pairs of a piece of text, as a partial file like ``counts.parquet``."""
    import pyarrow as pa

    from pipelines.pair_counting import count_pairs

    ids, how = settings["ids"], {"window": settings["window"], "presence": settings["presence"]}
    with _count_file(path) as file:
        # the rows have no name here, so that they can go once there is something smaller
        for arrays in count_pairs(*_rows_of(piece, ids), len(ids), **how):
            file.write_table(pa.table(list(arrays), schema=count_schema()))


def _rows_of(piece: Piece, ids: Sequence[int]) -> tuple[Any, Any]:
    """The row of each token of a piece, one above the last for those that are not counted; and where units begin."""
    import numpy as np

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
    """Add up partial files, some rows at a time: memory is that of a band of the table and a batch of each file."""
    import numpy as np
    import pyarrow as pa

    size = settings["rows"]
    band = max(1, BAND // size)
    with contextlib.ExitStack() as stack, _count_file(path) as out:
        files = [open_parquet(stack.enter_context(open(path, "rb"))) for path in paths]
        streams = [_Bands(map(_arrays, file.iter_batches(batch_size=1 << 16))) for file in files]
        for first in range(0, size, band):
            counts = np.zeros((min(band, size - first), size), np.int64)
            for stream in streams:
                for i, j, number in stream.below(first + band):
                    counts[i - first, j] += number
            i, j = counts.nonzero()
            columns = [(i + first).astype(np.int32), j.astype(np.int32), counts[i, j]]
            if len(i):
                out.write_table(pa.table(columns, schema=count_schema()))


@contextlib.contextmanager
def _count_file(path: Path) -> Iterator[Any]:
    """A partial file of counts: differences of sorted numbers take half the time and room of dictionaries."""
    import pyarrow.parquet as pq

    differences = dict.fromkeys(count_schema().names, "DELTA_BINARY_PACKED")
    options = {"compression": "zstd", "use_dictionary": False, "column_encoding": differences}
    with DigestWriter(path) as file, pq.ParquetWriter(file, count_schema(), **options) as writer:
        yield writer


class _Bands:
    """Sorted pairs that are taken in order, up to a row."""

    def __init__(self, batches: Iterator[tuple[Any, Any, Any]]) -> None:
        self._batches = batches
        self._held: tuple[Any, Any, Any] | None = next(batches, None)

    def below(self, row: int) -> Iterator[tuple[Any, Any, Any]]:
        while self._held is not None:
            here = int(self._held[0].searchsorted(row))
            yield cast("tuple[Any, Any, Any]", tuple(column[:here] for column in self._held))
            if here < len(self._held[0]):
                self._held = cast("tuple[Any, Any, Any]", tuple(column[here:] for column in self._held))
                return
            self._held = next(self._batches, None)


def _arrays(batch: Any) -> tuple[Any, Any, Any]:
    i, j, number = (batch.column(name).to_numpy() for name in ("i", "j", "count"))
    return i, j, number


# what others read


class Counts:
    """The pairs of an artifact, in parts, as often as one likes: arrays i, j and count."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        with self._artifact.open(COUNTS) as raw:
            yield from map(_arrays, open_parquet(raw).iter_batches(batch_size=1 << 18))


def load_table(
    artifact: Artifact,
    *,
    tokenizer: Artifact | None = None,
    totals: Literal["pairs", "tokens"] = "pairs",
    half: bool = False,
) -> Cooccurrence:
    """The scores of an artifact, for ``install(..., tables={"cooccurrence": load_table(artifact)})``.

    Args:
        tokenizer: an artifact that has the tokenizer with which the table will be used: a tokenizer, sequences, a model.
        totals: what equation 9 divides by: the pairs of a token, or its occurrences in the text.
        half: scores in float16, half as large.

    Raises:
        ArtifactMismatch: the table is not of kind ``cooccur``, or was counted with another tokenizer.
    """
    import numpy as np
    import torch

    from guidance.statistics.cooccurrence import cooccurrence_table

    if artifact.kind != "cooccur":
        raise ArtifactMismatch(f"{artifact.reference} is a {artifact.kind} artifact; needed is a cooccur")
    if tokenizer is not None:
        check_tokenizer(artifact, tokenizer)
    vocabulary = read_vocabulary(artifact)
    return cooccurrence_table(
        vocabulary["id"].to_numpy(),
        int(artifact.counts["of"]),
        Counts(artifact),
        totals=vocabulary["count"].to_numpy().astype(np.int64) if totals == "tokens" else None,
        dtype=torch.float16 if half else torch.float32,
    )


def read_vocabulary(artifact: Artifact) -> Any:
    """The table of the tokens that were counted."""
    with artifact.open(VOCABULARY) as raw:
        return open_parquet(raw).read()


def check_tokenizer(artifact: Artifact, other: Artifact) -> None:
    """Raises ArtifactMismatch when two artifacts do not have the same ``tokenizer.json``."""
    ours, theirs = (_tokenizer_digest(one) for one in (artifact, other))
    if ours != theirs:
        what = "another tokenizer" if theirs else "no tokenizer"
        raise ArtifactMismatch(
            f"{artifact.reference} was counted with one tokenizer, {other.reference} has {what}",
            hint="guide build-cooccur CORPUS TOKENIZER, with the tokenizer of the sequences",
        )


def _tokenizer_digest(artifact: Artifact) -> str | None:
    names = [name for name in ("tokenizer/tokenizer.json", "tokenizer.json") if name in artifact.files]
    return str(artifact.files[names[0]]["sha256"]) if names else None


STAGE = Stage("build-cooccur", "cooccur", 1, Config, build)
