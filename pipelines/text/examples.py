"""Reads the examples of a task from files: CSV, TSV, JSON lines, Parquet, label-text and parallel text."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.text.blocks import Notes
from pipelines.text.readers import format_of, open_lines, whole_number
from pipelines.text.records import (
    check_unicode,
    parquet_rows,
    parse_json,
    plain_rows,
    quoted_rows,
    record_id,
    short_list,
)

_SHOWN = 5
"""Rows of a wrong length that a message names."""


@dataclass(frozen=True)
class Layout:
    """Format and columns of a file of examples; see the fields of the same names in `pipelines.stages.dataset.Config`."""

    format: str | None
    encoding: str
    text_column: str
    pair_column: str | None
    label_column: str | None
    id_column: str | None
    header: bool
    quoting: bool | None
    ragged: str
    choices_column: str | None = None
    question_column: str | None = None
    source_column: str | None = None


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


def read_examples(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    """The examples of one file.  A file of the split ``test`` needs no labels.

    Raises:
        InputError: the file is not in its format, or lacks a column; the message names file and line.
    """
    kind = format_of(name, layout.format)
    if kind not in _READERS:
        raise InputError(
            f"{name!r}: examples cannot be read from {kind} files",
            hint=f"name the format with --format: {', '.join(_READERS)}",
        )
    yield from _READERS[kind](path, name, split, layout, notes)


def read_parallel(text: tuple[Path, str], pair: tuple[Path, str], encoding: str, notes: Notes) -> Iterator[Record]:
    """The examples of two parallel files, each given as path and name; pairs with an empty second side are dropped.

    Raises:
        InputError: the files have different numbers of lines.
    """
    lines = [open_lines(path, name, encoding, notes, any_end=False) for path, name in (text, pair)]
    counts = [0, 0]
    for own, other in itertools.zip_longest(*lines):
        for side, found in enumerate((own, other)):
            counts[side] += found is not None
        if own is None or other is None:
            continue  # count to the end, so that the message has both numbers of lines
        place = f"{text[1]!r}, line {own[0]}"
        if own[1].strip() and not other[1].strip():
            notes.drop("empty pair", place)
        else:
            yield Record(own[0], place, own[1], pair=other[1])
    if counts[0] != counts[1]:
        raise InputError(
            f"{text[1]!r} has {counts[0]:,} lines and {pair[1]!r} has {counts[1]:,}: they are not parallel",
            hint="line n of one must be the translation of line n of the other",
        )


def _label_first(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    for number, line in open_lines(path, name, layout.encoding, notes):
        if line.strip():
            label, _, text = line.strip().partition(" ")
            yield Record(number, f"{name!r}, line {number}", text, label=label)


def _table(path: Path, name: str, split: str, layout: Layout, notes: Notes, *, delimiter: str) -> Iterator[Record]:
    lines = open_lines(path, name, layout.encoding, notes)
    quoting = layout.quoting if layout.quoting is not None else delimiter == ","
    rows = quoted_rows(lines, name, delimiter) if quoting else plain_rows(lines, delimiter)
    first = next(rows, None)
    if first is None:
        return
    width = len(first[1])
    columns = _columns(first[1] if layout.header else None, width, f"{name!r}, line {first[0]}", split, layout, notes)
    if not layout.header:
        rows = itertools.chain([first], rows)
    for number, row in rows:
        place = f"{name!r}, line {number}"
        if len(row) != width:
            if layout.ragged == "refuse":
                _refuse_ragged(name, width, itertools.chain([(number, row)], rows), layout.header, quoting)
            if layout.ragged == "drop" or len(row) <= max(columns.values()):
                notes.drop("a row of another length", place)
                continue
        values: dict[str, Any] = {role: row[column] for role, column in columns.items()}
        yield Record(number, place, **values)


def _refuse_ragged(name: str, width: int, rows: Iterable[tuple[int, list[str]]], header: bool, quoting: bool) -> None:
    wrong = [(number, len(row)) for number, row in rows if len(row) != width]
    shown = ", ".join(f"line {number} ({size})" for number, size in wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
    raise InputError(
        f"{name!r}: {'the header' if header else 'the first row'} has {width} fields, other rows do not: {shown}{more}",
        hint=("if quotes are plain letters here: --no-quoting" if quoting else "if the file uses quotes: --quoting")
        + "\n--ragged drop leaves such rows out, --ragged keep takes those that have all columns asked for",
    )


def _columns(
    names: Sequence[str] | None, width: int, place: str, split: str, layout: Layout, notes: Notes
) -> dict[str, int]:
    """The column of each part of an example.  A test file may lack the label column."""
    found = {}
    for role, wanted in _wanted(layout).items():
        same = [column for column, known in enumerate(names or ()) if known == wanted]
        if len(same) > 1:
            raise InputError(
                f"{place}: {len(same)} columns are called {wanted!r}", hint="give the column's number instead, from 1"
            )
        if same:
            found[role] = same[0]
        elif 1 <= (number := whole_number(wanted) or 0) <= width:
            found[role] = number - 1
        elif role == "label" and layout.label_column is None:
            continue
        elif role == "label" and split == "test":
            notes.warn("a test file has no labels", place)
        else:
            if names is not None:
                found_columns = f"it has {short_list(names)}"
            elif wanted.isdecimal():
                found_columns = f"its rows have {width} columns"
            else:
                found_columns = "without a header columns are numbers from 1"
            raise InputError(
                f"{place}: no column {wanted!r}; {found_columns}",
                hint=f"name it with --{role}-column; the delimiter is a comma in .csv and a tab in .tsv",
            )
    return found


def _wanted(layout: Layout) -> dict[str, str]:
    wanted = {
        "text": layout.text_column,
        "pair": layout.pair_column,
        "label": layout.label_column or "label",
        "id": layout.id_column,
        "source": layout.source_column,
    }
    return {role: name for role, name in wanted.items() if name is not None}


def _json_lines(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    def records() -> Iterator[tuple[int, str, Any]]:
        for number, line in open_lines(path, name, layout.encoding, notes):
            if line.strip(" \t\n\r"):
                place = f"{name!r}, line {number}"
                yield number, place, parse_json(line, place)

    yield from json_records(records(), split, layout)


def json_records(records: Iterable[tuple[int, str, Any]], split: str, layout: Layout) -> Iterator[Record]:
    """The examples of JSON objects, each given with its number and its place in a file.

    Raises:
        InputError: a value is no object, or lacks a field.
    """
    wanted = _wanted(layout)
    for number, place, record in records:
        if not isinstance(record, dict):
            raise InputError(f"{place}: expected a JSON object, found {type(record).__name__}")
        values: dict[str, Any] = {}
        for role, key in wanted.items():
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
    """A value as text.  Labels and ids may be numbers, which are written as in JSON."""
    if value is None:
        return None
    if role == "id" and isinstance(value, str | int) and not isinstance(value, bool):
        value = record_id(value)
    if role == "label" and isinstance(value, bool | int | float):
        value = json.dumps(value)
    if not isinstance(value, str):
        wanted = "a string or a number" if role == "label" else "a string"
        raise InputError(f"{place}: {key!r} must be {wanted}, found {type(value).__name__}")
    check_unicode(value, repr(key), place)
    return value


def _parquet(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    columns: dict[str, str] = {}

    def choose(schema: Any) -> list[str]:
        found = _columns(schema.names, len(schema.names), repr(name), split, layout, notes)
        columns.update({role: schema.names[column] for role, column in found.items()})
        return list(dict.fromkeys(columns.values()))

    for number, row in parquet_rows(path, name, choose):
        place = f"{name!r}, row {number}"
        values: dict[str, Any] = {
            role: plain_value(row[column], role, column, place) for role, column in columns.items()
        }
        yield Record(number, place, **values)


_READERS: Mapping[str, Any] = {
    "csv": functools.partial(_table, delimiter=","),
    "tsv": functools.partial(_table, delimiter="\t"),
    "jsonl": _json_lines,
    "parquet": _parquet,
    "label-text": _label_first,
}
