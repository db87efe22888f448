"""Finds sentences by their punctuation: one regular expression for all scripts, without lists of words.

A sentence ends behind a run of marks, together with the quotes and brackets that close right behind them, or behind one
space.  ``. ! ? …`` and Urdu's ``۔`` need white space behind them, so ``3.14`` and ``example.org/?q`` stay whole.  The marks
of other scripts (``। ። ։ ؟ ။ ។ 。 ！ ？``) do not, and neither do ``!`` and ``?`` before an ideograph or kana.

Where a mark usually does not end a sentence:

1. A full stop after a single letter (``J. R.``, ``z. B.``, ``т. е.``, ``د.``) other than a small vowel, which is a word
   in many languages; and after a dotted abbreviation, but not if it ends in a small letter (``U.S. Army``, ``5 p.m. | We``).
2. A full stop after a capital and one or two small letters, none of them a vowel: ``Mr.``, ``Dr.``, ``Sgt.``.
3. A full stop after a number of one or two digits that begins a sentence: ``1. First``.
4. Before a small letter: a full stop after a number, a dotted abbreviation or a word of up to three letters (``3. und``,
   ``i.e. the``, ``etc. and``); three dots; and a closing quote or bracket (``"Why?" he asked``).  Behind longer words, small
   letters do begin sentences on the web and in hasty news.
5. Before a digit: a full stop after a capitalised word of two or three letters: ``No. 5``, ``Jan. 3``.
6. Before hiragana: a closing bracket (``「はい。」と``).
7. Before another mark, a comma or a semicolon that stands alone, as in tokenised text: ``! ! !``, ``Fla. , March``.

So ordinals before a capital are split (``im 16. | Jahrhundert``), and scripts without marks, like Thai, are not.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence

Span = tuple[int, int]
"""Start and end in code points, end exclusive."""

_SPACED = ".!?…‼‽⁇⁈⁉⸮⸼۔"
"""Marks that end a sentence before white space."""

_FREE = "։؟܀-܂߹।॥။።፧፨។៕᙮᜵᜶᠃᠉᥄᥅᪨-᪫᭚᭛᭞᭟᰻᰼᱾᱿།༎꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝-꩟꫰꫱꯫。！？｡．﹒﹖﹗𑅁-𑅃"
"""Marks that end a sentence wherever they stand."""

_CLOSING = "\"')\\]}’”»›“‘«‹」』）】〕》〉｝］﹂﹄"
_VOWELS = "aeiouаеиоуыэюя"
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
    lower = f"[{''.join(filter(str.islower, cased))}]"
    vowel = f"[{''.join(c for c in cased if c.islower() and unicodedata.normalize('NFD', c)[0] in _VOWELS)}]"
    mark, free, closing = f"[{_SPACED}{_FREE}]", f"[{_FREE}]", f"[{_CLOSING}]"
    consonant = "[bcdfghjklmnpqrstvwxz]"
    start = r"(?<![^\s(\[“‘«/-])"
    never = [
        rf"{start}(?!{vowel}){letter}\.",
        rf"\.(?!{lower}){letter}\.",
        *(rf"{start}{consonant.upper()}{consonant * count}\." for count in (1, 2)),
        r"．(?=\d)",
        *(rf"{before}{digits}\." for before in (r"\A", r"[.!?:)]\s") for digits in (r"\d", r"\d\d")),
    ]
    before_lower = [r"\d\.", rf"\.{letter}\.", *(rf"{start}{word}\." for word in (r"\w", r"\w\w", r"\w\w\w"))]
    before_digit = [rf"{start}[A-Z]\w\.", rf"{start}[A-Z]\w\w\."]
    going_on = [rf"{closing}\s", r"…\s", r"\.\.\s"]
    return re.compile(
        # the first mark of a run, so that each run is read once
        rf"{mark}(?<!{mark}{mark})"
        + "".join(f"(?<!{shape})" for shape in never)
        + rf"(?!(?=\s++{lower})(?:{_after(before_lower)}))"
        + rf"(?!(?=\s++\d)(?:{_after(before_digit)}))"
        # an atomic group, since the possessive (…)?+ is wrong in Python 3.11.2
        + rf"{mark}*+(?:{closing}*+(?>(?:\s{closing}(?=\s))?)(?=\s)"
        + rf"|(?<={free}){closing}*+(?!(?<={closing})[ぁ-ゟ])|(?<=[!?])(?=[{_IDEOGRAPH}]))"
        + rf"(\s*+)(?=\S)(?!(?:{_after(going_on)}){lower})(?!(?:{mark}++|[,;،؛])(?:\s|\Z))"
    )


def _after(shapes: Sequence[str]) -> str:
    return "|".join(f"(?<={shape})" for shape in shapes)
