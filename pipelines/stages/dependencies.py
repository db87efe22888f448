"""Stage ``build-deps``: parses each sentence of a corpus into words with heads and relations.

Reads a corpus and a parser: a spaCy model, Stanza models, or existing trees in CoNLL-U files.  Writes ``deps.parquet``, one
row per sentence of every split, in the order of the text.  A sentence without a tree has a row too, with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from guidance.errors import InputError, counted
from guidance.statistics.dependencies import Tree
from pipelines.engine import executor
from pipelines.engine.declaration import SEQUENCES_FIRST, Command, Opening, Stage
from pipelines.engine.shards import Shard, evenly, map_shards, open_checked, parquet_file, row_groups, shards_of
from pipelines.engine.stage import Files, Result, Run, Work, knob
from pipelines.inputs import Corpus
from pipelines.lazy import np, pa, pc
from pipelines.storage.files import open_parquet
from pipelines.storage.tables import DOCUMENTS, TREES, Columns, schema_of
from pipelines.text.conllu import Treebank
from pipelines.text.corpus_files import BLOCK_OF_COLUMN, check_column
from pipelines.text.parsers import MODELS, MOST_WORDS, NAMES, kind_meant
from pipelines.text.sources import expand

WINDOW = 1 << 16
"""Minimum number of characters that a parser gets at once.  Batching may change the last bits of its sums, so windows depend
only on the corpus, not on shards; a shard takes the windows that begin in it."""

_GROUP = 20_000
_COLUMNS = ("document", "start", "first_sentence", "text", "sentences")
"""Columns of a block of text from which its sentences are made."""


class Config(executor.Config):
    """The parser and its limits."""

    later = frozenset({"column"})

    parser: str = Field(
        description="spacy:NAME_OR_FOLDER, stanza:LANG, stanza:FOLDER:LANG:PACKAGE, or conllu:FILES with existing trees "
        "(a file, a folder or a pattern)."
    )
    shard_size: int = knob(250_000, "Approximate number of characters per shard.", ge=1)
    max_words: int = Field(MOST_WORDS, ge=1, le=100_000, description="Longest sentence to parse, in words.")
    column: Literal["both", "text"] = Field(
        "both",
        description="Text to parse, for examples with two texts; masks of translation data need the source, text.",
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "Device for the parser; auto uses a GPU if there is one.")

    @field_validator("parser")
    @classmethod
    def _check_parser(cls, value: str) -> str:
        kind, _, rest = value.partition(":")
        if kind not in (*MODELS, "conllu") or not rest:
            raise ValueError(f"expected {NAMES}, or conllu:FILES{kind_meant(value)}")
        return value

    def recipe(self) -> dict[str, Any]:
        """The settings that affect the result.  The path of a model is left out, since the digest of its files is an input."""
        kind, _, rest = self.parser.partition(":")
        inside = rest.split(":")[1:] if kind == "stanza" else []
        return super().recipe() | {"parser": ":".join([kind, *inside])}


_PLACE = "code points in the document, its blocks joined by one newline"

COLUMNS: Columns = {
    "document": ("int64", "row in the corpus's documents.parquet"),
    "sentence": ("int32", "running number in the document"),
    "start": ("[int64]", _PLACE),
    "end": ("[int64]", f"{_PLACE}, exclusive"),
    "form": ("[string]", "word; of a multi-word token, the word that it stands for"),
    "lemma": ("[string]", "dictionary form, empty for none"),
    "upos": ("[string]", "universal part of speech, empty for none"),
    "head": ("[int32]", "place of the head in the lists of this row; a root's is its own"),
    "relation": ("[string]", "label of the arc to the head, in the scheme of the table"),
    "status": ("string", "ok, or why there are no words"),
}
"""Columns of ``deps.parquet``; all lists of a row have one entry per word."""


def dependency_schema() -> Any:
    """The schema of ``deps.parquet``."""
    return schema_of(COLUMNS)


def _prepare(opening: Opening[Config]) -> None:
    check_column(opening)
    kind, _, rest = opening.config.parser.partition(":")
    if kind == "conllu":
        trees = opening.stack.enter_context(expand([rest], any_kind=True, stdin=None))
        opening.inputs["parser"] = Files.of(trees.paths, trees.names)
    else:
        opening.inputs["parser"] = MODELS[kind][1](rest)


def build(run: Run[Config]) -> None:
    """Parse every sentence of a corpus.  Raises InputError if the parser cannot be opened or does not parse, or no sentence has
    a tree, and MachineError if the parser, its model or a GPU is missing."""
    paths = _map(run)
    summary = _Summary()
    metadata: dict[bytes, bytes] = {}
    if paths:
        with open(paths[0], "rb") as raw:
            metadata = open_parquet(raw).schema_arrow.metadata or {}
    facts = {name: metadata.get(name.encode(), b"").decode() for name in ("scheme", "language", "warnings")}
    warnings = facts.pop("warnings").splitlines()
    schema = dependency_schema().with_metadata(facts)
    with run.out.parquet(TREES, schema) as writer:
        for table in evenly(itertools.chain.from_iterable(map(row_groups, paths)), _GROUP):
            summary.add(table)
            writer.write_table(table.cast(schema))
    run.out.counts |= summary.counts() | facts
    run.warn(*warnings, *summary.warnings(facts["scheme"]))


def _map(work: Work[Config]) -> list[Path]:
    """The partial files of the shards."""
    config = work.config
    kind, _, rest = config.parser.partition(":")
    parser: Files = work.inputs["parser"]
    settings = {"parser": config.parser, "max_words": config.max_words, "device": config.device}
    if kind == "conllu":
        settings |= {"paths": [os.path.abspath(path) for path in parser.paths], "names": list(parser.names)}
    elif os.path.isdir(folder := rest.split(":")[0]):
        settings["parser"] = f"{kind}:{os.path.abspath(folder)}{rest[len(folder) :]}"
    if config.column != "both":
        settings["block"] = BLOCK_OF_COLUMN[config.column]
    shards = shards_of(work.inputs["corpus"], config.shard_size)
    return map_shards(parse_shard, shards, settings, work.partial, config, work.progress)


# parsing a shard


_PARSER_LOCK = threading.Lock()
"""Parsers are not thread-safe, and a cluster's workers may have several threads."""


def parse_shard(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """Parse the sentences of the windows that begin in a shard."""
    about_parser = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items() if key != "block"}
    with _PARSER_LOCK:
        reader, facts = _opened(**about_parser)
        schema = dependency_schema().with_metadata(facts)
        with parquet_file(path, schema) as writer:
            for window in _windows(shard):
                sentences = list(_sentences(window, settings.get("block")))
                trees = reader(shard, sentences)
                writer.write_table(_table(sentences, trees, schema))


Sentence = tuple[int, int, int, str]
"""Row of the document, number of the sentence in it, code points before the sentence in it, text."""

_Reader = Callable[[Shard, Sequence[Sentence]], list[Tree]]


@functools.lru_cache(maxsize=1)
def _opened(
    parser: str, max_words: int, device: str, paths: tuple[str, ...] = (), names: tuple[str, ...] = ()
) -> tuple[_Reader, dict[str, str]]:
    """A parser with its label scheme, its language ("" for unknown) and warnings about its files; a process opens it once for all
    its shards."""
    kind, _, rest = parser.partition(":")
    if kind == "conllu":
        treebank = Treebank([Path(path) for path in paths], names, max_words)
        facts = {"scheme": treebank.scheme, "language": "", "warnings": "\n".join(treebank.warnings)}

        def look_up(shard: Shard, sentences: Sequence[Sentence]) -> list[Tree]:
            ids = _document_ids(shard, {document for document, *_ in sentences})
            return [treebank.find(ids[document], number, text) for document, number, _, text in sentences]

        return look_up, facts
    model: Any = MODELS[kind][0](rest, device, max_words)
    return (
        lambda _, sentences: model([text for *_, text in sentences]),
        {"scheme": model.scheme, "language": model.language},
    )


def _document_ids(shard: Shard, wanted: set[int]) -> dict[int, str]:
    """The ids of some documents of the corpus, by row."""
    ids, first = dict[int, str](), 0
    with open_checked(Path(shard.path).with_name(DOCUMENTS)) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if in_group := [row for row in wanted if first <= row < first + rows]:
                column = file.read_row_group(group, columns=["id"]).column("id")
                ids |= {row: column[row - first].as_py() for row in in_group}
            first += rows
    return ids


def _windows(shard: Shard) -> Iterator[Any]:
    """The windows of a shard: tables of blocks of at least `WINDOW` characters.

    Windows are cut from the start of each row group of the corpus, so they do not depend on the shards.  A window belongs
    to the shard in which it begins, even if it ends in the next one.
    """
    for group, start, stop in shard.pieces:
        whole = dataclasses.replace(shard, pieces=((group, 0, 1 << 62),)).read(("block", *_COLUMNS))
        first, size = 0, 0
        for row, length in enumerate(pc.utf8_length(whole.column("text")).to_pylist(), start=1):
            size += length
            if size >= WINDOW or row == whole.num_rows:
                if start <= first < stop:
                    yield whole.slice(first, row - first)
                first, size = row, 0


def _sentences(window: Any, block: int | None) -> Iterator[Sentence]:
    """The sentences of a window; of blocks with this number alone, unless it is None."""
    if block is not None:
        window = window.filter(pc.equal(window["block"], block))
    for document, start, number, text, spans in zip(*(window.column(n).to_pylist() for n in _COLUMNS), strict=True):
        for offset, span in enumerate(spans):
            yield document, number + offset, start + span["start"], text[span["start"] : span["end"]]


def _table(sentences: Sequence[Sentence], trees: Sequence[Tree], schema: Any) -> Any:
    starts = np.array([row[2] for row in sentences], "int64")
    lengths = np.array([len(tree) for tree in trees], "int64")
    columns = {
        "document": [row[0] for row in sentences],
        "sentence": [row[1] for row in sentences],
        "status": [tree.status for tree in trees],
    }
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(pa.array(columns[field.name], field.type))
            continue
        values = list(itertools.chain.from_iterable(getattr(tree, field.name) for tree in trees))
        if field.name in ("start", "end"):  # from offsets in the sentence to offsets in the document
            values = np.array(values, "int64") + np.repeat(starts, lengths)
        offsets = np.append(0, lengths.cumsum()).astype("int32")
        arrays.append(pa.ListArray.from_arrays(offsets, pa.array(values, field.type.value_type), type=field.type))
    return pa.table(arrays, schema=schema)


# the artifact


class _Summary:
    """Counts sentences by status, words and relations of the table."""

    def __init__(self) -> None:
        self._status, self._relations = Counter[str](), Counter[str]()
        self._first: dict[str, str] = {}

    def add(self, table: Any) -> None:
        for number, status in enumerate(table["status"].to_pylist()):
            reason, colon, detail = status.partition(":")
            self._status[reason] += 1
            if reason not in self._first:
                document, sentence = (table[name][number].as_py() for name in ("document", "sentence"))
                self._first[reason] = f"document {document}, sentence {sentence}{colon}{detail}"
        for entry in pc.value_counts(pc.list_flatten(table["relation"])).to_pylist():
            self._relations[entry["values"]] += entry["counts"]

    def counts(self) -> dict[str, Any]:
        """``parsed`` are the sentences that have words.  Raises InputError if there are sentences but none has a tree."""
        without = {reason: count for reason, count in sorted(self._status.items()) if reason != "ok"}
        if not self._status["ok"] and without:
            reason = max(without, key=without.__getitem__)
            raise InputError(
                f"no sentence of {sum(without.values()):,} has a tree: {reason} ({self._first[reason]})",
                hint={
                    "not found": "give the trees of this corpus, or build the corpus from them: guide build-corpus x.conllu",
                    "too long": "raise --max-words, or build the corpus with other --sentences",
                }.get(reason),
            )
        return {
            "sentences": self._status.total(),
            "parsed": self._status["ok"],
            "words": self._relations.total(),
            "without": without,
        }

    def warnings(self, scheme: str) -> Iterator[str]:
        from guidance.patterns.features import relation_id

        for reason, count in sorted(self._status.items()):
            if reason != "ok":
                yield f"{counted(count, 'sentence has', 'sentences have')} no tree: {reason}, first {self._first[reason]}"
        unknown = {label: count for label, count in self._relations.items() if relation_id(label) < 0}
        if unknown:
            most = ", ".join(repr(label) for label in sorted(unknown, key=lambda label: (-unknown[label], label))[:5])
            number, words = sum(unknown.values()), self._relations.total()
            have = counted(number, "has", "have", of=f"{words:,} words")
            yield f"{have} a relation that patterns do not know: {most}"
        if scheme == "other":
            yield "the parser's labels are not those of Universal Dependencies or of spaCy's English models"


STAGE: Stage[Config, Result | None] = Stage(
    "build-deps",
    "deps",
    2,
    Config,
    build,
    takes={"corpus": Corpus()},
    prepare=_prepare,
    share=_map,
    writes={TREES: COLUMNS},
    command=Command(
        "build-deps",
        "Parse the sentences of a corpus into words, heads and relations.",
        examples=(
            "guide build-deps wiki --parser spacy:en_core_web_sm --name wiki-deps",
            "guide build-deps wiki --parser stanza:tl --device cuda",
            "guide build-deps ewt --parser 'conllu:ewt/*.conllu.gz'",
            "guide build-deps wiki --parser spacy:en_core_web_sm --jobs 8",
        ),
        next=(
            "guide build-masks {sequences} --idf {idf} --deps {}",
            "guide build-masks {sequences} --deps {}",
            *SEQUENCES_FIRST,
        ),
    ),
)

run = STAGE.run
