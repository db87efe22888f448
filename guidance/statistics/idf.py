"""How rare words and tokens are: inverse document frequency, in nats.

A unit is a document or a sentence.  N is the number of units, df the number of units that contain the word, 1 ≤ df ≤ N.

Source: Wang et al. 2020, published code, which uses scikit-learn's ``TfidfVectorizer`` with its defaults: the formula
``smooth``, over lowercased runs of two or more letters, digits or underscores.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from guidance.errors import NumericalError, UnknownName
from guidance.statistics.words import word_forms

Frequencies = NDArray[np.int64]
Formula = Callable[[Frequencies, int, int], NDArray[np.float64]]
T = TypeVar("T", bound=Hashable)

FORMULAS: Mapping[str, Formula] = {
    "smooth": lambda df, units, most: np.log((1 + units) / (1 + df)) + 1,
    "plain": lambda df, units, most: np.log(units / df) + 1,
    "textbook": lambda df, units, most: np.log(units / df),
    "max": lambda df, units, most: np.log(most / df),
}
"""Formulas for idf from df, N and the largest df.  ``smooth`` and ``plain`` are scikit-learn's with and without
``smooth_idf``; ``textbook`` is Spärck Jones 1972; with ``max`` the most frequent word has 0."""

_RUN = re.compile(r"\w\w+")
_INNER = re.compile(r"['’\-]")


def counted_words(text: str) -> list[str]:
    """The words of a text whose document frequency is counted: lowercased runs of two or more letters, digits, underscores.

    In ASCII text these are the words of ``TfidfVectorizer``.  In other text combining marks belong to their letters, whereas
    ``TfidfVectorizer`` splits the words of most Indian scripts at them.

    Example:
        >>> counted_words("Don't ask a mother-in-law.")
        ['don', 'ask', 'mother', 'in', 'law']
    """
    if text.isascii() or all(map(_stands_alone, set(text))):
        return _RUN.findall(text.lower())
    parts = itertools.chain.from_iterable(map(_INNER.split, word_forms(text)))
    return [part for part in parts if len(part) > 1 and _RUN.match(part[0] * 2)]


@functools.cache
def _stands_alone(letter: str) -> bool:
    """False for marks and joiners, which belong to another letter, and for İ, which lowercases to a letter and a mark."""
    return unicodedata.category(letter)[0] != "M" and letter not in "\u200c\u200dİ"


def document_frequencies(parts: Iterable[tuple[object, Iterable[T]]]) -> Counter[T]:
    """The number of units that contain each word.

    Args:
        parts: (key of the unit, words); a unit may have several parts, which must be consecutive.

    Example:
        >>> document_frequencies([(0, "ab"), (0, "a"), (1, "bb")])
        Counter({'b': 2, 'a': 1})
    """
    frequencies: Counter[T] = Counter()
    for _, unit in itertools.groupby(parts, key=operator.itemgetter(0)):
        frequencies.update(set().union(*(words for _, words in unit)))
    return frequencies


def inverse_document_frequency(
    df: Frequencies, units: int, *, formula: str = "smooth", most: int | None = None
) -> NDArray[np.float64]:
    """The idf of words, in nats, from their document frequencies.

    Args:
        units: N.
        most: the largest df of all words; by default the largest of ``df``.
    """
    if formula not in FORMULAS:
        raise UnknownName("formula", formula, FORMULAS)
    if len(df) and not 1 <= df.min() <= df.max() <= units:
        raise NumericalError(f"document frequencies are from {df.min()} to {df.max()}, not from 1 to {units}")
    idf = FORMULAS[formula](df, units, int(df.max(initial=1)) if most is None else most)
    if not np.isfinite(idf).all():
        raise NumericalError(f"the formula {formula!r} gives an idf that is not finite")
    return idf
