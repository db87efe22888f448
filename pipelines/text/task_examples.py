"""Reads multiple-choice questions (DREAM, HellaSwag, ARC, JSON lines of one's own) and tagged words in CoNLL columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import Any

from guidance.errors import InputError, counted
from pipelines.text.blocks import Notes
from pipelines.text.examples import Layout, Record, plain_value
from pipelines.text.readers import TextFile, whole_number
from pipelines.text.records import check_unicode, json_objects, parse_json, quoted_rows

# multiple choice

EMPTY_CHOICE = "a question has an empty choice, which is left out"
"""A warning; the choices behind it then have other numbers."""


def read_dream(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    """The questions of DREAM (Sun et al. 2019): a list of ``[turns, questions, id]``; the answer is one of the choices."""
    text = "\n".join(line for _, line in file.lines())
    dialogues = parse_json(text, repr(file.name))
    if not isinstance(dialogues, list):
        raise InputError(
            f"{file.name!r}: not a list of dialogues, as DREAM has", hint="--format jsonl reads other files"
        )
    number = 0
    for place, dialogue in ((f"{file.name!r}, dialogue {i}", d) for i, d in enumerate(dialogues, 1)):
        try:
            turns, questions, id_ = dialogue
            context = " ".join(turns)
            for count, question in enumerate(questions, 1):
                number += 1
                own, choices, answer = question["question"], question["choice"], question.get("answer")
                of_question = f"{place}, question {count}"
                yield from _record(number, of_question, context, own, choices, answer, f"{id_}-{count}", file.notes)
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise InputError(
                f"{place}: not a dialogue of DREAM ({error})", hint="--format jsonl reads other files"
            ) from error


def read_hellaswag(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    """Six lines for each task: the context, the number of the right ending from 0, and four endings."""
    lines = [line for _, line in file.lines()]
    while lines and not lines[-1].strip():
        lines.pop()
    for start in range(0, len(lines), 6):
        context, *rest = lines[start : start + 6]
        answer, endings = rest[0] if rest else "", rest[1:]
        place = file.place(start + 1)
        right = whole_number(answer.strip())
        if len(endings) != 4 or right is None or not all(e.strip() for e in endings):
            raise InputError(
                f"{place}: expected a context, the number of an ending and four endings, found {answer[:40]!r} on its "
                "second line",
                hint="a line too many or too few shifts all that follow",
            )
        yield from _record(start // 6 + 1, place, context, "", endings, right, None, file.notes)


def read_arc(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    """Rows of a question, its choices and the answer key, a letter or a number from 1, without a header."""
    for number, row in quoted_rows(file.lines(), file.name, ","):
        place = file.place(number)
        if len(row) < 4:
            raise InputError(
                f"{place}: {counted(len(row), 'column')}; expected a question, its choices and the answer key"
            )
        question, *choices, key = row
        yield from _record(number, place, question, "", choices, _key(key), None, file.notes)


def read_own(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    """JSON lines with a list of choices; the label is a number from 0, a letter, or the text of the right choice."""
    assert layout.choices_column is not None
    for number, place, record in json_objects(file.lines(), file.name):
        label_column = layout.label_column or "label"
        for wanted, flag in ((layout.text_column, "--text-column"), (layout.choices_column, "--choices-column")):
            if wanted not in record:
                raise InputError(
                    f"{place}: no field {wanted!r}; it has {', '.join(record)}", hint=f"name it with {flag}"
                )
        choices = record[layout.choices_column]
        if not (isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices)):
            raise InputError(f"{place}: {layout.choices_column!r} must be a list of texts")
        answer = record.get(label_column)
        if isinstance(answer, str) and answer not in choices:
            number_given = whole_number(answer)
            answer = _key(answer) if number_given is None else number_given
        question_column = layout.question_column or "question"
        context = plain_value(record[layout.text_column], "text", layout.text_column, place) or ""
        question = plain_value(record.get(question_column), "question", question_column, place) or ""
        own = plain_value(record.get(layout.id_column), "id", layout.id_column, place) if layout.id_column else None
        yield from _record(number, place, context, question, choices, answer, own, file.notes)


def _key(key: str) -> int | None:
    """The number of the right choice, from 0, as an answer key says it: by a letter from A, or a number from 1.

    None stands for an empty key, and -1, which is no choice, for a key that cannot be read.
    """
    key = key.strip()
    if (number := whole_number(key)) is not None:
        return number - 1
    if not key:
        return None
    return ascii_uppercase.find(key.upper()) if len(key) == 1 else -1


def _record(
    number: int,
    place: str,
    context: str,
    question: str,
    choices: Sequence[str],
    answer: Any,
    id_: str | None,
    notes: Notes,
) -> Iterator[Record]:
    """A question as a record, or nothing if its right choice is missing.  The answer is the text of a choice or its number from
    0; None if it is not known."""
    for text in (context, question, *choices, id_ or ""):
        check_unicode(text, "a text", place)
    kept = [option for option, choice in enumerate(choices) if choice.strip()]
    right = choices.index(answer) if isinstance(answer, str) and answer in choices else answer
    if answer is not None and right not in kept:
        notes.drop("a question whose right choice is missing", place)
        return
    if len(kept) < 2:
        notes.drop("a question with fewer than two choices", place)
        return
    if len(kept) < len(choices):
        notes.warn(EMPTY_CHOICE, place)
    options = tuple(f"{question} {choices[option]}".strip() for option in kept)
    label = None if right is None else str(kept.index(right))
    yield Record(number, place, None, label=label, id=id_, parts=(context or question, *options))


# tagged words


_ABOUT = re.compile(r"#\s+(id\s|new(doc|par)\b|\w+\s*=)")
"""A line about the sentence that follows, as in MultiCoNER (``# id 7 domain=en``) and CoNLL-U (``# text = He ran``)."""


def read_conll(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    """The sentences of a file.  Columns are parted by tabs, or else by spaces; by default the first holds the word and the
    last its tag.  A test file with one column has no tags."""
    words, tags, begun = list[str](), list[str | None](), 0
    for number, line in itertools.chain(file.lines(), [(0, "")]):
        has_tabs = "\t" in line.strip()
        cells = [cell.strip() for cell in (line.rstrip("\r\n").split("\t") if has_tabs else line.split(" "))]
        if not any(cells) or cells[0] == "-DOCSTART-":
            yield from _tagged(words, tags, begun, file.place(begun), split, file.notes)
            words, tags = [], []
            continue
        place, column = file.place(number), layout.label_column
        if not words and _ABOUT.match(line):
            file.notes.warn("a line about a sentence, such as '# id 7', was left out", place)
            continue
        if has_tabs:  # an empty cell between two tabs is a column, and one at the end is none
            while not cells[-1]:
                cells.pop()
        else:
            cells = [cell for cell in cells if cell]
        begun = begun if words else number
        word = cells[0] if layout.text_column == "text" else _cell(cells, layout.text_column, "--text-column", place)
        words.append("".join(word.split()) or "_")
        tag = _cell(cells, column, "--label-column", place) if column else cells[-1] if len(cells) > 1 else None
        if tag and len(tag.split()) > 1:
            raise InputError(
                f"{place}: a tag with white space: {tag!r}", hint="write it in one piece, such as B-work_of_art"
            )
        tags.append(tag or None)


def read_words(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    """A sentence on each line, its words parted by white space; no tags."""
    for number, line in file.lines():
        if words := line.split():
            yield Record(number, file.place(number), None, parts=((" ".join(words),),))


def _cell(cells: Sequence[str], column: str, flag: str, place: str) -> str:
    """The cell in a column that is given by its number from 1."""
    number = whole_number(column) or 0
    if not 1 <= number <= len(cells):
        hint = f"{flag} takes a number from 1 to {len(cells)}"
        raise InputError(f"{place}: no column {column!r}; it has {len(cells)}", hint=hint)
    return cells[number - 1]


def _tagged(
    words: list[str], tags: list[str | None], number: int, place: str, split: str, notes: Notes
) -> Iterator[Record]:
    if not words:
        return
    missing = sum(tag is None for tag in tags)
    if missing and (missing < len(tags) or split != "test"):
        have = counted(missing, "has", "have", of=f"the {counted(len(words), 'word')} of this sentence")
        raise InputError(
            f"{place}: {have} no tag",
            hint="each line is a word, a tab or a space, and a tag; --text-column and --label-column choose columns",
        )
    label = None if missing else " ".join(str(tag) for tag in tags)
    if missing:
        notes.warn("a test file has no tags", place)
    yield Record(number, place, None, label=label, parts=((" ".join(words),),))
