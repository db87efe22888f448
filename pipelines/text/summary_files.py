"""Readers of documents with reference summaries.  What a document's abstract says never becomes part of its text."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.text.blocks import Notes
from pipelines.text.readers import format_of, open_lines
from pipelines.text.records import MISSING, find_field, parse_json, record_id, short_list
from pipelines.text.structured import Columns, Part, Structured, json_list, text_list, whole_text

_GOLD = ("scisummnet_human.txt", "gold.txt")
"""Endings of the names of ScisummNet's summaries, after the paper's id and a dot."""


def scisummnet(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """ScisummNet: for each paper ``ID.xml`` with its sections, and ``ID.scisummnet_human.txt`` or ``ID.gold.txt``.

    The first line of a summary is the title, which is left out, as are the title and the abstract of the paper.  Abstracts
    in files of their own are not read.
    """
    papers: dict[str, tuple[Path, str]] = {}
    summaries: dict[str, tuple[Path, str]] = {}
    for path, name in zip(paths, names, strict=True):
        id_, _, rest = name.rpartition("/")[2].partition(".")
        rest = rest.lower().removesuffix(".gz")
        if rest == "xml":
            papers[id_] = path, name
        elif rest in _GOLD:
            summaries[id_] = path, name
    if not papers:
        raise InputError("no paper of ScisummNet: no file is called ID.xml or ID.xml.gz", hint="give the folder")
    for id_, (path, name) in papers.items():
        if id_ not in summaries:
            notes.drop("no summary", repr(name))
            continue
        lines = [line for _, line in open_lines(*summaries[id_], columns.encoding, notes) if line.strip()]
        sections = list(_sections(path, name, columns.encoding, notes))
        if not sections:
            notes.drop("a paper without sections, whose abstract nothing marks", repr(name))
            continue
        yield Structured(None, name, 1, sections, [lines[1:]])


def _sections(path: Path, name: str, encoding: str, notes: Notes) -> Iterator[Part]:
    text = whole_text(path, name, encoding, notes)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise InputError(f"{name!r}: XML with declarations of its own is not read", hint="remove its <!DOCTYPE …>")
    try:
        paper = ElementTree.fromstring(text)  # without declarations no entity can grow
    except ElementTree.ParseError as error:
        raise InputError(f"{name!r}: not XML ({error})") from error
    for section in paper.iter("SECTION"):
        if section.get("title", "").strip().lower() != "abstract":
            yield ["".join(sentence.itertext()) for sentence in section.iter("S")]


def scitldr(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """SciTLDR: JSON lines with ``source`` (sentences), ``target`` (summaries of one sentence) and ``paper_id``."""
    for record, place, name, number in records(paths, names, columns, notes):
        references = text_list(field_of(record, "target", place), "'target'", place)
        sentences = text_list(field_of(record, "source", place), "'source'", place)
        id_ = record.get("paper_id")
        yield Structured(
            id_ if isinstance(id_, str) else str(number), name, number, [sentences], [[r] for r in references]
        )


def presumm(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """PreSumm's tokenised JSON (CNN/DailyMail, NYT): a list of objects with ``src`` and ``tgt``, lists of lists of tokens."""
    for path, name in zip(paths, names, strict=True):
        for number, record in enumerate(json_list(path, name, columns.encoding, notes), 1):
            place = f"{name!r}, document {number}"
            source, target = (_joined(field_of(record, key, place), repr(key), place) for key in ("src", "tgt"))
            yield Structured(str(number), name, number, [source], [target])


def _joined(value: Any, what: str, place: str) -> list[str]:
    if not isinstance(value, list):
        raise InputError(f"{place}: {what} must be a list of lists of tokens, found {type(value).__name__}")
    return [" ".join(text_list(tokens, what, place)) for tokens in value]


def qmsum(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """QMSum: JSON lines with one meeting each.  A turn is a paragraph; the summary answers the first general query."""
    for record, place, name, number in records(paths, names, columns, notes):
        turns = _objects(field_of(record, "meeting_transcripts", place), "'meeting_transcripts'", place)
        queries = _objects(field_of(record, "general_query_list", place), "'general_query_list'", place)
        texts: list[Part] = [
            text for turn in turns for text in text_list(field_of(turn, "content", place), "'content'", place)
        ]
        answer = text_list(field_of(queries[0], "answer", place), "'answer'", place) if queries else []
        yield Structured(str(number), name, number, texts, [answer])


def _objects(value: Any, what: str, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InputError(f"{place}: {what} must be a list of objects")
    return value


def json_lines(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """JSON lines of any kind: text and summary are strings, or lists of sentences."""
    assert columns.summary_column is not None
    for record, place, name, number in records(paths, names, columns, notes):
        text = field_of(record, columns.text_column, place, "--text-column")
        summary = field_of(record, columns.summary_column, place, "--summary-column")
        parts = _paragraphs(text, columns, place)
        reference = text_list(summary if summary is not None else [], repr(columns.summary_column), place)
        yield Structured(own_id(record, columns, number, place), name, number, parts, [reference])


def unlabelled(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """Documents without summaries: JSON lines with a text each, or else a file for each text.

    A text is a string, whose paragraphs are parted by blank lines, or a list of sentences.
    """
    for path, name in zip(paths, names, strict=True):
        if format_of(name, None) == "jsonl":
            for record, place, _, number in records([path], [name], columns, notes):
                parts = _paragraphs(field_of(record, columns.text_column, place, "--text-column"), columns, place)
                yield Structured(own_id(record, columns, number, place), name, number, parts)
        else:
            yield Structured(None, name, 1, _paragraphs(whole_text(path, name, columns.encoding, notes), columns, name))


def _paragraphs(text: Any, columns: Columns, place: str) -> list[Part]:
    """A text as its paragraphs, or a list of sentences as one."""
    sentences = text_list(text if text is not None else [], repr(columns.text_column), place)
    if isinstance(text, str):
        return [part for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]
    return [sentences]


def own_id(record: dict[str, Any], columns: Columns, number: int, place: str) -> str:
    """The id of a record: of the column that was asked for, else the number of its line."""
    if columns.id_column is None:
        return str(number)
    value = field_of(record, columns.id_column, place, "--id-column")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{place}: {columns.id_column!r} must be a string or an integer, found {type(value).__name__}")
    return record_id(value)


def records(
    paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes
) -> Iterator[tuple[dict[str, Any], str, str, int]]:
    """The objects of files of JSON lines: each with its place, the name of its file and its line."""
    for path, name in zip(paths, names, strict=True):
        for number, line in open_lines(path, name, columns.encoding, notes):
            if not line.strip(" \t\n\r"):
                continue
            place = f"{name!r}, line {number}"
            record = parse_json(line, place)
            if not isinstance(record, dict):
                raise InputError(f"{place}: expected a JSON object, found {type(record).__name__}")
            yield record, place, name, number


def field_of(record: dict[str, Any], key: str, place: str, flag: str | None = None) -> Any:
    """A field of a record.

    Args:
        flag: the option that names the field, for the message.

    Raises:
        InputError: the record does not have it.
    """
    value = find_field(record, key)
    if value is MISSING:
        raise InputError(
            f"{place}: no field {key!r}; it has {short_list(record)}", hint=f"name it with {flag}" if flag else None
        )
    return value
