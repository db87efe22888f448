"""Readers of documents that are divided into topic segments, here called sections."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.text.blocks import Notes
from pipelines.text.readers import open_lines
from pipelines.text.structured import Columns, Part, Structured, json_list, text_list
from pipelines.text.summary_files import field_of, own_id, records

_HEADING = re.compile(r"========,(\d+),(.*)")
_LIST = "***LIST***"
_PREFACE = "preface."
_DEEPEST = 2
"""Headings of deeper levels are left out, and what stands below them stays in the section around it."""


def choi(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """Text with one sentence on a line and a separator line between sections, perhaps also first and last.

    A file is a document.  Choi's documents, Wiki-300, the clinical books and the manifestos come so.
    """
    for path, name in zip(paths, names, strict=True):
        sections: list[Part] = [[]]
        for _, line in open_lines(path, name, columns.encoding, notes):
            if line.strip() == columns.separator:
                sections.append([])
            elif line.strip():
                sections[-1].append(line)  # type: ignore[union-attr]
        yield Structured(None, name, 1, [section for section in sections if section])


def wiki_727k(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """Wiki-727K: a heading is a line ``========,level,title.``, and every other line is a sentence.

    The preface and the marks that stand for lists are left out.  A heading of level 1 or 2 begins a section.
    """
    for path, name in zip(paths, names, strict=True):
        sections: list[list[str]] = []
        in_preface = False
        for number, line in open_lines(path, name, columns.encoding, notes):
            heading = _HEADING.match(line)
            if heading is None:
                if line.startswith("========"):
                    raise InputError(
                        f"{name!r}, line {number}: not a heading of Wiki-727K, which is ========,level,title",
                        hint="for lines without level and title: --format choi",
                    )
                if sections and not in_preface and line.strip() and not line.startswith(_LIST):
                    sections[-1].append(line)
                continue
            level, title = int(heading[1]), heading[2].strip().lower()
            if level <= _DEEPEST:
                in_preface = title == _PREFACE
                sections += [] if in_preface else [[]]
        yield Structured(None, name, 1, [section for section in sections if section])


def wikisection(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """WikiSection: a JSON list of objects with ``id``, ``text`` and ``annotations``, each with ``begin`` and ``length``."""
    for path, name in zip(paths, names, strict=True):
        for number, record in enumerate(json_list(path, name, columns.encoding, notes), 1):
            place = f"{name!r}, document {number}"
            (text,) = text_list(field_of(record, "text", place), "'text'", place)[:1] or [""]
            spans = _spans(field_of(record, "annotations", place), len(text), place)
            yield Structured(str(record.get("id", number)), name, number, [text[start:end] for start, end in spans])


def _spans(annotations: Any, size: int, place: str) -> list[tuple[int, int]]:
    """The start and end of each section, in order.

    Raises:
        InputError: a span is none, leaves the text, or begins inside another.
    """
    found = []
    for annotation in annotations if isinstance(annotations, list) else [None]:
        given = annotation if isinstance(annotation, dict) else {}
        begin, length = given.get("begin"), given.get("length")
        if not (isinstance(begin, int) and isinstance(length, int) and 0 <= begin <= begin + length <= size):
            raise InputError(f"{place}: 'annotations' must be objects with 'begin' and 'length' inside the text")
        found.append((begin, begin + length))
    found.sort()
    for before, after in itertools.pairwise(found):
        if after[0] < before[1]:
            raise InputError(f"{place}: two annotations overlap, at character {after[0]:,}")
    return found


def json_lines(paths: Sequence[Path], names: Sequence[str], columns: Columns, notes: Notes) -> Iterator[Structured]:
    """JSON lines of any kind: the sections are a list of texts, or of lists of sentences; one text is one section."""
    assert columns.sections_column is not None
    for record, place, name, number in records(paths, names, columns, notes):
        sections = field_of(record, columns.sections_column, place, "--sections-column")
        what = repr(columns.sections_column)
        sections = [sections] if isinstance(sections, str) else sections
        if not isinstance(sections, list):
            raise InputError(f"{place}: {what} must be a list of sections, found {type(sections).__name__}")
        parts: list[Part] = []
        for section in sections:
            texts = text_list(section, what, place)
            parts.append(section if isinstance(section, str) else texts)
        yield Structured(own_id(record, columns, number, place), name, number, parts)
