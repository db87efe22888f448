"""Reads tagged words in CoNLL columns: a word and its tag on each line, and a blank line between sentences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from guidance.errors import InputError
from pipelines.text.blocks import Notes
from pipelines.text.examples import Layout, Record
from pipelines.text.readers import open_lines, whole_number


def read_conll(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    """The sentences of a file.  Columns are parted by tabs, or else by spaces; by default the first holds the word and the
    last its tag.  A test file with one column has no tags.

    Raises:
        InputError: a line lacks a column, or some words of a sentence have no tag.
    """
    words: list[str] = []
    tags: list[str | None] = []
    begun, number = 0, 0
    for number, line in open_lines(path, name, layout.encoding, notes):
        cells = line.rstrip("\r\n").split("\t") if "\t" in line.strip() else line.split(" ")
        cells = [cell.strip() for cell in cells]
        if not any(cells) or cells[0] == "-DOCSTART-":
            yield from _sentence(words, tags, begun, f"{name!r}, line {begun}", split, notes)
            words, tags = [], []
            continue
        cells = [cell for cell in cells if cell]
        begun = begun if words else number
        place = f"{name!r}, line {number}"
        word = cells[_column(layout.text_column, "text", 0, len(cells), place, "--text-column")]
        words.append("".join(word.split()) or "_")
        has_tag = len(cells) > 1 or layout.label_column is not None
        tags.append(
            cells[_column(layout.label_column, None, -1, len(cells), place, "--label-column")] if has_tag else None
        )
    yield from _sentence(words, tags, begun, f"{name!r}, line {begun}", split, notes)


def read_words(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    """A sentence on each line, its words parted by white space; no tags."""
    for number, line in open_lines(path, name, layout.encoding, notes):
        if words := line.split():
            yield Record(number, f"{name!r}, line {number}", None, parts=((" ".join(words),),))


def _column(given: str | None, default: str | None, place: int, width: int, where: str, flag: str) -> int:
    """The number of a column from 0."""
    if given in (None, default):
        return place
    assert given is not None
    number = whole_number(given) or 0
    if not 1 <= number <= width:
        raise InputError(
            f"{where}: no column {given!r}; it has {width}", hint=f"{flag} takes a number from 1 to {width}"
        )
    return number - 1


def _sentence(
    words: list[str], tags: list[str | None], number: int, place: str, split: str, notes: Notes
) -> Iterator[Record]:
    if not words:
        return
    missing = sum(tag is None for tag in tags)
    if missing and (missing < len(tags) or split != "test"):
        raise InputError(
            f"{place}: {missing} of the {len(words)} words of this sentence have no tag",
            hint="each line is a word, a tab or a space, and a tag; --text-column and --label-column choose columns",
        )
    label = None if missing else " ".join(str(tag) for tag in tags)
    if missing:
        notes.warn("a test file has no tags", place)
    yield Record(number, place, None, label=label, parts=((" ".join(words),),))
