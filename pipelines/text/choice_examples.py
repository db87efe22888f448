"""Reads multiple-choice questions: DREAM, HellaSwag, ARC, and JSON lines of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.text.blocks import Notes
from pipelines.text.examples import Layout, Record, plain_value
from pipelines.text.readers import open_lines, whole_number
from pipelines.text.records import check_unicode, parse_json, quoted_rows


def read_dream(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    """The questions of DREAM (Sun et al. 2019): a list of ``[turns, questions, id]``; the answer is one of the choices."""
    text = "\n".join(line for _, line in open_lines(path, name, layout.encoding, notes))
    dialogues = parse_json(text, repr(name))
    number = 0
    for place, dialogue in ((f"{name!r}, dialogue {i}", d) for i, d in enumerate(dialogues, 1)):
        try:
            turns, questions, id_ = dialogue
            context = " ".join(turns)
            for count, question in enumerate(questions, 1):
                number += 1
                yield from _record(
                    number,
                    f"{place}, question {count}",
                    context,
                    question["question"],
                    question["choice"],
                    question.get("answer"),
                    f"{id_}-{count}",
                    notes,
                )
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise InputError(
                f"{place}: not a dialogue of DREAM ({error})", hint="--format jsonl reads other files"
            ) from error


def read_hellaswag(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    """Six lines for each task: the context, the number of the right ending from 0, and four endings."""
    lines = [line for _, line in open_lines(path, name, layout.encoding, notes)]
    while lines and not lines[-1].strip():
        lines.pop()
    for start in range(0, len(lines), 6):
        context, answer, *endings = lines[start : start + 6]
        place = f"{name!r}, line {start + 1}"
        right = whole_number(answer.strip())
        if len(endings) != 4 or right is None or not all(e.strip() for e in endings):
            raise InputError(
                f"{place}: expected a context, the number of an ending and four endings, found {answer[:40]!r} on its "
                "second line",
                hint="a line too many or too few shifts all that follow",
            )
        yield from _record(start // 6 + 1, place, context, "", endings, right, None, notes)


def read_arc(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    """Rows of a question, its choices and the answer key, a letter or a number from 1, without a header."""
    for number, row in quoted_rows(open_lines(path, name, layout.encoding, notes), name, ","):
        place = f"{name!r}, line {number}"
        if len(row) < 4:
            raise InputError(f"{place}: {len(row)} columns; expected a question, its choices and the answer key")
        question, *choices, key = row
        yield from _record(number, place, question, "", choices, _key(key), None, notes)


def read_own(path: Path, name: str, split: str, layout: Layout, notes: Notes) -> Iterator[Record]:
    """JSON lines with a list of choices; the label is a number from 0, a letter, or the text of the right choice."""
    assert layout.choices_column is not None
    for number, line in open_lines(path, name, layout.encoding, notes):
        if not line.strip():
            continue
        place = f"{name!r}, line {number}"
        record = parse_json(line, place)
        if not isinstance(record, dict):
            raise InputError(f"{place}: expected a JSON object, found {type(record).__name__}")
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
        yield from _record(number, place, context, question, choices, answer, own, notes)


def _key(key: str) -> int | None:
    """The number, from 0, of an answer key: a letter from A, or a number from 1; None if it is neither."""
    key = key.strip()
    if (number := whole_number(key)) is not None:
        return number - 1
    return ord(key.upper()) - ord("A") if len(key) == 1 and key.isalpha() else None


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
    """A question as a record, or nothing if its right choice is missing.

    Args:
        answer: the text of a choice or its number from 0; None if it is not known.
    """
    for text in (context, question, *choices, id_ or ""):
        check_unicode(text, "a text", place)
    kept = [place for place, choice in enumerate(choices) if choice.strip()]
    right = choices.index(answer) if isinstance(answer, str) and answer in choices else answer
    if answer is not None and right not in kept:
        notes.drop("a question whose right choice is missing", place)
        return
    if len(kept) < 2:
        notes.drop("a question with fewer than two choices", place)
        return
    if len(kept) < len(choices):
        notes.warn("a question has an empty choice, which is left out", place)
    options = tuple(f"{question} {choices[kept_place]}".strip() for kept_place in kept)
    label = None if right is None else str(kept.index(right))
    yield Record(number, place, None, label=label, id=id_, parts=(context or question, *options))
