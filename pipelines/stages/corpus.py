"""Stage ``build-corpus``: turns text of many formats into a table of blocks with documents, sentences and splits.

Reads plain text, JSON lines, CSV, TSV, Parquet, CoNLL-U, standard input, ``builtin:python-docs``.
Writes ``blocks.parquet`` and ``documents.parquet`` (columns: `pipelines.text.corpus_files`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, Unpack

from pydantic import Field, model_validator

from pipelines.engine import stage
from pipelines.engine.stage import Files, Options, Result, Run, Stage, run_stage
from pipelines.progress import log
from pipelines.storage.store import Store
from pipelines.text.blocks import Document, Notes, text_documents
from pipelines.text.conllu import conllu_documents
from pipelines.text.corpus_files import read_blocks
from pipelines.text.corpus_writer import CorpusWriter
from pipelines.text.readers import check_encoding, decode, format_of, open_lines, open_text
from pipelines.text.records import Fields, json_documents, parquet_documents, table_documents
from pipelines.text.sentences import check_spec, model_files, splitter
from pipelines.text.sources import expand

__all__ = ["STAGE", "Config", "read_blocks", "run"]


class Config(stage.Config):
    """How text is read and split."""

    format: Literal["text", "jsonl", "csv", "tsv", "parquet", "conllu"] | None = Field(
        None, description="format of the files; by default decided by their extension"
    )
    encoding: str = Field("utf-8", description="encoding of text files; invalid bytes are an error")
    documents: Literal["file", "paragraph", "line"] = Field(
        "file", description="what counts as a document in plain text: the file, each paragraph or each line"
    )
    text_field: str = Field("text", min_length=1, description="field or column with the text, in files of records")
    id_field: str | None = Field(
        None, description="field or column with the document's id; by default `id` if it exists"
    )
    quoting: bool | None = Field(None, description="whether tables use quotes; by default only .csv does")
    sentences: str = Field(
        "rules",
        description="sentence splitter: rules (punctuation of all scripts), line, spacy-rules, spacy:NAME_OR_FOLDER, "
        "stanza:LANG or stanza:FOLDER:LANG:PACKAGE; CoNLL-U files come with sentences",
    )
    valid: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="fraction of the documents for validation, from 0 to 1; with fewer than 20 documents, fraction of "
        "groups of 200 sentences",
    )
    test: float = Field(0.0, ge=0, lt=1, description="fraction of the documents for testing, from 0 to 1")
    license: str | None = Field(None, description="licence of the text, recorded in everything built from it")
    source: str | None = Field(None, description="where the text comes from, recorded in everything built from it")

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.valid + self.test >= 1:
            raise ValueError("valid and test must add up to less than 1, to leave text for training")
        return self


def run(
    sources: Sequence[str], config: Config, *, store: Store, stdin: BinaryIO | None = None, **options: Unpack[Options]
) -> Result:
    """Build a corpus from files, globs, folders, ``-`` (``stdin``) or ``builtin:python-docs``.

    A document's id is its path in the given folder or its file name for files, and the record's own id, or else a digest,
    for records.  The same sources and settings give the same bytes.

    Raises:
        InputError: a source is not in its format, or holds no text; the message names file, line and byte.
        MachineError: the model for sentences is not installed, or the disk is full.
    """
    check_encoding(config.encoding)
    check_spec(config.sentences)
    with expand(sources, any_kind=config.format is not None, stdin=stdin) as found:
        inputs: dict[str, stage.Input] = {}
        if found.paths:
            inputs["text"] = found.files(config.source, config.license)
        if found.builtin:
            from pipelines.text.builtin_docs import python_docs_files

            inputs["builtin"] = python_docs_files()
        model = model_files(config.sentences)
        if model is not None:
            inputs["parser"] = model
        if found.skipped:
            log.info("%d files skipped: hidden, of unknown format, or the same as another file", found.skipped)
        return run_stage(STAGE, config, inputs, store=store, **options)


def build(run: Run) -> None:
    """Build the artifact; see `run`."""
    config: Config = run.config
    notes = Notes()
    text: Files | None = run.inputs.get("text")
    files = list(zip(text.paths, text.names, strict=True)) if text else []
    total = sum(path.stat().st_size for path, _ in files)
    with contextlib.closing(CorpusWriter(run.out, splitter(config.sentences), notes)) as writer:
        with run.progress.task("corpus", total=total or None, unit="B") as bar:
            for path, name in files:
                for document in _documents(path, name, config, notes):
                    writer.add(document)
                bar.advance(path.stat().st_size, note=name.encode("unicode_escape").decode()[-30:])
            if "builtin" in run.inputs:
                from pipelines.text.builtin_docs import python_docs_documents

                keep_lines = config.sentences == "line"
                for document in python_docs_documents(run.inputs["builtin"], notes, keep_lines=keep_lines):
                    writer.add(document)
        run.out.counts |= writer.finish(valid=config.valid, test=config.test)
    run.out.counts["dropped"] = dict(sorted(notes.dropped.items()))
    run.warn(*notes.lines())


def _documents(path: Path, name: str, config: Config, notes: Notes) -> Iterator[Document]:
    """All documents of one file of any format."""
    kind = format_of(name, config.format)
    keep_lines = config.sentences == "line"
    fields = Fields(config.text_field, config.id_field, keep_lines)
    if kind == "text":
        with open_text(path, name, config.encoding) as stream:
            chunks = decode(stream, name, config.encoding, notes)
            layout = config.documents
            yield from text_documents(chunks, source=name, layout=layout, notes=notes, keep_lines=keep_lines)
        return
    if kind == "parquet":
        yield from parquet_documents(path, name, fields, notes)
        return
    lines = open_lines(path, name, config.encoding, notes)
    if kind == "jsonl":
        yield from json_documents(lines, name, fields, notes)
    elif kind == "conllu":
        yield from conllu_documents(lines, name, notes)
    else:
        quoting = config.quoting if config.quoting is not None else kind == "csv"
        delimiter = "," if kind == "csv" else "\t"
        yield from table_documents(lines, name, fields, notes, delimiter=delimiter, quoting=quoting)


STAGE = Stage("build-corpus", "corpus", 1, Config, build)
