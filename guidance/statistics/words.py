"""Splits text of any language into words without a parser; all statistics use this.

A word is a run of letters, digits and underscores with their combining marks; apostrophes and hyphens between two letters
belong to it (``don't``, ``mother-in-law``).  Every other character except white space is a word, with its marks.
Characters connected by a joiner are one word (a family emoji).
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator

_JOINERS = "\u200c\u200d"
_SKIN_TONES = "\U0001f3fb-\U0001f3ff"
_SIMPLE = re.compile(r"\w+(?:['\-]\w+)*|[^\w\s]")


def _pattern(text: str) -> re.Pattern[str]:
    return _SIMPLE if text.isascii() else _with_marks()


@functools.cache
def _with_marks() -> re.Pattern[str]:
    # `\w` lacks combining marks, so it would split the words of most Indian scripts at their vowels
    marks = f"{''.join(_ranges())}{_JOINERS}{_SKIN_TONES}"
    letters = rf"\w[\w{marks}]*"
    other = rf"[^\w\s][{marks}]*"
    return re.compile(rf"{letters}(?:['’\-]{letters})*|{other}(?:(?<=\u200d){other})*")


def _ranges() -> Iterator[str]:
    """The combining marks of Unicode, as ranges for a character class."""
    first = None
    for code in range(0x300, sys.maxunicode + 2):
        is_mark = code <= sys.maxunicode and unicodedata.category(chr(code))[0] == "M"
        if is_mark and first is None:
            first = code
        elif not is_mark and first is not None:
            yield f"{chr(first)}-{chr(code - 1)}"
            first = None


def word_spans(text: str) -> list[tuple[int, int]]:
    """The start and end of each word of a text, in code points, end exclusive.

    Example:
        >>> word_spans("It's 3.5!")
        [(0, 4), (5, 6), (6, 7), (7, 8), (8, 9)]
    """
    return [match.span() for match in _pattern(text).finditer(text)]


def word_forms(text: str) -> list[str]:
    """The words of a text, lowercased."""
    return [form.lower() for form in _pattern(text).findall(text)]


def is_candidate(form: str) -> bool:
    """Whether a word can count as rare: it has at least two characters, one of them a letter.

    Source: Wang et al. 2020, published code, which excludes single characters and numbers and gives punctuation no idf.
    """
    return len(form) > 1 and any(map(str.isalpha, form))
