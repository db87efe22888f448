"""How rare words and tokens are: inverse document frequency, in nats.

A unit is what counts a word once, however often the word stands in it: a document, or a sentence.  N is the number of
units, df the number of those that hold the word, 1 ≤ df ≤ N.

Source: Wang et al. 2020, published code, which takes scikit-learn's ``TfidfVectorizer`` with its defaults: the formula
``smooth``, over runs of two or more letters, digits or underscores, in small letters.
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

__all__ = ["FORMULAS", "counted_words", "document_frequencies", "inverse_document_frequency"]

Frequencies = NDArray[np.int64]
Formula = Callable[[Frequencies, int, int], NDArray[np.float64]]
T = TypeVar("T", bound=Hashable)

FORMULAS: Mapping[str, Formula] = {
    "smooth": lambda df, units, most: np.log((1 + units) / (1 + df)) + 1,
    "plain": lambda df, units, most: np.log(units / df) + 1,
    "textbook": lambda df, units, most: np.log(units / df),
    "max": lambda df, units, most: np.log(most / df),
}
"""From df, N and the largest df to idf.  ``smooth`` and ``plain`` are scikit-learn's with and without ``smooth_idf``;
``textbook`` is Spärck Jones 1972; in ``max`` the most frequent word has 0."""

_RUN = re.compile(r"\w\w+")
_INNER = re.compile(r"['’\-]")


def counted_words(text: str) -> list[str]:
    """The words of a text that have a document frequency: runs of two or more letters, digits and underscores.

    In ASCII they are what ``TfidfVectorizer`` counts.  Elsewhere marks belong to the letters that they stand on, where
    that cuts the words of most Indian scripts to pieces.

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
    """Not for marks and joiners, which belong to another letter, nor for what is a letter and a mark in small."""
    return unicodedata.category(letter)[0] != "M" and letter not in "\u200c\u200dİ"


def document_frequencies(parts: Iterable[tuple[object, Iterable[T]]]) -> Counter[T]:
    """In how many units each word is.

    Args:
        parts: of each unit its key and its words, in any number of parts that follow one another.

    Example:
        >>> document_frequencies([(0, "ab"), (0, "a"), (1, "bb")])
        Counter({'b': 2, 'a': 1})
    """
    found: Counter[T] = Counter()
    for _, unit in itertools.groupby(parts, key=operator.itemgetter(0)):
        found.update(set().union(*(words for _, words in unit)))
    return found


def inverse_document_frequency(
    df: Frequencies, units: int, *, formula: str = "smooth", most: int | None = None
) -> NDArray[np.float64]:
    """The idf of words, in nats, from their document frequencies.

    Args:
        units: N.
        most: the largest df of all words; that of ``df`` when these are all.

    Raises:
        UnknownName: no such formula.
        NumericalError: a df is not between 1 and N.
    """
    if formula not in FORMULAS:
        raise UnknownName("formula", formula, FORMULAS)
    if len(df) and not 1 <= df.min() <= df.max() <= units:
        raise NumericalError(f"document frequencies from {df.min()} to {df.max()} in {units} documents")
    idf = FORMULAS[formula](df, units, int(df.max(initial=1)) if most is None else most)
    if not np.isfinite(idf).all():
        raise NumericalError(f"idf by the formula {formula!r} is not finite")
    return idf
