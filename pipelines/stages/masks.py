"""Stage ``build-masks``: writes role columns: for every token of some sequences, what is known about its word.

Reads sequences, their corpus and, if given, ``idf`` and ``deps`` of the same corpus.  Writes one file per split, with the
rows of the sequences in the same order and list columns as long as their ``id`` (`mask_schema`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError, counted
from pipelines.engine import executor
from pipelines.engine.declaration import Command, Opening, Stage, Stored, Table, names
from pipelines.engine.shards import Shard, ShareDone, map_shards, parquet_file, regrouped, shards_of
from pipelines.engine.stage import Result, Run, Work, internal
from pipelines.inputs import Sequences
from pipelines.lazy import np, pa
from pipelines.statistics.codes import CODES_KEY
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import ArtifactMismatch, digest
from pipelines.storage.store import Store
from pipelines.storage.tables import schema_of
from pipelines.text.corpus_files import SPLITS
from pipelines.text.parsers import stop_words

GROUP_TOKENS = 1 << 18
"""Tokens per row group of the result: a group ends with the first sequence that reaches this number."""

_TREE = ("head", "relation", "pos", "negation")
_HAS_VALUE: Mapping[str, Callable[[Any], Any]] = {
    "idf": lambda idf: idf > 0,
    **dict.fromkeys(("head", "relation", "pos"), lambda number: number >= 0),
}
"""For columns that may lack values: which values say something about their token."""

_SOURCES = {
    "idf": ("idf", "no --idf was given: guide build-idf"),
    **dict.fromkeys(_TREE, ("deps", "no --deps was given: guide build-deps")),
    "stop_word": ("stop_words", "no --deps was given, or spaCy has no stop words for the parser's language"),
}
"""Columns that need more than text: the setting that provides them, and why they are missing without it."""


class Config(executor.Config):
    """The tables to join with the sequences."""

    idf: str = names(
        Stored("idf", "Rarity of words: an artifact of `guide build-idf` for the same corpus; rare words need it.")
    )
    deps: str = names(
        Stored("deps", "Trees: an artifact of `guide build-deps` for the same corpus; syntactic roles need it.")
    )
    stop_words: str = internal("Digest of the language's stop words.")


def _prepare(opening: Opening[Config], *, is_own_idf: bool = True) -> None:
    """Add the corpus of the sequences, and check that the tables were made from it.  The idf is checked only if ``is_own_idf``:
    a model reads the idf of the corpus that it learned from."""
    inputs, data = opening.inputs, opening.inputs["sequences"]
    tables: dict[str, Any] = {role: inputs.pop(role) for role in ("idf", "deps") if role in inputs}
    inputs["corpus"] = opening.load_input(data, "corpus")
    inputs |= tables
    for role, table in tables.items():
        if role == "deps" or is_own_idf:
            _check_corpus(table, inputs["corpus"], data)
    if "idf" in inputs and "tokenizer" in inputs["idf"].manifest.get("inputs", {}):
        raise ArtifactMismatch(
            f"{inputs['idf'].reference} counts tokens, but masks need the idf of words",
            hint="guide build-idf CORPUS, without a tokenizer",
        )
    column = inputs["deps"].manifest["config"].get("column", "both") if "deps" in inputs else "both"
    if column != "both" and data.manifest["config"]["packing"] != "pairs":
        raise ArtifactMismatch(
            f"{inputs['deps'].reference} has no trees of the second texts, which the sequences {data.reference} hold",
            hint=f"guide build-deps {inputs['corpus'].reference} without --column {column}",
        )
    if (words := _stop_words(inputs)) is not None:
        opening.change(stop_words=digest(words))


def _check_corpus(table: Artifact, corpus: Artifact, data: Artifact) -> None:
    known = table.manifest.get("inputs", {}).get("corpus", {})
    if known.get("content") != corpus.content:
        raise ArtifactMismatch(
            f"{table.reference} is of the corpus {known.get('kind')}/{str(known.get('recipe'))[:16]} "
            f"({str(known.get('content'))[:12]}), the sequences {data.reference} are of {corpus.reference} "
            f"({corpus.content[:12]})",
            hint=f"guide build-{table.kind} {corpus.reference}",
        )


def _stop_words(inputs: Mapping[str, Artifact]) -> list[str] | None:
    """spaCy's stop words for the parser's language; None if there are no trees, or no words for their language."""
    return stop_words(str(inputs["deps"].counts.get("language") or "xx")) if "deps" in inputs else None


def mask_schema(columns: Sequence[str]) -> Any:
    """Schema of a file of masks: list columns with one entry per token of a sequence.

    For columns of codes, the field's metadata has ``codes``: a JSON list of what the numbers stand for.
    """
    from guidance.patterns.features import CODES, FEATURES
    from guidance.statistics.roles import COLUMNS

    known = {name: (f"[{np.dtype(kind).name}]", FEATURES[name].summary) for name, kind in COLUMNS.items()}
    codes = {name: {CODES_KEY: json.dumps(own)} for name, own in CODES.items()}
    schema = schema_of({name: about for name, about in known.items() if name in columns})
    return pa.schema([field.with_metadata({**field.metadata, **codes.get(field.name, {})}) for field in schema])


# building


def _partials(work: Work[Config]) -> dict[str, list[Path]]:
    """The partial files of every split.  Raises ShareDone if ``--shard`` asked for a share, which is done."""
    inputs, config, is_share = work.inputs, work.config, False
    data, partials = inputs["sequences"], dict[str, list[Path]]()
    settings: dict[str, Any] = {"stop_words": _stop_words(inputs)}
    settings |= {role: str(inputs[role].path.absolute()) for role in ("corpus", "idf", "deps") if role in inputs}
    for split in SPLITS:
        name = f"{split}.parquet"
        if data.files.get(name, {}).get("rows"):
            # four characters for a token
            shards = shards_of(data, config.shard_size, name, lambda group: 4 * group.column(0).num_values)
            try:
                partials[split] = map_shards(_work, shards, settings, work.partial / split, config, work.progress)
            except ShareDone:
                is_share = True
    if is_share:
        raise ShareDone
    return partials


def _work(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Write the partial file of a shard: the columns, with counts in the metadata of the schema."""
    from pipelines.statistics.role_tables import RoleTables, pieces_of

    tables = RoleTables(**settings)
    rows = shard.read(["document", "sentence", "start", "end"]).combine_chunks()
    pieces = pieces_of(rows)
    roles = tables.roles(pieces)
    schema = mask_schema(list(roles.columns))
    counts = {"sequences": rows.num_rows, "tokens": len(pieces.document), **roles.counts}
    counts |= {
        f"with_{name}": int(has_value(roles.columns[name]).sum())
        for name, has_value in _HAS_VALUE.items()
        if name in roles.columns
    }
    offsets = pa.array(pieces.bounds, pa.int32())
    arrays = [pa.ListArray.from_arrays(offsets, pa.array(roles.columns[f.name]), type=f.type) for f in schema]
    with parquet_file(path, schema.with_metadata({"counts": json.dumps(counts)})) as writer:
        writer.write_table(pa.table(arrays, schema=schema))


def build(run: Run[Config]) -> None:
    """Join sequences with what is known about their words."""
    partials = _partials(run)
    if not partials:
        raise InputError(f"{run.inputs['sequences'].reference} has no sequences")
    totals, names = dict[str, Counter[str]](), list[str]()
    for split, paths in partials.items():
        totals[split] = Counter()
        with open(paths[0], "rb") as raw:
            schema = mask_schema(open_parquet(raw).schema_arrow.names)
        with run.out.parquet(f"{split}.parquet", schema) as writer:
            for table in regrouped(_rows_of(paths, totals[split]), [GROUP_TOKENS]):
                writer.write_table(table.cast(schema))
        names = schema.names
    missing = {name: why for name, (_, why) in _SOURCES.items() if name not in names}
    run.out.counts |= {
        "columns": names,
        "missing": missing,
        "splits": {split: dict(own) for split, own in totals.items()},
    }
    _warn(run, totals)


def _rows_of(paths: Sequence[Path], counts: Counter[str]) -> Iterator[tuple[Any, list[Any]]]:
    """The rows of partial files as tables, with the number of tokens of each row; adds to the counts."""
    for path in paths:
        with open(path, "rb") as raw:
            file = open_parquet(raw)
            counts.update(json.loads(file.schema_arrow.metadata[b"counts"]))
            for batch in file.iter_batches(batch_size=1024):
                yield pa.Table.from_batches([batch]), [batch.column(0).value_lengths().to_numpy()]


def _warn(run: Run[Config], totals: Mapping[str, Mapping[str, int]]) -> None:
    """Warn of data that were given but say nothing; it is no mistake to leave a table out."""
    for split, counts in totals.items():
        if counts.get("cut_arcs"):
            verbs = "leads out of a sequence and was", "lead out of a sequence and were"
            cut = counted(counts["cut_arcs"], *verbs, of=f"{counts['arcs']:,} arcs")
            run.warn(f"{split}: {cut} dropped")
        if empty := [name for name in _HAS_VALUE if counts.get(f"with_{name}") == 0]:
            run.warn(f"{split}: no token has {_listed(empty)}")
        if counts.get("silent_words"):
            run.warn(f"{split}: the tokenizer dropped {counted(counts['silent_words'], 'word')} entirely")


def _listed(names: Sequence[str]) -> str:
    """Columns for a message, such as "a head, relation or pos value"."""
    article = "an" if names[0][0] in "aeiou" else "a"
    listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{article} {listed} value"


def _next(made: Artifact, store: Store) -> tuple[str, ...]:
    """A training with the roles that the columns can tell."""
    columns = made.counts["columns"]
    preset = "roles" if {"idf", "head"} <= {*columns} else "roles-unparsed" if "idf" in columns else ""
    train = f"guide pretrain {{sequences}} --masks {{}} --plan preset:{preset}"
    if preset == "roles":
        train += " --size small"  # the default size has four heads, and the preset guides five
    with store.load_input(made, "sequences", verify=False) as sequences:
        if sequences.manifest["config"]["packing"] == "pairs":
            train += " --objective translation"
        elif preset == "roles-unparsed":  # of the default size, as the plain model of `build-sequences`
            train += " --learning-rate 1e-3"
    return (*((train,) if preset else ()), "guide masks show {}")


STAGE: Stage[Config, Result | None] = Stage(
    "build-masks",
    "masks",
    3,
    Config,
    build,
    takes={"sequences": Sequences()},
    prepare=_prepare,
    share=_partials,
    command=Command(
        "build-masks",
        """Record for every token of some sequences what is known about its word: its number, idf, head and relation.

        Words and tokens are aligned by their characters.  Without --deps the syntactic roles are missing.
        """,
        examples=(
            "guide build-masks wiki-128 --idf wiki-idf --deps wiki-deps",
            "guide build-masks wiki-128 --idf wiki-idf   # a language without a parser",
            "guide build-masks wiki-128 --idf wiki-idf --deps wiki-deps --jobs 8",
            "guide build-masks wiki-128 --deps wiki-deps --shard 3/64   # one of 64 jobs; without --shard it merges",
        ),
        next=_next,
        show=lambda made, _: Table(notes=[f"columns: {', '.join(made.counts['columns'])}"]),
    ),
)

FOR_A_MODEL = dataclasses.replace(STAGE, prepare=functools.partial(_prepare, is_own_idf=False))
"""The same stage for a trained model, with the idf of the corpus from which it learned."""

run = STAGE.run
