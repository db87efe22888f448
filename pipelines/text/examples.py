"""Reads the examples of a task from files: CSV, TSV, JSON lines, Parquet, label-text and parallel text."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from guidance.errors import InputError, counted, did_you_mean
from pipelines.engine import stage
from pipelines.storage.manifest import digest
from pipelines.text.blocks import BLOCK_LIMIT, Block, Document, Notes, block_of, bounded_lines, paragraphs
from pipelines.text.line_layout import check_not_columns
from pipelines.text.readers import TextFile, format_of, whole_number
from pipelines.text.records import (
    check_unicode,
    delimiter_hint,
    json_object,
    json_objects,
    parquet_rows,
    plain_rows,
    quoted_rows,
    record_id,
    short_list,
)

NO_LABELS = "a test file has no labels"
"""What is said of a test file without the column of the label."""

_SHOWN = 5
"""Rows of a wrong length that a message names."""


class Layout(stage.Config):
    """Where the parts of a task's examples stand in files.

    Attributes:
        format: see `pipelines.stages.dataset.Config`, which lists the formats.
    """

    format: str | None = None
    encoding: str = Field("utf-8", description="Encoding of text files; invalid bytes are an error.")
    text_column: str = Field(
        "text", min_length=1, description="Column or field with the text: its name, or its number from 1."
    )
    pair_column: str | None = Field(None, description="Column or field with the second text: name, or number from 1.")
    label_column: str | None = Field(
        None, description="Column or field with the label; by default `label` if it exists."
    )
    id_column: str | None = Field(
        None, description="Column or field with the example's id; by default the id is the number of the line or row."
    )
    choices_column: str | None = Field(
        None,
        description="For multiple choice: field of JSON lines with the list of choices; the label is the number of the right "
        "one from 0, its letter, or its text.",
    )
    question_column: str | None = Field(
        None, description="For multiple choice: field with the question, if --text-column holds the passage."
    )
    summary_column: str | None = Field(
        None,
        description="JSON lines of documents with summaries: field with the summary, a text or a list of sentences.",
    )
    sections_column: str | None = Field(
        None, description="JSON lines of segmented documents: field with a list of texts, or of lists of sentences."
    )
    separator: str = Field("==========", min_length=1, description="Choi: the line between two sections.")
    summary_sentences: int | None = Field(
        None,
        ge=1,
        description="Number of sentences that a summary takes from its document; by default 3, in scitldr 1.",
    )
    min_summary_words: int = Field(
        0,
        ge=0,
        description="Fewest words of a summary, without which its document is dropped; 50 makes NYT-50 of the New York Times.",
    )
    drop_shared: bool = Field(
        False, description="Segmented documents: drop test documents that share a sentence with a training document."
    )
    header: bool = Field(True, description="Take the first row of a table as the names of its columns.")
    quoting: bool | None = Field(None, description="Read quotes in tables; by default only in .csv.")
    ragged: Literal["refuse", "drop", "keep"] = Field(
        "refuse",
        description="Treatment of rows whose length differs; keep uses those that have every requested column.",
    )
    sentences: str | None = Field(
        None,
        description="Sentence splitter: rules (punctuation of all scripts), line, spacy-rules, spacy:NAME_OR_FOLDER, "
        "stanza:LANG or stanza:FOLDER:LANG:PACKAGE; by default rules, or line for parallel files.",
    )


@dataclass(frozen=True)
class Record:
    """One example as written in a file; ``number`` is its line or row, from 1.

    Attributes:
        source: what it comes from, where that is not the file.
        parts: of examples that are more than a text or a pair, their blocks: texts, or the sentences of a text.
    """

    number: int
    place: str
    text: str | None
    pair: str | None = None
    label: str | None = None
    id: str | None = None
    source: str | None = None
    parts: tuple[str | tuple[str, ...], ...] = ()


def read_examples(file: TextFile, split: str, layout: Layout, source_column: str | None = None) -> Iterator[Record]:
    """The examples of one file.  A file of the split ``test`` needs no labels.  Raises InputError if the file is not in its
    format, or lacks a column; the message names file and line."""
    kind = format_of(file.name, layout.format)
    if kind not in _READERS:
        if kind == "text":
            check_not_columns(file.first_lines(), file.name, hint="for a word and its tag on each line: --format conll")
        raise InputError(
            f"{file.name!r}: examples cannot be read from {kind} files",
            hint=f"name the format with --format: {', '.join(_READERS)}, conll, or that of a data set",
        )
    yield from _READERS[kind](file, split, layout, columns_of(layout, source_column))


def read_parallel(text: TextFile, pair: TextFile) -> Iterator[Record]:
    """The examples of two parallel files; pairs with an empty second side are dropped.  Raises InputError if the files have
    different numbers of lines."""
    counts = [0, 0]
    for lines in itertools.zip_longest(text.lines(any_end=False), pair.lines(any_end=False)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if None in lines:
            continue  # count to the end, so that the message has both numbers of lines
        (number, own), (_, other) = lines
        place = text.place(number)
        if own.strip() and not other.strip():
            text.notes.drop("empty pair", place)
        else:
            yield Record(number, place, own, pair=other)
    if counts[0] != counts[1]:
        raise InputError(
            f"{text.name!r} has {counted(counts[0], 'line')} and {pair.name!r} has {counts[1]:,}: they are not parallel",
            hint="line n of one must be the translation of line n of the other",
        )


Columns = Mapping[str, str]
"""Which column holds the ``text`` of an example, its ``pair``, ``label``, ``id`` and ``source``: column names by part."""


def columns_of(layout: Layout, source_column: str | None = None) -> Columns:
    """The columns that a layout asks for."""
    columns = {
        "text": layout.text_column,
        "pair": layout.pair_column,
        "label": layout.label_column or "label",
        "id": layout.id_column,
        "source": source_column,
    }
    return {role: name for role, name in columns.items() if name is not None}


def _label_first(file: TextFile, split: str, layout: Layout, columns: Columns) -> Iterator[Record]:
    for number, line in file.lines():
        if line.strip():
            label, *text = re.split(r"[ \t]", line.strip(), maxsplit=1)
            yield Record(number, file.place(number), "".join(text), label=label)


def _table(file: TextFile, split: str, layout: Layout, columns: Columns, *, delimiter: str) -> Iterator[Record]:
    quoting = layout.quoting if layout.quoting is not None else delimiter == ","
    rows = quoted_rows(file.lines(), file.name, delimiter) if quoting else plain_rows(file.lines(), delimiter)
    first = next(rows, None)
    if first is None:
        return
    width = len(first[1])
    names = first[1] if layout.header else None
    numbers = _numbers(columns, names, width, file.place(first[0]), split, layout, file.notes)
    if not layout.header:
        rows = itertools.chain([first], rows)
    for number, row in rows:
        place = file.place(number)
        if len(row) != width:
            if layout.ragged == "refuse":
                _refuse_ragged(file.name, width, itertools.chain([(number, row)], rows), layout.header, quoting)
            if layout.ragged == "drop" or len(row) <= max(numbers.values()):
                file.notes.drop("a row of another length", place)
                continue
        values: dict[str, Any] = {role: row[column] for role, column in numbers.items()}
        yield Record(number, place, **values)


def _refuse_ragged(name: str, width: int, rows: Iterable[tuple[int, list[str]]], header: bool, quoting: bool) -> None:
    wrong = [(number, len(row)) for number, row in rows if len(row) != width]
    shown = ", ".join(f"line {number} ({size})" for number, size in wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
    raise InputError(
        f"{name!r}: {'the header' if header else 'the first row'} has {counted(width, 'field')}, other rows do not: {shown}{more}",
        hint=("if quotes are plain letters here: --no-quoting" if quoting else "if the file uses quotes: --quoting")
        + "\n--ragged drop leaves such rows out, --ragged keep takes those that have all columns asked for",
    )


def _numbers(
    columns: Columns, names: Sequence[str] | None, width: int, place: str, split: str, layout: Layout, notes: Notes
) -> dict[str, int]:
    """The number of each column.  A test file may lack that of the label."""
    numbers = {}
    for role, wanted in columns.items():
        same = [column for column, known in enumerate(names or ()) if known == wanted]
        if len(same) > 1:
            hint = "give the column's number instead, from 1"
            raise InputError(f"{place}: {len(same)} columns are called {wanted!r}", hint=hint)
        if same or 1 <= (whole_number(wanted) or 0) <= width:
            numbers[role] = same[0] if same else int(wanted) - 1
        elif role == "label" and split == "test" and layout.label_column is not None:
            notes.warn(NO_LABELS, place)
        elif role != "label" or layout.label_column is not None:
            if names is not None:
                columns_there = f"it has {short_list(names)}"
            elif wanted.isdecimal():
                columns_there = f"its rows have {counted(width, 'column')}"
            else:
                columns_there = "without a header columns are numbers from 1"
            raise InputError(
                f"{place}: no column {wanted!r}; {columns_there}{did_you_mean(wanted, names or ())}",
                hint=f"name it with --{role}-column; {delimiter_hint(names or ())}"
                + "\nif the first line is an example: --no-header --text-column 1 --label-column 2"
                * (names is not None),
            )
    return numbers


def _json_lines(file: TextFile, split: str, layout: Layout, columns: Columns) -> Iterator[Record]:
    yield from json_records(json_objects(file.lines(), file.name), split, layout, columns)


def json_records(
    records: Iterable[tuple[int, str, Any]], split: str, layout: Layout, columns: Columns
) -> Iterator[Record]:
    """The examples of JSON objects, each given with its number and its place in a file."""
    for number, place, record in records:
        json_object(record, place)
        values: dict[str, Any] = {}
        for role, key in columns.items():
            if key in record:
                values[role] = plain_value(record[key], role, key, place)
            elif role == "label" and (layout.label_column is None or split == "test"):
                values[role] = None
            else:
                raise InputError(
                    f"{place}: no field {key!r}; it has {short_list(record)}", hint=f"name it with --{role}-column"
                )
        yield Record(number, place, **values)


def plain_value(value: Any, role: str, key: str, place: str) -> str | None:
    """A value as text.  Labels and ids may be numbers, which are written as in JSON; NaN is no label."""
    if value is None:
        return None
    if role == "id" and isinstance(value, str | int) and not isinstance(value, bool):
        value = record_id(value)
    if role == "label" and isinstance(value, bool | int | float):
        if isinstance(value, float) and math.isnan(value):  # how tables of floats write that there is none
            return None
        value = json.dumps(value)
    if not isinstance(value, str):
        wanted = "a string or a number" if role == "label" else "a string"
        raise InputError(f"{place}: {key!r} must be {wanted}, found {type(value).__name__}")
    check_unicode(value, repr(key), place)
    return value


def _parquet(file: TextFile, split: str, layout: Layout, columns: Columns) -> Iterator[Record]:
    names: dict[str, str] = {}

    def choose(schema: Any) -> list[str]:
        known = schema.names
        numbers = _numbers(columns, known, len(known), repr(file.name), split, layout, file.notes)
        names.update({role: known[number] for role, number in numbers.items()})
        return list(dict.fromkeys(names.values()))

    for number, row in parquet_rows(file.path, file.name, choose):
        place = f"{file.name!r}, row {number}"
        values: dict[str, Any] = {role: plain_value(row[name], role, name, place) for role, name in names.items()}
        yield Record(number, place, **values)


_READERS: Mapping[str, Callable[[TextFile, str, Layout, Columns], Iterator[Record]]] = {
    "csv": functools.partial(_table, delimiter=","),
    "tsv": functools.partial(_table, delimiter="\t"),
    "jsonl": _json_lines,
    "parquet": _parquet,
    "label-text": _label_first,
}


# documents


def document_of(
    record: Record, name: str, split: str, prefix: str, layout: Layout, split_of: Callable[[str], str], notes: Notes
) -> Document | None:
    """A record as a document; None if it has no text.  The ``prefix`` makes ids unique among files and splits."""
    blocks, pair = [], record.pair
    if record.parts:
        blocks = [block for part in record.parts if (block := _part(part, record, name, layout, notes))]
        if len(blocks) < len(record.parts):
            notes.drop("empty text", record.place)
            return None
    elif (block := _block(record.text or "", record, name, layout, notes)) is not None:
        blocks = [block]
    else:
        notes.drop("null text" if record.text is None else "empty text", record.place)
        return None
    if not record.parts and (layout.pair_column is not None or record.pair is not None):
        second = _block(record.pair or "", record, name, layout, notes)
        if second is None:
            notes.warn("an example has an empty pair", record.place)
        pair = second.text if second else ""
        blocks += [second] if second else []
    label = (record.label or "").strip() or None
    if label is None and record.label is not None:
        notes.warn("an example has an empty label", record.place)
    if split == "train":
        # keyed by the text, so that equal examples get the same split
        split = split_of(digest([block.text for block in blocks] if record.parts else [blocks[0].text, pair]))
    own = record.id if record.id is not None else str(record.number)
    id_ = f"{prefix}/{own}" if prefix else own
    return Document(id_, record.source or name, record.place, blocks, split, pair, label)


def _part(part: str | tuple[str, ...], record: Record, name: str, layout: Layout, notes: Notes) -> Block | None:
    """A block of a record: a text, or given sentences."""
    if isinstance(part, str):
        return _block(part, record, name, layout, notes)
    sentences = [text for sentence in part if (text := " ".join(unicodedata.normalize("NFC", sentence).split()))]
    return block_of(sentences, record.number) if sentences else None


def _block(text: str, record: Record, name: str, layout: Layout, notes: Notes) -> Block | None:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = ((record.number, line) for _, line in bounded_lines([text]) if line)
    own = list(itertools.islice(paragraphs(lines, source=name, notes=notes, keep_lines=layout.sentences == "line"), 2))
    if len(own) > 1:
        notes.warn(f"a text over {BLOCK_LIMIT:,} characters was cut off", record.place)
    return Block(own[0].text, record.number, own[0].sentences) if own else None
