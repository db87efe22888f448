"""What the lines of a plain text are: wrapped prose, one sentence each, or one token each with columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from guidance.errors import InputError
from pipelines.text.sentence_rules import split_sentences

SAMPLE = 1 << 16
"""Characters from the start of a file that are looked at."""

MOST_LINES = 200
FEWEST_LINES = 20
"""With fewer lines, a file is taken for prose."""

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_TAG = re.compile(r"O|[BIESLU]-\S+")


def beginning(raw: bytes, encoding: str) -> str:
    """The first `SAMPLE` characters of a text, or the whole of a shorter one.  ``raw`` holds its first 4 × `SAMPLE` bytes."""
    text = raw.decode(encoding, "ignore").removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")[:SAMPLE]


def has_sentence_lines(text: str, *, fewest: int = FEWEST_LINES) -> bool:
    """True if every line of a text, of which the beginning is given, seems to be one sentence.

    That is so if most lines end where a sentence ends, and hardly any line holds more than one; or if the text has no
    sentence marks at all.  If more than a fifth of the lines end inside a sentence, the text must also not look wrapped: in
    wrapped prose, the first word of most lines would not have fitted into the line before.

    Args:
        fewest: a text with fewer lines is taken for prose.  If it is below `FEWEST_LINES`, a text with fewer than those must have
            exactly one whole sentence in every line, since so few lines say little about the rest.
    """
    lines = _lines(text)
    if len(lines) < fewest:
        return False
    marks = any(mark in text for mark in (". ", "? ", "! "))
    if marks and sum(line[-1].isalnum() or line[-1] in ",;:-" for line in lines) > 0.5 * len(lines):
        return False  # a quick answer for most prose
    inner = sum(len(split_sentences(line)) - 1 for line in lines) / len(lines)
    ended = sum(any(end == len(line) for _, end in split_sentences(f"{line} A")) for line in lines) / len(lines)
    if len(lines) < FEWEST_LINES:
        return inner == 0 and ended == 1
    if ended > 0.8:
        return inner < 0.3
    return ((inner < 0.3 and ended > 0.5) or inner + ended < 0.05) and not _is_wrapped(lines)


def check_not_columns(text: str, name: str, hint: str = "") -> None:
    """Raise InputError if a text, of which the beginning is given, has one token with columns in each line (CoNLL).  ``hint``
    says what to do then; the default is for running text."""
    lines = [line for line in _lines(text) if not line.startswith("#")]
    is_tabbed = sum("\t" in line for line in lines) > 0.9 * len(lines)
    rows = [line.split("\t" if is_tabbed else " ") for line in lines]
    if len(rows) < FEWEST_LINES or not _BLANK_LINE.search(text.strip()):
        return
    width = len(rows[len(rows) // 2])
    fitting = [
        row
        for row in rows
        if len(row) == width and (not any(" " in cell for cell in row) if is_tabbed else _TAG.fullmatch(row[-1]))
    ]
    if width < 2 or len(fitting) < 0.9 * len(rows):
        return
    if not hint:
        if is_tabbed and width == 10:
            hint = "for CoNLL-U: --format conllu"
        else:
            column = "2" if is_tabbed and sum(row[0].isdecimal() for row in fitting) > 0.9 * len(fitting) else "1"
            hint = f"""write one sentence a line: awk 'NF {{printf "%s ", ${column}; next}} {{print ""}}' FILE > text.txt"""
        hint += "\nif it is text all the same: --format text"
    raise InputError(f"{name!r}: not running text: one token with {width} columns in each line (CoNLL)", hint=hint)


def _lines(text: str) -> list[str]:
    """Up to `MOST_LINES` lines that are not blank, stripped; without the last one if the text may be cut there."""
    lines = text.split("\n")
    if len(text) >= SAMPLE:
        lines = lines[:-1]
    return [line for line in map(str.strip, lines[: 4 * MOST_LINES]) if line][:MOST_LINES]


def _is_wrapped(lines: Sequence[str]) -> bool:
    """True if most lines are so long that the first word of the next would not have fitted in."""
    widest = max(map(len, lines))
    pairs = list(pairwise(lines))
    full = sum(len(line) + 1 + len(following.split(maxsplit=1)[0]) > widest for line, following in pairs)
    return full > 0.5 * len(pairs)
