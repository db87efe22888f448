"""Document frequencies and idf, compared with plain loops, written-out formulas and scikit-learn."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from guidance.errors import NumericalError, UnknownName
from guidance.statistics.idf import FORMULAS, counted_words, document_frequencies, inverse_document_frequency

TEXTS = [
    "The cat sat. The CAT ran!",
    "A dog, a cat; 3.14 and 42.",
    "Don't ask my mother-in-law: she_knows it's x.",
    "",
    "... !!! a b c",
    "Ünder dem Straßenbaum, ÄRGER — naïve café’s “quotes”",
    "Привет мир, привет",
    "日本語 テキスト です",
]


def test_counted_words_are_those_of_scikit_learn() -> None:
    analyse = pytest.importorskip("sklearn.feature_extraction.text").TfidfVectorizer().build_analyzer()
    for text in TEXTS:
        assert counted_words(text) == analyse(text)


@pytest.mark.parametrize("smooth", [True, False])
def test_idf_is_that_of_scikit_learn(smooth: bool) -> None:
    texts = [text for text in TEXTS if text]
    vectorizer = pytest.importorskip("sklearn.feature_extraction.text").TfidfVectorizer(smooth_idf=smooth).fit(texts)
    found = document_frequencies((n, counted_words(text)) for n, text in enumerate(texts))
    words = vectorizer.get_feature_names_out().tolist()
    assert words == sorted(found)
    df = np.array([found[word] for word in words])
    ours = inverse_document_frequency(df, len(texts), formula="smooth" if smooth else "plain")
    np.testing.assert_allclose(ours, vectorizer.idf_, rtol=1e-12)


def test_combining_marks_belong_to_their_letters() -> None:
    assert counted_words("हिन्दी भाषा") == ["हिन्दी", "भाषा"]
    assert counted_words("cafe\u0301 e\u0301") == ["cafe\u0301", "e\u0301"]
    assert counted_words("👩‍👩‍👧 ok") == ["ok"]


def test_a_unit_in_several_parts_counts_once() -> None:
    whole = [(0, ["a", "b", "a"]), (1, ["b", "c"]), (2, []), (3, ["a"])]
    expected: Counter[str] = Counter()
    for _, words in whole:
        for word in dict.fromkeys(words):
            expected[word] += 1
    assert document_frequencies(whole) == expected
    assert document_frequencies((key, [word]) for key, words in whole for word in words) == expected
    assert document_frequencies([]) == {}


def test_formulas_match_their_definitions() -> None:
    written = {
        "smooth": lambda n: math.log((1 + 10) / (1 + n)) + 1,
        "plain": lambda n: math.log(10 / n) + 1,
        "textbook": lambda n: math.log(10 / n),
        "max": lambda n: math.log(7 / n),
    }
    assert written.keys() == FORMULAS.keys()
    for name, formula in written.items():
        found = inverse_document_frequency(np.array([1, 3, 7]), 10, formula=name)
        np.testing.assert_allclose(found, [formula(n) for n in (1, 3, 7)], rtol=1e-14)
        parts = [inverse_document_frequency(np.array([n]), 10, formula=name, most=7) for n in (1, 3, 7)]
        assert np.concatenate(parts).tobytes() == found.tobytes()


@pytest.mark.parametrize("formula", FORMULAS)
def test_idf_falls_with_the_frequency_and_is_finite_for_extremes(formula: str) -> None:
    for units in (1, 2, 10**12):
        df = np.unique(np.array([1, max(1, units // 2), units]))
        idf = inverse_document_frequency(df, units, formula=formula)
        assert np.isfinite(idf).all()
        assert (idf >= 0).all()
        assert (np.diff(idf) < 0).all()


@pytest.mark.parametrize("df", [[0], [-1], [11], [1, 2**40]])
def test_impossible_frequencies_are_refused(df: list[int]) -> None:
    with pytest.raises(NumericalError, match="not from 1 to 10"):
        inverse_document_frequency(np.array(df), 10)


def test_unknown_formula_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'smooth'"):
        inverse_document_frequency(np.array([1]), 1, formula="smoth")


def test_no_words_give_an_empty_idf() -> None:
    for formula in FORMULAS:
        assert inverse_document_frequency(np.array([], np.int64), 0, formula=formula).tolist() == []
