"""Finds sentences by their punctuation: one regular expression for all scripts, without lists of words.

A sentence ends behind a run of marks, together with the quotes and brackets that close right behind them, or behind one
space.  ``. ! ? …`` and Urdu's ``۔`` need white space behind them, so ``3.14`` and ``example.org/?q`` stay whole.  The marks
of other scripts (``। ። ։ ؟ ။ ។ 。 ！ ？``) do not, and neither do ``!`` and ``?`` before an ideograph or kana.

Where a mark usually does not end a sentence:

1. A full stop after one letter: ``J. R.``, ``z. B.``, ``т. е.``, ``د.``.  After a dotted abbreviation only if a capital,
   or a letter of a script without capitals, precedes it: ``U.S. Army``, but ``at 5 p.m. | We``.
2. A full stop after a capital and one to three small letters, none of them a vowel: ``Mr.``, ``Dr.``, ``Sgt.``.
3. A full stop after a number of one or two digits that begins a sentence: ``1. First``.
4. Before a lower-case letter: a full stop after a number, a dotted abbreviation, capitals, or a word of two or three
   letters (``3. und``, ``i.e. the``, ``XIV. von``, ``etc. and``); three dots; and a closing quote or bracket
   (``"Why?" he asked``).  Other lower-case letters do begin sentences, as people write on the web.
5. Before a digit: a full stop after a capitalised word of two or three letters: ``No. 5``, ``Jan. 3``.
6. Before hiragana: a closing bracket (``「はい。」と``).
7. Before another mark that stands alone: ``Wow ! ! !``.

So ordinals before a capital (``im 16. | Jahrhundert``) are split, and scripts without marks, like Thai, are not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

Span = tuple[int, int]
"""Start and end in code points, end exclusive."""

_SPACED = ".!?…‼‽⁇⁈⁉⸮⸼۔"
"""Marks that end a sentence before white space."""

_FREE = "։؟܀-܂߹।॥။።፧፨។៕᙮᜵᜶᠃᠉᥄᥅᪨-᪫᭚᭛᭞᭟᰻᰼᱾᱿།༎꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝-꩟꫰꫱꯫。！？｡．﹒﹖﹗𑅁-𑅃"
"""Marks that end a sentence wherever they stand."""

_CLOSING = "\"')\\]}’”»›“‘«‹」』）】〕》〉｝］﹂﹄"
_IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff"


def split_sentences(text: str) -> list[Span]:
    """The spans of the sentences of a text, without white space at their ends; together they hold all other characters.

    Takes linear time.  A text of white space has no sentences; one without marks is one sentence.
    """
    last = len(text.rstrip())
    first = len(text) - len(text.lstrip())
    if first >= last:
        return []
    gaps = [match.span(1) for match in _gaps().finditer(text, first, last)]
    if not gaps:
        return [(first, last)]
    ends, starts = zip(*gaps, strict=True)
    return list(zip((first, *starts), (*ends, last), strict=True))


@functools.cache
def _gaps() -> re.Pattern[str]:
    """Matches where a sentence ends; its group is the white space up to the next sentence."""
    # without capitals: ideographs, kana, Hangul
    letter = r"[^\W\d_\u2e80-\U0010ffff]"
    cased = [chr(code) for block in (range(0x41, 0x590), range(0x1E00, 0x2000)) for code in block]
    upper = f"[{''.join(filter(str.isupper, cased))}]"
    lower = f"[{''.join(filter(str.islower, cased))}]"
    mark, free, closing = f"[{_SPACED}{_FREE}]", f"[{_FREE}]", f"[{_CLOSING}]"
    consonant = "[bcdfghjklmnpqrstvwxz]"
    start = r"(?<![^\s(\[“‘«/-])"
    never = [
        rf"{start}{letter}\.",
        rf"\.(?!{lower}){letter}\.",
        *(rf"{start}{consonant.upper()}{consonant * count}\." for count in (1, 2, 3)),
        *(rf"{before}{digits}\." for before in (r"\A", r"[.!?:)]\s") for digits in (r"\d", r"\d\d")),
    ]
    before_lower = [r"\d\.", rf"\.{letter}\.", rf"{upper}{upper}\.", rf"{start}\w\w\.", rf"{start}\w\w\w\."]
    before_digit = [rf"{start}[A-Z]\w\.", rf"{start}[A-Z]\w\w\."]
    inside_quote = [rf"{closing}\s", r"…\s", r"\.\.\s", r"\.\s\.\s"]
    return re.compile(
        # the first mark of a run, so that each run is read once
        rf"{mark}(?<!{mark}{mark})"
        + "".join(f"(?<!{shape})" for shape in never)
        + rf"(?!(?=\s++{lower})(?:{_after(before_lower)}))"
        + rf"(?!(?=\s++\d)(?:{_after(before_digit)}))"
        + rf"{mark}*+(?:{closing}*+(?:\s{closing}(?=\s))?+(?=\s)"
        + rf"|(?<={free}){closing}*+(?!(?<={closing})[ぁ-ゟ])|(?<=[!?])(?=[{_IDEOGRAPH}]))"
        + rf"(\s*+)(?=\S)(?!(?:{_after(inside_quote)}){lower})(?!{mark}++(?:\s|\Z))"
    )


def _after(shapes: Sequence[str]) -> str:
    return "|".join(f"(?<={shape})" for shape in shapes)
