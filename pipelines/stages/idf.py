"""Stage ``build-idf``: counts in how many documents or sentences of the training text each word occurs, and its idf.

Writes ``idf.parquet``, one row per word, sorted by word.  ``counts["documents"]`` is N, the number of units.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from guidance.errors import InputError, counted
from pipelines.engine import executor
from pipelines.engine.declaration import SEQUENCES_FIRST, Command, Stage, Table
from pipelines.engine.shards import Shard, evenly, map_shards, merge_tree, parquet_file, row_groups, shards_of
from pipelines.engine.stage import Result, Run, Work, knob
from pipelines.inputs import Corpus, Tokenizer
from pipelines.lazy import np, pa, pc
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.store import Store
from pipelines.storage.tables import IDF, Columns, schema_of
from pipelines.text.corpus_files import BLOCK_OF_COLUMN, CountedColumn, check_column, training_blocks

ROWS = 1 << 16
"""Rows per row group, in the table and in partial files."""

FEW = 100
"""With fewer documents a warning is given, since idf then has only a handful of different values."""


class Config(executor.Config):
    """What to count, and the formula."""

    unit: Literal["document", "sentence"] = Field(
        "document", description="Unit that counts a word once.  For a few long documents use sentence."
    )
    formula: Literal["smooth", "plain", "textbook", "max"] = Field(
        "smooth", description="Formula: ln((1+N)/(1+df))+1, ln(N/df)+1, ln(N/df), or ln(max df/df)."
    )
    min_df: int = Field(1, ge=1, description="Fewest units of a word that is not left out; N does not change.")
    column: CountedColumn = "both"
    shard_size: int = knob(4_000_000, "Approximate number of characters per shard.", ge=1)


COLUMNS: Columns = {
    "token": ("string", "a word in small letters, or a tokenizer's token"),
    "df": ("int64", "documents (or sentences) that hold it"),
    "idf": ("double", "nats"),
}
"""Columns of ``idf.parquet``."""


def idf_schema() -> Any:
    """The schema of ``idf.parquet``."""
    return schema_of(COLUMNS)


def _count(work: Work[Config]) -> Sequence[Path]:
    """The partial files of the shards."""
    config, shards = work.config, shards_of(work.inputs["corpus"], work.config.shard_size)
    settings: dict[str, Any] = {"unit": config.unit, "block": BLOCK_OF_COLUMN.get(config.column)}
    if "tokenizer" in work.inputs:
        from pipelines.text.encoding import tokenizer_folder

        settings["tokenizer"] = tokenizer_folder(work.inputs["tokenizer"])
    return map_shards(count, shards, settings, work.partial, config, work.progress)


def build(run: Run[Config]) -> None:
    """Count the units in which each word or token of the training text occurs."""
    from guidance.statistics.idf import inverse_document_frequency

    config, paths = run.config, _count(run)
    with run.progress.task("Merge"):
        merged = merge_tree(merge, paths, {}, config)
    units = _units(merged)
    most = max((int(table["df"].to_numpy().max(initial=1)) for table in row_groups(merged)), default=1)
    if not units:
        raise InputError(f"{run.inputs['corpus'].reference} has no training text to count")

    def rows() -> Iterator[Any]:
        for table in row_groups(merged):
            table = table.filter(pa.array(table["df"].to_numpy() >= config.min_df))
            df = table["df"].to_numpy()
            idf = inverse_document_frequency(df, units, formula=config.formula, most=most)
            yield pa.table([table["token"], table["df"], pa.array(idf)], schema=idf_schema())

    tokens = 0
    with run.out.parquet(IDF, idf_schema()) as file:
        for table in evenly(rows(), ROWS):
            file.write_table(table)
            tokens += table.num_rows
    run.out.counts |= {
        "documents": units,
        "tokens": tokens,
        "unit": config.unit,
        "of": "tokens" if "tokenizer" in run.inputs else "words",
    }
    if config.unit == "document" and units < FEW:
        run.warn(f"only {counted(units, 'document')}, so idf has few different values; consider --unit sentence")
    if not tokens:
        run.warn("nothing was counted: the training text has no words, or --min-df is too large")


# counting a shard, and merging


def count(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Count document frequencies of a shard into a partial file, sorted by token, with N in the metadata."""
    from guidance.statistics.idf import document_frequencies

    blocks = _Blocks(shard, settings["unit"], settings["block"])
    folder = settings.get("tokenizer")
    frequencies: Any = document_frequencies(_tokens(folder, blocks) if folder else _words(blocks))
    if folder:
        from pipelines.text.encoding import open_encoder

        name = open_encoder(folder).tokenizer.id_to_token
        frequencies = {name(id_): number for id_, number in frequencies.items()}
    tokens = sorted(frequencies)
    table = pa.table([tokens, [frequencies[token] for token in tokens]], schema=_partial_schema(blocks.units))
    with parquet_file(path, table.schema) as file:
        file.write_table(table, row_group_size=ROWS)


class _Blocks:
    """The training blocks of a shard, as tables; tables of whole documents if documents are the units.

    Args:
        block: take only the block of this number in each document; None takes all.

    Attributes:
        units: number of units so far, including those without words; complete after the iteration.
    """

    def __init__(self, shard: Shard, unit: str, block: int | None) -> None:
        self._shard, self._block, self.unit, self.units = shard, block, unit, 0

    def __iter__(self) -> Iterator[Any]:
        columns = ("document", "block", "split", "start", "first_sentence", "text", "sentences")
        last = -1
        for blocks in self._shard.documents(columns) if self.unit == "document" else self._shard.tables(columns):
            table = training_blocks(blocks, self._block)
            if not table.num_rows:
                continue
            if self.unit == "document":
                documents = table["document"].to_numpy()
                self.units += int(documents[0] != last) + int((documents[1:] != documents[:-1]).sum())
                last = int(documents[-1])
            else:
                self.units += pc.sum(pc.list_value_length(table["sentences"])).as_py()
            yield table


def _words(blocks: _Blocks) -> Iterator[tuple[object, list[str]]]:
    """(Number of the unit, its words); a unit may come in several parts."""
    from guidance.statistics.idf import counted_words

    number = 0
    for table in blocks:
        texts = table["text"].to_pylist()
        if blocks.unit == "document":
            yield from zip(table["document"].to_pylist(), map(counted_words, texts), strict=True)
            continue
        spans = table["sentences"].combine_chunks()
        starts, ends = (spans.flatten().field(name).to_pylist() for name in ("start", "end"))
        sentences = zip(starts, ends, strict=True)
        for text, length in zip(texts, spans.value_lengths().to_pylist(), strict=True):
            for start, end in itertools.islice(sentences, length):
                number += 1
                yield number, counted_words(text[start:end])


def _tokens(folder: str, blocks: _Blocks) -> Iterator[tuple[object, list[int]]]:
    """(Key of the unit, its token ids); a unit may come in several parts."""
    from pipelines.text.encoding import tokens_of

    for tokens in tokens_of(folder, blocks):
        unit = np.stack([tokens.document, tokens.sentence if blocks.unit == "sentence" else 0 * tokens.document])
        bounds = [0, *((unit[:, 1:] != unit[:, :-1]).any(0).nonzero()[0] + 1).tolist(), len(tokens.id)]
        ids = tokens.id.tolist()
        for start, end in itertools.pairwise(bounds):
            if start < end:
                yield tuple(unit[:, start].tolist()), ids[start:end]


def merge(paths: Sequence[Path], settings: Mapping[str, Any], path: Path) -> None:
    """Merge sorted partial files; memory is bounded by a few row groups."""
    schema = _partial_schema(sum(map(_units, paths)))
    with parquet_file(path, schema) as file:
        for table in evenly(_summed(list(map(row_groups, paths))), ROWS):
            file.write_table(table.cast(schema))


def _summed(streams: Sequence[Iterator[Any]]) -> Iterator[Any]:
    """Merge several streams of tables sorted by token; each token comes once, with the sum of its counts."""
    heads = [(table, stream) for stream in streams for table in itertools.islice(stream, 1)]
    while True:
        heads = [
            (table, stream)
            for head, stream in heads
            for table in ([head] if head.num_rows else [*itertools.islice(stream, 1)])
        ]
        if not heads:
            return
        # only tokens up to here are complete: later tables of a stream have larger ones
        bound = min(table["token"][-1].as_py() for table, _ in heads)
        counts = [pc.sum(pc.less_equal(table["token"], bound)).as_py() for table, _ in heads]
        ready = pa.concat_tables(table.slice(0, count) for (table, _), count in zip(heads, counts, strict=True))
        heads = [(table.slice(count), stream) for (table, stream), count in zip(heads, counts, strict=True)]
        summed = ready.group_by("token").aggregate([("df", "sum")]).sort_by("token")
        yield pa.table([summed["token"], summed["df_sum"]], names=["token", "df"])


def _units(path: Path) -> int:
    with open(path, "rb") as raw:
        return int(open_parquet(raw).schema_arrow.metadata[b"units"])


def _partial_schema(units: int) -> Any:
    fields = [pa.field("token", pa.string(), False), pa.field("df", pa.int64(), False)]
    return pa.schema(fields, metadata={"units": str(units)})


def _next(made: Artifact, store: Store) -> tuple[str, ...]:
    if "tokenizer" in made.manifest["inputs"]:
        return ("guide show {}",)
    masks = "guide build-masks {sequences} --idf {}"
    return (f"{masks} --deps {{deps}}", masks, *SEQUENCES_FIRST)


def _counted(made: Artifact, config: Config) -> Table:
    """How many units there are, and how many different words or tokens in them."""
    counts = made.counts
    units = counted(counts["documents"], counts["unit"])
    return Table(notes=[f"{units}, {counted(counts['tokens'], 'different ' + counts['of'][:-1])}"])


STAGE: Stage[Config, Result | None] = Stage(
    "build-idf",
    "idf",
    1,
    Config,
    build,
    takes={
        "corpus": Corpus(),
        "tokenizer": Tokenizer("A tokenizer whose tokens are counted instead of words.", optional=True),
    },
    prepare=check_column,
    share=_count,
    writes={IDF: COLUMNS},
    command=Command(
        "build-idf",
        "Compute the idf of each word or token in the training text of a corpus.",
        examples=(
            "guide build-idf wiki --name wiki-idf",
            "guide build-idf wiki bpe --unit sentence",
            "guide build-idf wiki --jobs 8",
            "guide build-idf wiki --executor dask --scheduler tcp://10.0.0.1:8786",
            "guide build-idf wiki --shard 3/64   # one of 64 jobs; afterwards, without --shard, it merges",
        ),
        next=_next,
        show=_counted,
    ),
)

run = STAGE.run
