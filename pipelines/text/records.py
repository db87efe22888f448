"""Files of records, where each record is a document: JSON lines, CSV, TSV, Parquet and Arrow.

A field inside another one is named with a dot: ``a.b`` is ``b`` in ``a``, unless a field is called ``a.b`` itself.

Text is never converted: ``007``, ``NA``, ``null`` and dates in a text field stay text.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from guidance.errors import InputError, counted, did_you_mean, reason_of
from pipelines.lazy import pa
from pipelines.storage.files import open_parquet
from pipelines.text.blocks import Document, Notes, record_blocks
from pipelines.text.readers import LINE_LIMIT, check_expansion, looks_like

_NUMBER_LIKE = re.compile(r'"|-?\d+(\.\d+)?([eE][+-]?\d+)?$')
_DEFAULT_ID = "id"
_DEPTH = 5
"""Fields inside fields that are looked through for text to suggest."""

MISSING = object()
"""What `find_field` gives for a field that a record does not have."""


@dataclass(frozen=True)
class Fields:
    """The fields of a record that hold its text and its id; None means ``id`` if it exists.  With ``keep_lines`` each line of
    the text is one sentence."""

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
    for number, place, record in json_objects(lines, name):
        text = find_field(record, fields.text)
        if text is MISSING:
            texts = dict(_texts_in(record))
            hint = text_hint(likeliest(texts))
            raise InputError(f"{place}: no field {fields.text!r}; it has {short_list(record)}", hint=hint)
        if text is None:
            notes.drop("null text", place)
            continue
        id_ = _json_id(record, fields, place)
        for what, value in (("text", text), ("id", id_ or "")):
            if not isinstance(value, str):
                raise InputError(f"{place}: field {fields.text!r} must be a string, found {type(value).__name__}")
            check_unicode(value, f"the {what}", place)
        yield fields.document(text, id_, name, "line", number, notes)


def check_utf8(text: str, what: str = "the text") -> None:
    """Raises InputError for what a user wrote with bytes that are not UTF-8; Python keeps them as halves of surrogate pairs."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError(f"{what} is not UTF-8", hint="iconv -f latin1 -t utf8 converts it")


def check_unicode(text: str, what: str, place: str) -> None:
    """Raises InputError when a text has half of a surrogate pair, which JSON can spell and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: unpaired surrogate in {what}, character {error.start}") from error


def find_field(record: Any, path: str) -> Any:
    """The value of a field, or `MISSING`; ``a.b`` is field ``b`` of field ``a``, unless a field has that name itself."""
    if not isinstance(record, dict):
        return MISSING
    if path in record:
        return record[path]
    for dot, letter in enumerate(path):
        if letter == "." and path[:dot] in record:
            value = find_field(record[path[:dot]], path[dot + 1 :])
            if value is not MISSING:
                return value
    return MISSING


def _texts_in(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields that hold strings, also inside other fields, with their values."""
    for name, value in record.items():
        if isinstance(value, str):
            yield prefix + name, value
        elif isinstance(value, dict) and prefix.count(".") < _DEPTH:
            yield from _texts_in(value, f"{prefix}{name}.")


def likeliest(held: Mapping[str, str]) -> list[str]:
    """The names of fields or columns, given a string of each: first the longest strings, last addresses."""

    def rank(name: str) -> tuple[bool, int]:
        is_address = "://" in held[name] and " " not in held[name].strip()
        return is_address, -len(held[name])

    return sorted(held, key=rank)


def text_hint(held: Sequence[str]) -> str:
    """How to name the field with the text, given the fields that hold strings, the likeliest first."""
    example = f": --text-field {shlex.quote(held[0][:40])}" if held and held[0].isprintable() else ""
    others = f"; strings are in {short_list(held)}" if held else ""
    return f"name the field with the text{example}{others}"


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_json(line: str, place: str) -> Any:
    """One JSON value; raises InputError if the line is not valid JSON."""
    try:
        if line.startswith("\ufeff"):
            raise ValueError("it begins with a byte-order mark")
        return _DECODER.decode(line)
    except RecursionError as error:
        raise InputError(f"{place}: nested too deeply") from error
    except json.JSONDecodeError as error:
        hint = "write one whole object on each line"
        raise InputError(f"{place}: not JSON ({error.msg}, column {error.colno})", hint=hint) from error
    except ValueError as error:
        raise InputError(f"{place}: not JSON ({reason_of(error)[:80]})") from error


def json_objects(lines: Iterable[tuple[int, str]], name: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The objects of JSON lines, each with its line and its place; blank lines are left out."""
    for number, line in lines:
        if line.strip(" \t\n\r"):
            place = f"{name!r}, line {number}"
            yield number, place, json_object(parse_json(line, place), place)


def json_object(value: Any, place: str) -> dict[str, Any]:
    """The value, which must be a JSON object."""
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected a JSON object, found {type(value).__name__}")
    return value


def text_list(value: Any, what: str, place: str) -> list[str]:
    """A list of strings, or one string as a list; raises InputError for anything else."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{place}: {what} must be a string or a list of strings")
    for text in texts:
        check_unicode(text, what, place)
    return texts


def _json_id(record: dict[str, Any], fields: Fields, place: str) -> str | None:
    key = fields.id or _DEFAULT_ID
    value = find_field(record, key)
    if value is MISSING and fields.id:
        raise InputError(f"{place}: no field {key!r}; it has {short_list(record)}", hint="name it with --id-field")
    if value is MISSING or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{place}: id {key!r} must be a string or an integer, found {type(value).__name__}")
    return record_id(value)


def table_documents(
    lines: Iterable[tuple[int, str]], name: str, fields: Fields, notes: Notes, *, delimiter: str, quoting: bool
) -> Iterator[Document]:
    """One document for each row under a header."""
    rows = quoted_rows(lines, name, delimiter) if quoting else plain_rows(lines, delimiter)
    top = next(rows, None)
    if top is None:
        return
    texts = header = top[1]
    if fields.text not in header:  # `_columns` raises an error, which suggests a column
        texts = likeliest(dict(zip(header, next(rows, (0, header))[1], strict=False)))
    text_at, id_at = _columns(header, fields, f"{name!r}, line {top[0]}", texts)
    for number, row in rows:
        if len(row) != len(header):
            hint = "if quotes are plain letters here: --no-quoting" if quoting else "if the file uses quotes: --quoting"
            raise InputError(
                f"{name!r}, line {number}: {counted(len(row), 'field')}, the header has {len(header)}", hint=hint
            )
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


def delimiter_hint(header: Sequence[str]) -> str:
    """What to say of the delimiter where a column is missing."""
    if len(header) == 1 and (found := next((each for each in ";|\t" if each in header[0]), None)):
        called = {";": "semicolons", "|": "bars", "\t": "tabs"}[found]
        return f"its columns seem to be parted by {called}: write the file with commas, or with tabs as .tsv"
    return "the delimiter is a comma in .csv and a tab in .tsv"


def _columns(header: Sequence[str], fields: Fields, place: str, texts: Sequence[str]) -> tuple[int, int | None]:
    """The numbers of the columns with text and id.  ``texts`` are the columns that may hold text."""
    repeated = sorted({column for column in header if list(header).count(column) > 1})
    if repeated:
        raise InputError(f"{place}: the header repeats columns: {short_list(repeated)}")
    if fields.text not in header:
        raise InputError(
            f"{place}: no column {fields.text!r}; the header has {short_list(header)}{did_you_mean(fields.text, header)}",
            hint=f"{text_hint(texts)}\n{delimiter_hint(header)}",
        )
    if fields.id is not None and fields.id not in header:
        raise InputError(
            f"{place}: no column {fields.id!r}; the header has {short_list(header)}{did_you_mean(fields.id, header)}",
            hint="name it with --id-field",
        )
    key = fields.id or _DEFAULT_ID
    return list(header).index(fields.text), list(header).index(key) if key in header else None


def column_documents(
    path: Path, name: str, fields: Fields, notes: Notes, rows: Callable[..., Iterator[tuple[int, dict[str, Any]]]]
) -> Iterator[Document]:
    """One document for each row of a file, which ``rows`` reads: `parquet_rows` or `arrow_rows`.  Null texts are dropped."""
    for number, row in rows(path, name, lambda schema: _typed_columns(schema, fields, name)):
        text, id_ = (*row.values(), None)[:2]
        if text is None:
            notes.drop("null text", f"{name!r}, row {number}")
            continue
        yield fields.document(text, None if id_ is None else record_id(id_), name, "row", number, notes)


def parquet_rows(
    path: Path, name: str, choose: Callable[[Any], list[str]], groups: range | None = None, first: int = 1
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a Parquet file, read in batches: their numbers and their values by column.  Raises InputError if the file
    is not Parquet, is damaged, or is a decompression bomb.

    Args:
        choose: from the schema of the file to the names of the columns to read, the text first.
        groups: the row groups to read, by default all.
        first: number of the first row that is read.
    """
    with path.open("rb") as raw:
        head = raw.read(16)
        if looks_like(head) != "Parquet":
            raise InputError(f"{name!r}: not Parquet; it looks like {looks_like(head) or 'plain text'}")
        size, unpacked = path.stat().st_size, 0
        with _damage(name, "Parquet", first - 1) as count:
            columns = choose(open_parquet(raw).schema_arrow)
            raw.seek(0)
            # read as a dictionary, so that a bomb that repeats one string is not expanded
            file = open_parquet(raw, page_checksum_verification=True, read_dictionary=columns[:1])
            for group in range(file.metadata.num_row_groups):
                check_expansion(name, max(0, file.metadata.row_group(group).total_byte_size), size)
            chosen = list(groups) if groups is not None else None
            for batch in file.iter_batches(batch_size=1024, columns=columns, row_groups=chosen):
                for row in _rows(batch, columns):
                    count.rows += 1
                    unpacked += len(text) if isinstance(text := row[columns[0]], str) else 0
                    check_expansion(name, unpacked, size)
                    yield count.rows, row


def arrow_rows(path: Path, name: str, choose: Callable[[Any], list[str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of an Arrow file: a stream, as Hugging Face's ``datasets`` writes it, or a file with a footer."""
    with path.open("rb") as raw:
        head = raw.read(16)
        raw.seek(0)
        if not head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
            raise InputError(f"{name!r}: not Arrow; it looks like {looks_like(head) or 'plain text'}")
        with _damage(name, "Arrow") as count:
            batches: Iterable[Any]
            if head.startswith(b"ARROW1"):
                file = pa.ipc.open_file(raw)
                batches = map(file.get_batch, range(file.num_record_batches))
            else:
                batches = file = pa.ipc.open_stream(raw)
            columns = choose(file.schema)
            for batch in batches:
                batch.validate(full=True)
                for row in _rows(batch, columns):
                    count.rows += 1
                    yield count.rows, row


@dataclass
class _Count:
    rows: int


@contextlib.contextmanager
def _damage(name: str, kind: str, rows: int = 0) -> Iterator[_Count]:
    """Counts the rows that are read, and raises InputError when one is damaged."""
    count = _Count(rows)
    try:
        yield count
    except UnicodeDecodeError as error:
        raise InputError(f"{name!r}, row {count.rows + 1}: not UTF-8 ({error.reason})") from error
    except (pa.ArrowException, OSError, MemoryError) as error:
        detail = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(f"{name!r}, after row {count.rows}: damaged {kind} ({detail!r})") from error


def _rows(batch: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a record batch: the values of the columns, which may be fields of structs (``a.b``), by name."""
    values = []
    for name in columns:
        starts = (name[:dot] for dot, letter in enumerate(f"{name}.") if letter == ".")
        top = name if name in batch.schema.names else next(start for start in starts if start in batch.schema.names)
        inside = name[len(top) + 1 :]
        cells = (cell.as_py() for cell in batch.column(top))
        values.append(map(functools.partial(find_field, path=inside), cells) if inside else cells)
    for row in zip(*values, strict=True):
        yield {name: None if value is MISSING else value for name, value in zip(columns, row, strict=True)}


def _typed_columns(schema: Any, fields: Fields, name: str) -> list[str]:
    """The names of the columns with the text and, if there is one, with the id; fields inside others with dots."""
    import pyarrow.types as types

    kinds = dict(_leaves(schema))
    texts = [column for column, kind in kinds.items() if types.is_string(kind) or types.is_large_string(kind)]
    nested = [column for column in (fields.text, fields.id) if column in kinds and column not in schema.names]
    _, id_at = _columns([*schema.names, *nested], fields, repr(name), texts)
    kind = kinds.get(fields.text)
    if fields.text not in texts:
        raise InputError(f"{name!r}: column {fields.text!r} holds {kind}, not strings", hint=text_hint(texts))
    key = None if id_at is None else [*schema.names, *nested][id_at]
    if key is None or key == fields.text:
        return [fields.text]
    kind = kinds.get(key)
    if key not in texts and not types.is_integer(kind):
        raise InputError(f"{name!r}: id column {key!r} holds {kind}, neither strings nor integers")
    return [fields.text, key]


def _leaves(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Columns and their types; fields of structs with dots, dictionaries as what they hold."""
    import pyarrow.types as types

    for field in schema:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        yield prefix + field.name, kind
        if types.is_struct(kind):
            yield from _leaves(list(kind), f"{prefix}{field.name}.")
