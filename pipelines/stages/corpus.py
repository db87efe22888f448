"""Stage ``build-corpus``: turns text of many formats into a table of blocks with documents, sentences and splits.

Reads plain text, JSON lines, CSV, TSV, Parquet, Arrow, CoNLL-U, standard input, ``builtin:python-docs``.
Writes ``blocks.parquet`` and ``documents.parquet`` (columns: `pipelines.text.corpus_files`).

The text is read in shards, each of which gives a draft (`pipelines.text.drafts`).  What depends on the whole text, such as
numbers, duplicates and splits, is decided when the drafts are joined (`pipelines.text.corpus_writer`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from guidance.errors import InputError, counted
from pipelines.engine import executor
from pipelines.engine.declaration import Command, Opening, Stage, Take
from pipelines.engine.shards import map_shards
from pipelines.engine.stage import Files, Result, Run, Work, knob
from pipelines.progress import log
from pipelines.storage.files import machine_errors, remove_tree
from pipelines.text.blocks import Document, Notes, text_documents
from pipelines.text.conllu import conllu_documents
from pipelines.text.corpus_files import read_blocks
from pipelines.text.line_layout import SAMPLE, beginning, check_not_columns, has_sentence_lines
from pipelines.text.pieces import Bundle, Piece, bundles, can_cut, cut_file, cut_parquet
from pipelines.text.readers import MIXED_LINE_ENDS, check_encoding, decode, format_of, is_gzip, open_lines, open_text
from pipelines.text.records import (
    Fields,
    arrow_rows,
    column_documents,
    json_documents,
    parquet_rows,
    short_list,
    table_documents,
)
from pipelines.text.sentences import check_spec, model_files, splitter
from pipelines.text.sources import STDIN, expand

__all__ = ["STAGE", "Config", "read_blocks", "run"]

_BUILTIN = "builtin"


class Config(executor.Config):
    """How text is read and split."""

    format: Literal["text", "jsonl", "csv", "tsv", "parquet", "arrow", "conllu"] | None = Field(
        None, description="Format of the files; by default decided by their extension."
    )
    encoding: str = Field("utf-8", description="Encoding of text files; invalid bytes are an error.")
    documents: Literal["file", "paragraph", "line"] = Field(
        "file", description="Unit of plain text that is a document: the file, each paragraph or each line."
    )
    text_field: str = Field(
        "text",
        min_length=1,
        description="Field or column with the text, in files of records; a.b is field b inside field a.",
    )
    id_field: str | None = Field(
        None, description="Field or column with the document's id; by default `id` if it exists."
    )
    quoting: bool | None = Field(None, description="Read quotes in tables; by default only in .csv.")
    sentences: str = Field(
        "auto",
        description="Sentence splitter: auto (line for plain text that seems to have one sentence a line, else rules), "
        "rules (punctuation of all scripts), line, spacy-rules (spaCy's sentencizer), spacy:NAME_OR_FOLDER, stanza:LANG "
        "or stanza:FOLDER:LANG:PACKAGE; CoNLL-U files come with sentences.",
    )
    valid: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Fraction of the documents for validation, from 0 to 1; with fewer than 20 documents, blocks of "
        "sentences are held out instead.",
    )
    test: float = Field(0.0, ge=0, lt=1, description="Fraction of the documents for testing, from 0 to 1.")
    shard_size: int = knob(4_000_000, "Approximate number of bytes per shard.", ge=1)
    license: str | None = Field(None, description="Licence of the text, recorded in everything built from it.")
    source: str | None = Field(None, description="Origin of the text, recorded in everything built from it.")

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.valid + self.test >= 1:
            raise ValueError("valid and test must add up to less than 1, to leave text for training")
        return self


class Sources(Take):
    """Text: files, globs, folders, ``-`` or ``builtin:python-docs``."""

    def add(self, role: str, reference: Sequence[str], opening: Opening[Config]) -> None:
        config = opening.config
        # workers on other machines see the store, but not this machine's temporary folder
        is_remote = STDIN in reference and config.executor == "dask"
        spool = opening.stack.enter_context(opening.store.private("corpus", "stdin")) if is_remote else None
        sources = opening.stack.enter_context(
            expand(reference, any_kind=config.format is not None, stdin=opening.stdin, spool=spool)
        )
        if sources.paths:
            opening.inputs["text"] = sources.files(config.source, config.license)
        if sources.builtin:
            from pipelines.text.builtin_docs import python_docs_files

            opening.inputs["builtin"] = python_docs_files()
        if sources.skipped:
            skipped = counted(len(sources.skipped), "file")
            log.info("%s skipped, hidden, of unknown format, or given twice: %s", skipped, short_list(sources.skipped))


def _check(config: Config, references: Mapping[str, Any]) -> None:
    check_encoding(config.encoding)
    check_spec(_spec(config))


def _prepare(opening: Opening[Config]) -> None:
    if (model := model_files(_spec(opening.config))) is not None:
        opening.inputs["parser"] = model


def build(run: Run[Config]) -> None:
    """Build a corpus.

    A document's id is its path in the given folder or its file name for files, and the record's own id, or else a digest,
    for records.  The same sources and settings give the same bytes, whatever the shards and wherever they are read.  Raises
    InputError, which names file, line and byte, if a source is not in its format, or holds no text.
    """
    try:
        _build(run)
    except InputError:  # other text or settings are another recipe, which could not use these drafts
        remove_tree(run.partial)
        raise


def _build(run: Run[Config]) -> None:
    from pipelines.text.corpus_writer import write_corpus
    from pipelines.text.drafts import Draft

    config, notes = run.config, Notes()
    paths = _read(run, notes)
    names = list(dict.fromkeys(name for path in paths for name in Draft.open(path).line_files))
    if names:
        files, them = f"{len(names):,} files, first {names[0]!r}", "them"
        if len(names) == 1:
            files, them = repr(names[0]), "it"
        log.info("one sentence a line: %s; --sentences rules reads %s as prose", files, them)
    run.out.counts |= write_corpus(
        paths,
        run.out,
        notes,
        valid=config.valid,
        test=config.test,
        progress=run.progress,
        sources=short_list(run.inputs["text"].names) if "text" in run.inputs else "",
    )
    run.out.counts["dropped"] = dict(sorted(notes.dropped.items()))
    run.warn(*notes.lines())


def _spec(config: Config) -> str:
    return "rules" if config.sentences == "auto" else config.sentences


# shards


def _read(work: Work[Config], notes: Notes) -> Sequence[Path]:
    """The drafts of all shards, in order."""
    config = work.config
    shards = list(bundles(_pieces(work.inputs, config, notes), config.shard_size))
    settings = {"config": config.recipe(), "builtin": work.inputs.get("builtin")}
    sizes = [shard.size for shard in shards]
    return map_shards(draft, shards, settings, work.partial, config, work.progress, sizes=sizes, unit="B")


def _pieces(inputs: Mapping[str, Any], config: Config, notes: Notes) -> Iterator[Piece]:
    """The pieces of all files."""
    text: Files = inputs.get("text") or Files.of((), ())
    for number, (path, name) in enumerate(zip(text.paths, text.names, strict=True), 1):
        piece = Piece(number, str(path.absolute()), name, format_of(name, config.format), path.stat().st_size)
        yield from _parts(piece, config, notes)
    if "builtin" in inputs:
        size = sum(path.stat().st_size for path in inputs["builtin"].paths)
        yield Piece(len(text.paths) + 1, "", _BUILTIN, _BUILTIN, size)


def _parts(piece: Piece, config: Config, notes: Notes) -> Sequence[Piece]:
    """A large file in parts, if its format allows that; else the file."""
    if piece.size < 2 * config.shard_size:
        return [piece]
    if piece.kind == "parquet":
        return cut_parquet(piece, config.shard_size)
    if piece.kind not in ("text", "jsonl") or is_gzip(piece.name) or not can_cut(config.encoding):
        return [piece]
    if piece.kind == "jsonl" or config.documents == "line":
        parts, is_mixed = cut_file(piece, config.shard_size, "line")
    else:
        if config.sentences == "auto":
            with machine_errors(f"cannot read {piece.path!r}"), open(piece.path, "rb") as file:
                sample = beginning(file.read(4 * SAMPLE), config.encoding)
            piece = dataclasses.replace(piece, has_sentence_lines=has_sentence_lines(sample))
        pages = config.documents == "file" and (config.sentences == "line" or piece.has_sentence_lines)
        parts, is_mixed = cut_file(piece, config.shard_size, "page" if pages else "blank line")
    if is_mixed and len(parts) > 1:
        notes.warn(MIXED_LINE_ENDS, repr(piece.name))
    return parts


def draft(shard: Bundle, settings: Mapping[str, Any], path: Path) -> None:
    """Write the draft of a shard."""
    from pipelines.text.drafts import draft_writer

    config, notes = Config(**settings["config"]), Notes()
    with draft_writer(path, _splitter(_spec(config)), notes) as writer:
        for piece in shard.pieces:
            if piece.kind == _BUILTIN:
                from pipelines.text.builtin_docs import python_docs_documents

                documents = python_docs_documents(settings["builtin"], notes, keep_lines=config.sentences == "line")
            elif piece.kind == "text":
                documents = _text_documents(piece, config, notes, writer.line_files)
            else:
                documents = _record_documents(piece, config, notes)
            is_file = piece.kind == "text" and config.documents == "file"
            continues, is_open = is_file and piece.start > 0, is_file and piece.stop is not None
            for document in documents:
                writer.add(document, continues=continues, is_open=is_open)


_splitter = functools.lru_cache(maxsize=1)(splitter)
"""The splitter, kept for the next shard: models take seconds to load."""


def _text_documents(piece: Piece, config: Config, notes: Notes, line_files: list[str]) -> Iterator[Document]:
    """The documents of a plain text file, or of a part of it.  Adds its name to ``line_files`` if lines are sentences."""
    with open_text(Path(piece.path), piece.name, config.encoding, piece.start, piece.stop) as stream:
        of_piece: Any = {"position": piece.start, "line": piece.line, "is_whole": piece.is_whole}
        chunks = decode(stream, piece.name, config.encoding, notes, **of_piece)
        has_lines = piece.has_sentence_lines
        if piece.start == 0:
            head: list[str] = []
            while sum(map(len, head)) < SAMPLE and (chunk := next(chunks, None)) is not None:
                head.append(chunk)
            chunks = itertools.chain(head, chunks)
            sample = "".join(head)[:SAMPLE]
            if config.format is None:
                check_not_columns(sample, piece.name)
            if has_lines is None and config.sentences == "auto" and config.documents != "line":
                has_lines = has_sentence_lines(sample)
            if has_lines:
                line_files.append(piece.name)
        yield from text_documents(
            chunks,
            source=piece.name,
            layout=config.documents,
            notes=notes,
            keep_lines=config.sentences == "line" or bool(has_lines),
            line=piece.line,
        )


def _record_documents(piece: Piece, config: Config, notes: Notes) -> Iterator[Document]:
    """The documents of a file of records or of a treebank, or of a part of it."""
    path, name = Path(piece.path), piece.name
    fields = Fields(config.text_field, config.id_field, config.sentences == "line")
    if piece.kind in ("parquet", "arrow"):
        groups = None if piece.stop is None else range(piece.start, piece.stop)
        of_parquet = functools.partial(parquet_rows, groups=groups, first=piece.line)
        rows = of_parquet if piece.kind == "parquet" else arrow_rows
        return column_documents(path, name, fields, notes, rows)
    lines = open_lines(path, name, config.encoding, notes, start=piece.start, stop=piece.stop, line=piece.line)
    if piece.kind == "jsonl":
        return json_documents(lines, name, fields, notes)
    if piece.kind == "conllu":
        return conllu_documents(lines, name, notes)
    quoting = config.quoting if config.quoting is not None else piece.kind == "csv"
    delimiter = "," if piece.kind == "csv" else "\t"
    return table_documents(lines, name, fields, notes, delimiter=delimiter, quoting=quoting)


STAGE: Stage[Config, Result | None] = Stage(
    "build-corpus",
    "corpus",
    2,
    Config,
    build,
    takes={"sources": Sources("Files, folders, patterns, - for stdin, or builtin:python-docs.", many=True)},
    check=_check,
    prepare=_prepare,
    share=lambda work: _read(work, Notes()),
    command=Command(
        "build-corpus",
        "Read text into a corpus of documents, sentences and splits.",
        examples=(
            "guide build-corpus text/*.txt --name wiki",
            "zcat news.jsonl.gz | guide build-corpus - --format jsonl",
            "guide build-corpus builtin:python-docs --name docs",
            "guide build-corpus wiki.jsonl --text-field page.text --jobs 8",
            "guide build-corpus text/ --shard 3/64   # one of 64 jobs; afterwards, without --shard, it joins them",
        ),
        next="guide build-tokenizer {}",
    ),
)

run = STAGE.run
