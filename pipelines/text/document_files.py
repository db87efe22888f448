"""Readers of documents with reference summaries, and of documents that are divided into topic segments, here called sections.

What a document's abstract says never becomes part of its text.
"""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from typing import Any

from guidance.errors import InputError
from pipelines.text.blocks import BLOCK_LIMIT
from pipelines.text.examples import Layout
from pipelines.text.readers import TextFile, format_of, without_gzip
from pipelines.text.records import (
    MISSING,
    find_field,
    json_object,
    json_objects,
    parse_json,
    record_id,
    short_list,
    text_list,
)
from pipelines.text.structured import Part, Structured

_GOLD = ("scisummnet_human.txt", "gold.txt")
"""Endings of the names of ScisummNet's summaries, after the paper's id and a dot."""

_HEADING = re.compile(r"========,(\d+),(.*)")
_LIST = "***LIST***"
_PREFACE = "preface."
_DEEPEST = 2
"""Headings of deeper levels are left out, and what stands below them stays in the section around it."""

# summaries


def scisummnet(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """ScisummNet: for each paper ``ID.xml`` with its sections, and ``ID.scisummnet_human.txt`` or ``ID.gold.txt``.

    The first line of a summary is the title, which is left out, as are the title and the abstract of the paper.  Abstracts
    in files of their own are not read.
    """
    papers, summaries = dict[str, TextFile](), dict[str, TextFile]()
    for file in files:
        id_, _, rest = file.name.rpartition("/")[2].partition(".")
        rest = without_gzip(rest)
        if rest == "xml":
            papers[id_] = file
        elif rest in _GOLD:
            summaries[id_] = file
    if not papers:
        raise InputError("no paper of ScisummNet: no file is called ID.xml or ID.xml.gz", hint="give the folder")
    for id_, file in papers.items():
        if id_ not in summaries:
            file.notes.drop("no summary", repr(file.name))
            continue
        lines = [line for _, line in summaries[id_].lines() if line.strip()]
        sections = list(_sections(file))
        if not sections:
            file.notes.drop("a paper without sections, whose abstract nothing marks", repr(file.name))
            continue
        yield Structured(None, file.name, 1, sections, [lines[1:]])


def _sections(file: TextFile) -> Iterator[Part]:
    text = file.text()
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise InputError(f"{file.name!r}: XML with declarations of its own is not read", hint="remove its <!DOCTYPE …>")
    try:
        paper = ElementTree.fromstring(text)  # without declarations no entity can grow
    except ElementTree.ParseError as error:
        raise InputError(f"{file.name!r}: not XML ({error})") from error
    for section in paper.iter("SECTION"):
        if section.get("title", "").strip().lower() != "abstract":
            yield ["".join(sentence.itertext()) for sentence in section.iter("S")]


def scitldr(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """SciTLDR: JSON lines with ``source`` (sentences), ``target`` (summaries of one sentence) and ``paper_id``."""
    for record, place, name, number in _json_lines(files):
        references = text_list(_field(record, "target", place), "'target'", place)
        sentences = text_list(_field(record, "source", place), "'source'", place)
        id_ = record.get("paper_id")
        yield Structured(
            id_ if isinstance(id_, str) else str(number), name, number, [sentences], [[r] for r in references]
        )


def presumm(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """PreSumm's tokenised JSON (CNN/DailyMail, NYT): a list of objects with ``src`` and ``tgt``, lists of lists of tokens."""
    for file in files:
        for number, place, record in _json_list(file):
            source, target = (_joined(_field(record, key, place), repr(key), place) for key in ("src", "tgt"))
            yield Structured(str(number), file.name, number, [source], [target], unit="document")


def _joined(value: Any, what: str, place: str) -> list[str]:
    if not isinstance(value, list):
        raise InputError(f"{place}: {what} must be a list of lists of tokens, found {type(value).__name__}")
    return [" ".join(text_list(tokens, what, place)) for tokens in value]


def qmsum(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """QMSum: JSON lines with one meeting each.  A turn is a paragraph; the summary answers the first general query."""
    for record, place, name, number in _json_lines(files):
        turns = _objects(_field(record, "meeting_transcripts", place), "'meeting_transcripts'", place)
        queries = _objects(_field(record, "general_query_list", place), "'general_query_list'", place)
        texts: list[Part] = [
            text for turn in turns for text in text_list(_field(turn, "content", place), "'content'", place)
        ]
        answer = text_list(_field(queries[0], "answer", place), "'answer'", place) if queries else []
        yield Structured(str(number), name, number, texts, [answer])


def _objects(value: Any, what: str, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InputError(f"{place}: {what} must be a list of objects")
    return value


def summarized(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """JSON lines of any kind: text and summary are strings, or lists of sentences."""
    assert layout.summary_column is not None
    for record, place, name, number in _json_lines(files):
        text = _field(record, layout.text_column, place, "--text-column")
        summary = _field(record, layout.summary_column, place, "--summary-column")
        parts = _paragraphs(text, layout, place)
        reference = text_list(summary if summary is not None else [], repr(layout.summary_column), place)
        yield Structured(_own_id(record, layout, number, place), name, number, parts, [reference])


def unlabelled(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """Documents without summaries: JSON lines with a text each, or else a file for each text.

    A text is a string, whose paragraphs are parted by blank lines, or a list of sentences.
    """
    for file in files:
        name = file.name
        if format_of(name) == "jsonl":
            for record, place, _, number in _json_lines([file]):
                parts = _paragraphs(_field(record, layout.text_column, place, "--text-column"), layout, place)
                yield Structured(_own_id(record, layout, number, place), name, number, parts)
        else:
            yield Structured(None, name, 1, _paragraphs(file.text(), layout, name))


def _paragraphs(text: Any, layout: Layout, place: str) -> list[Part]:
    """A text as its paragraphs, or a list of sentences as one."""
    sentences = text_list(text if text is not None else [], repr(layout.text_column), place)
    if isinstance(text, str):
        return [part for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]
    return [sentences]


# sections


def choi(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """Text with one sentence on a line and a separator line between sections, perhaps also first and last.

    A file is a document.  Choi's documents, Wiki-300, the clinical books and the manifestos come so.  Raises InputError for a long
    file without separators, which would be divided where no section ends.
    """
    for file in files:
        sections: list[Part] = [[]]
        for _, line in file.lines():
            if line.strip() == layout.separator:
                sections.append([])
            elif line.strip():
                sections[-1].append(line)  # type: ignore[union-attr]
        if len(sections) == 1 and sum(map(len, sections[0])) > BLOCK_LIMIT:
            raise InputError(
                f"{file.name!r}: no line is {layout.separator!r}, which parts sections, in more than {BLOCK_LIMIT:,} characters",
                hint="--separator names another line",
            )
        yield Structured(None, file.name, 1, [section for section in sections if section])


def wiki_727k(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """Wiki-727K: a heading is a line ``========,level,title.``, and every other line is a sentence.

    The preface and the marks that stand for lists are left out.  A heading of level 1 or 2 begins a section.
    """
    for file in files:
        sections: list[list[str]] = []
        in_preface = False
        for number, line in file.lines():
            heading = _HEADING.match(line)
            if heading is None:
                if line.startswith("========"):
                    raise InputError(
                        f"{file.place(number)}: not a heading of Wiki-727K, which is ========,level,title",
                        hint="for lines without level and title: --format choi",
                    )
                if sections and not in_preface and line.strip() and not line.startswith(_LIST):
                    sections[-1].append(line)
                continue
            level, title = int(heading[1]), heading[2].strip().lower()
            if level <= _DEEPEST:
                in_preface = title == _PREFACE
                sections += [] if in_preface else [[]]
        yield Structured(None, file.name, 1, [section for section in sections if section])


def wikisection(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """WikiSection: a JSON list of objects with ``id``, ``text`` and ``annotations``, each with ``begin`` and ``length``."""
    for file in files:
        for number, place, record in _json_list(file):
            (text,) = text_list(_field(record, "text", place), "'text'", place)[:1] or [""]
            spans = _spans(_field(record, "annotations", place), len(text), place)
            id_ = number if record.get("id") is None else record["id"]
            sections = [text[start:end] for start, end in spans]
            yield Structured(str(id_), file.name, number, sections, unit="document")


def _spans(annotations: Any, size: int, place: str) -> list[tuple[int, int]]:
    """The start and end of each section, in order; they must be inside the text and apart from each other."""
    spans = []
    for annotation in annotations if isinstance(annotations, list) else [None]:
        fields = annotation if isinstance(annotation, dict) else {}
        begin, length = fields.get("begin"), fields.get("length")
        if not (isinstance(begin, int) and isinstance(length, int) and 0 <= begin <= begin + length <= size):
            raise InputError(f"{place}: 'annotations' must be objects with 'begin' and 'length' inside the text")
        spans.append((begin, begin + length))
    spans.sort()
    for before, after in itertools.pairwise(spans):
        if after[0] < before[1]:
            raise InputError(f"{place}: two annotations overlap, at character {after[0]:,}")
    return spans


def sectioned(files: Sequence[TextFile], layout: Layout) -> Iterator[Structured]:
    """JSON lines of any kind: the sections are a list of texts, or of lists of sentences; one text is one section."""
    assert layout.sections_column is not None
    for record, place, name, number in _json_lines(files):
        sections = _field(record, layout.sections_column, place, "--sections-column")
        what = repr(layout.sections_column)
        sections = [sections] if isinstance(sections, str) else sections
        if not isinstance(sections, list):
            raise InputError(f"{place}: {what} must be a list of sections, found {type(sections).__name__}")
        parts: list[Part] = []
        for section in sections:
            texts = text_list(section, what, place)
            parts.append(section if isinstance(section, str) else texts)
        yield Structured(_own_id(record, layout, number, place), name, number, parts)


# both


def _json_list(file: TextFile) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The objects of a file that is one JSON list: each with its number and its place."""
    value = parse_json(file.text().strip(), repr(file.name))
    if not isinstance(value, list):
        raise InputError(f"{file.name!r}: expected a JSON list of documents, found {type(value).__name__}")
    for number, entry in enumerate(value, 1):
        place = f"{file.name!r}, document {number}"
        yield number, place, json_object(entry, place)


def _json_lines(files: Sequence[TextFile]) -> Iterator[tuple[dict[str, Any], str, str, int]]:
    """The objects of files of JSON lines: each with its place, the name of its file and its line."""
    return (
        (record, place, file.name, number)
        for file in files
        for number, place, record in json_objects(file.lines(), file.name)
    )


def _own_id(record: dict[str, Any], layout: Layout, number: int, place: str) -> str:
    """The id of a record: of the column that was asked for, else the number of its line."""
    if layout.id_column is None:
        return str(number)
    value = _field(record, layout.id_column, place, "--id-column")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{place}: {layout.id_column!r} must be a string or an integer, found {type(value).__name__}")
    return record_id(value)


def _field(record: dict[str, Any], key: str, place: str, flag: str | None = None) -> Any:
    """A field that a record must have; ``flag`` is the option that names it."""
    value = find_field(record, key)
    if value is MISSING:
        hint = f"name it with {flag}" if flag else None
        raise InputError(f"{place}: no field {key!r}; it has {short_list(record)}", hint=hint)
    return value
