"""Words without a parser, in many scripts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guidance.statistics.words import is_candidate, word_forms, word_spans


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop!", ["don't", "stop", "!"]),
        ("l’été, mother-in-law's", ["l’été", ",", "mother-in-law's"]),
        ("- 'quoted' a- -b", ["-", "'", "quoted", "'", "a", "-", "-", "b"]),
        ("3.5 a_b", ["3", ".", "5", "a_b"]),
        ("हिन्दी क्षत्रिय", ["हिन्दी", "क्षत्रिय"]),
        ("cafe\u0301s", ["cafe\u0301s"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("ok👍🏽 👩‍👩‍👧‍👦 1️⃣", ["ok", "👍🏽", "👩‍👩‍👧‍👦", "1️⃣"]),
        ("አማርኛ።", ["አማርኛ", "።"]),
        ("", []),
        (" \t\n\u3000", []),
    ],
)
def test_words_in_many_scripts(text: str, words: list[str]) -> None:
    assert word_forms(text) == words


@given(st.text())
def test_words_are_in_order_and_leave_out_only_white_space(text: str) -> None:
    spans = word_spans(text)
    assert [text[start:end].lower() for start, end in spans] == word_forms(text)
    assert all(start < end for start, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    covered = {place for start, end in spans for place in range(start, end)}
    assert all(letter.isspace() == (place not in covered) for place, letter in enumerate(text))


@given(st.text(alphabet=st.characters(max_codepoint=127)), st.text(alphabet="éß漢"))
def test_other_letters_do_not_change_how_ascii_text_is_split(text: str, more: str) -> None:
    assert word_spans(f"{text} {more}")[: len(word_spans(text))] == word_spans(text)


def test_candidates_have_two_characters_and_a_letter() -> None:
    assert [is_candidate(form) for form in ("a", "the", "42", "3rd", "...", "été", ":)", "你好")] == [
        *(False, True, False, True),
        *(False, True, False, True),
    ]
