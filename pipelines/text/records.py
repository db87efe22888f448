"""Files of records, where each record is a document: JSON lines, CSV, TSV and Parquet.

Text is never converted: ``007``, ``NA``, ``null`` and dates in a text field stay text.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from guidance.errors import InputError
from pipelines.storage.files import open_parquet
from pipelines.text.blocks import Document, Notes, record_blocks
from pipelines.text.readers import LINE_LIMIT, Expansion, looks_like

_NUMBER_LIKE = re.compile(r'"|-?\d+(\.\d+)?([eE][+-]?\d+)?$')
_DEFAULT_ID = "id"


@dataclass(frozen=True)
class Fields:
    """The fields of a record that hold its text and its id.

    Attributes:
        text: name of the field or column with the text.
        id: name of the field or column with the id; None means ``id`` if it exists.
        keep_lines: whether each line of the text is one sentence.
    """

    text: str
    id: str | None
    keep_lines: bool = False

    def document(self, text: str, id_: str | None, name: str, unit: str, number: int, notes: Notes) -> Document:
        """One record as a document.  ``unit`` says what ``number`` counts: line or row."""
        blocks = record_blocks(text, source=name, line=number, notes=notes, keep_lines=self.keep_lines)
        return Document(id_, name, f"{name!r}, {unit} {number}", blocks)


def record_id(value: str | int) -> str:
    """The id as text.  A string that looks like a number keeps its quotes, so that 1 and "1" stay different."""
    if isinstance(value, int):
        return str(value)
    return json.dumps(value) if _NUMBER_LIKE.match(value) else value


def short_list(names: Iterable[str]) -> str:
    """At most 12 names for a message, quoted and shortened."""
    names = list(names)
    return ", ".join(repr(name[:40]) for name in names[:12]) + (" ..." if len(names) > 12 else "")


def json_documents(lines: Iterable[tuple[int, str]], name: str, fields: Fields, notes: Notes) -> Iterator[Document]:
    """One document for each line, which must be a JSON object.  Null texts are dropped and counted."""
    for number, line in lines:
        if not line.strip(" \t\n\r"):
            continue
        record = parse_json(line, f"{name!r}, line {number}")
        place = f"{name!r}, line {number}"
        if not isinstance(record, dict):
            raise InputError(f"{place}: expected a JSON object, found {type(record).__name__}")
        if fields.text not in record:
            raise InputError(
                f"{place}: no field {fields.text!r}; it has {short_list(record)}", hint="name it with --text-field"
            )
        text = record[fields.text]
        if text is None:
            notes.drop("null text", place)
            continue
        id_ = _json_id(record, fields, place)
        for what, value in (("text", text), ("id", id_ or "")):
            if not isinstance(value, str):
                raise InputError(f"{place}: field {fields.text!r} must be a string, found {type(value).__name__}")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"{place}: unpaired surrogate in the {what}, character {error.start}") from error
        yield fields.document(text, id_, name, "line", number, notes)


def parse_json(line: str, place: str) -> Any:
    """One JSON value.

    Raises:
        InputError: the line is not valid JSON; the message names the place.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(line, parse_constant=refuse)
    except RecursionError as error:
        raise InputError(f"{place}: nested too deeply") from error
    except json.JSONDecodeError as error:
        hint = "write one whole object on each line"
        raise InputError(f"{place}: not JSON ({error.msg}, column {error.colno})", hint=hint) from error
    except ValueError as error:
        raise InputError(f"{place}: not JSON ({str(error)[:80]})") from error


def _json_id(record: dict[str, Any], fields: Fields, place: str) -> str | None:
    key = fields.id or _DEFAULT_ID
    if key not in record:
        if fields.id:
            raise InputError(f"{place}: no field {key!r}; it has {short_list(record)}", hint="name it with --id-field")
        return None
    value = record[key]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{place}: id {key!r} must be a string or an integer, found {type(value).__name__}")
    return record_id(value)


def table_documents(
    lines: Iterable[tuple[int, str]], name: str, fields: Fields, notes: Notes, *, delimiter: str, quoting: bool
) -> Iterator[Document]:
    """One document for each row under a header."""
    rows = quoted_rows(lines, name, delimiter) if quoting else plain_rows(lines, delimiter)
    header: list[str] | None = None
    text_at, id_at = 0, None
    for number, row in rows:
        if header is None:
            header = row
            text_at, id_at = _columns(header, fields, f"{name!r}, line {number}")
            continue
        if len(row) != len(header):
            hint = "if quotes are plain letters here: --no-quoting" if quoting else "if the file uses quotes: --quoting"
            raise InputError(f"{name!r}, line {number}: {len(row)} fields, the header has {len(header)}", hint=hint)
        yield fields.document(row[text_at], row[id_at] if id_at is not None else None, name, "line", number, notes)


def plain_rows(lines: Iterable[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Numbered rows of a table in which quotes are ordinary characters."""
    for number, line in lines:
        if line.strip("\n"):
            yield number, line.split(delimiter)


def quoted_rows(lines: Iterable[tuple[int, str]], name: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Numbered rows of a table with quoted fields."""
    csv.field_size_limit(LINE_LIMIT)
    reader = csv.reader((line + "\n" for _, line in lines), delimiter=delimiter, strict=True)
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{name!r}, line {start}: {error}",
                hint="a quote may be unclosed; --no-quoting reads quotes as ordinary characters",
            ) from error
        if row:
            yield start, row


def _columns(header: Sequence[str], fields: Fields, place: str) -> tuple[int, int | None]:
    repeated = sorted({column for column in header if list(header).count(column) > 1})
    if repeated:
        raise InputError(f"{place}: the header repeats columns: {short_list(repeated)}")
    for wanted, flag in ((fields.text, "--text-field"), (fields.id, "--id-field")):
        if wanted is not None and wanted not in header:
            raise InputError(
                f"{place}: no column {wanted!r}; the header has {short_list(header)}",
                hint=f"name it with {flag}; the delimiter is a comma in .csv and a tab in .tsv",
            )
    key = fields.id or _DEFAULT_ID
    return list(header).index(fields.text), list(header).index(key) if key in header else None


def parquet_documents(path: Path, name: str, fields: Fields, notes: Notes) -> Iterator[Document]:
    """One document for each row of a Parquet file.  Null texts are dropped and counted."""
    columns: list[str] = []

    def choose(schema: Any) -> list[str]:
        columns.extend(_parquet_columns(schema, fields, name))
        return columns

    for number, row in parquet_rows(path, name, choose):
        text, id_ = row[columns[0]], row[columns[1]] if len(columns) > 1 else None
        if text is None:
            notes.drop("null text", f"{name!r}, row {number}")
            continue
        yield fields.document(text, None if id_ is None else record_id(id_), name, "row", number, notes)


def parquet_rows(path: Path, name: str, choose: Callable[[Any], list[str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a Parquet file, read in batches: their numbers from 1, and their values by column.

    Args:
        choose: from the schema of the file to the names of the columns to read, the text first.

    Raises:
        InputError: the file is not Parquet, is damaged, or is a decompression bomb.
    """
    import pyarrow as pa

    with path.open("rb") as raw:
        head = raw.read(16)
        if looks_like(head) != "Parquet":
            raise InputError(f"{name!r}: not Parquet; it looks like {looks_like(head) or 'plain text'}")
        size = path.stat().st_size
        number = 0
        try:
            columns = choose(open_parquet(raw).schema_arrow)
            raw.seek(0)
            # read as a dictionary, so that a bomb that repeats one string is not expanded
            file = open_parquet(raw, page_checksum_verification=True, read_dictionary=columns[:1])
            _check_expansion(file.metadata, name, size)
            expansion = Expansion(name)
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for cells in zip(*(batch.column(column) for column in columns), strict=True):
                    number += 1
                    row = {column: cell.as_py() for column, cell in zip(columns, cells, strict=True)}
                    text = row[columns[0]]
                    expansion.add(len(text) if isinstance(text, str) else 0, size)
                    yield number, row
        except UnicodeDecodeError as error:
            raise InputError(f"{name!r}, row {number}: not UTF-8 ({error.reason})") from error
        except (pa.ArrowException, OSError, MemoryError) as error:
            detail = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            raise InputError(f"{name!r}, after row {number}: damaged Parquet ({detail!r})") from error


def _check_expansion(metadata: Any, name: str, size: int) -> None:
    """Raise InputError if a Parquet file of ``size`` bytes claims to hold far more; see `EXPANSION_LIMIT`."""
    for group in range(metadata.num_row_groups):
        Expansion(name).add(max(0, metadata.row_group(group).total_byte_size), size)


def _parquet_columns(schema: Any, fields: Fields, name: str) -> list[str]:
    import pyarrow.types as types

    _, id_at = _columns(schema.names, fields, repr(name))
    kind = schema.field(fields.text).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise InputError(
            f"{name!r}: column {fields.text!r} holds {kind}, not strings", hint="name the text with --text-field"
        )
    if id_at is None or schema.names[id_at] == fields.text:
        return [fields.text]
    key = schema.names[id_at]
    kind = schema.field(key).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind)):
        raise InputError(f"{name!r}: id column {key!r} holds {kind}, neither strings nor integers")
    return [fields.text, key]
