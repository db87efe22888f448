"""Conditions as patterns: against Python's own evaluation of the same text, what they refuse, and where they stand in plans."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import guidance
from guidance.errors import PlanError
from guidance.guide import Guide
from guidance.patterns.combinations import pattern_names, read_pattern
from guidance.patterns.expressions import where
from guidance.patterns.features import RELATIONS, UPOS, Tokens
from guidance.plan import Plan

IDS = [[2, 7, 5, 7, 9, 3], [2, 5, 5, 3, 0, 0]]
POS = [[-1, 7, 15, 7, 12, -1], [-1, 15, 15, -1, -1, -1]]
IDF = [[0.0, 2.5, 1.0, 2.5, 0.5, 0.0], [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]]
STOP = [[False, False, True, False, True, False], [False, True, True, False, False, False]]


def tokens() -> Tokens:
    ids = torch.tensor(IDS)
    columns = {"pos": torch.tensor(POS), "idf": torch.tensor(IDF), "stop_word": torch.tensor(STOP)}
    return Tokens(ids, ids != 0, columns)


class Unknown:
    """A number that a token does not have: it stays unknown in sums, and no comparison with it is true."""

    def _same(self, *other: Any) -> Unknown:
        return self

    def _never(self, other: Any) -> bool:
        return False

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __abs__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _never  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def slowly(text: str) -> list[list[list[bool]]]:
    """Every pair of tokens, one after the other, by Python itself."""
    found = []
    for ids, idf, stop in zip(IDS, IDF, STOP, strict=True):
        size = sum(id_ != 0 for id_ in ids)

        def token(n: int, ids: Any = ids, idf: Any = idf, stop: Any = stop, size: int = size) -> SimpleNamespace:
            own = {"id": ids[n], "place": n, "frequency": ids.count(ids[n]), "length": size}
            return SimpleNamespace(**own, idf=idf[n] or Unknown(), stop_word=stop[n])

        rows = []
        for q in range(6):
            names = [{"query": token(q), "key": token(k), "distance": k - q, "next": k == q + 1} for k in range(6)]
            rows.append([q < size and k < size and bool(eval(text, {"abs": abs}, names[k])) for k in range(6)])
        found.append(rows)
    return found


@st.composite
def conditions(draw: Any, depth: int = 3) -> str:
    if depth and draw(st.booleans()):
        left, right = draw(conditions(depth=depth - 1)), draw(conditions(depth=depth - 1))
        return draw(st.sampled_from([f"{left} and {right}", f"{left} or {right}", f"not ({left})", f"({left})"]))
    numbers = ["query.place", "key.place", "distance", "key.idf", "query.id", "key.id", "key.frequency", "query.length"]
    left, right = draw(st.sampled_from(numbers)), draw(st.sampled_from([*numbers, "2", "0.5"]))
    sign, plus = draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">="])), draw(st.sampled_from([" + 1", " - 1", ""]))
    compared = f"{left} {sign} {right}{plus}"
    return draw(st.sampled_from([compared, f"abs({left}) < 3", f"-{left} < {right}", "next", "key.stop_word"]))


@settings(max_examples=200, deadline=None)
@given(conditions())
def test_conditions_mean_what_they_mean_in_python(text: str) -> None:
    found = where(text).on(tokens())
    assert found.dense().tolist() == slowly(text), text
    assert torch.equal(found.counts(), found.dense().sum(-1).float())


def test_names_of_codes_and_what_is_not_known() -> None:
    nouns = where('query.pos == "NOUN" and key.pos != "NOUN"').on(tokens()).dense()[0]
    # special tokens have no part of speech: neither equal nor unequal to anything
    assert nouns.nonzero().tolist() == [[1, 2], [1, 4], [3, 2], [3, 4]]
    assert where("query.pos == key.pos").on(tokens()).dense()[0].nonzero().tolist() == [
        *([1, 1], [1, 3], [2, 2], [3, 1], [3, 3], [4, 4]),
    ]
    assert UPOS[7] == "NOUN"
    idf = torch.tensor([[0.0, 2.0, float("nan"), 6.0]])
    for text in ("key.idf < 4", "key.idf != 6", "key.idf + 1 <= 3"):
        assert guidance.pattern({"where": text}, torch.ones_like(idf).long(), idf=idf)[0, 0].tolist() == [0, 1, 0, 0]
    relation = torch.tensor([[-1, RELATIONS.index("nsubj"), RELATIONS.index("root")]])
    ids = torch.ones_like(relation)
    assert guidance.pattern({"where": "key.relation == 'nsubj'"}, ids, relation=relation)[0, 2].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "text", ["distance-1 == 0", "query.place-key.place==-1", "distance<2 and(next or key.place-1>=2)"]
)
def test_spaces_around_signs_are_left_to_taste(text: str) -> None:
    assert where(text).on(tokens()).dense().tolist() == slowly(text)


def test_numbers_may_begin_with_zeros_and_conditions_may_have_several_lines() -> None:
    once = where("distance == 1 and key.place > 0.5").on(tokens()).dense()
    assert torch.equal(where("\n distance == 01\n and key.place > 00.5\n").on(tokens()).dense(), once)


@pytest.mark.parametrize(
    "text", ["next # first", "0x1 == 1", "1e1 == 1", "1_0 == 1", "key.pos == b'NOUN'", "0 < distance < 2"]
)
def test_what_else_python_reads_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"is not expected|quoted name"):
        where(text)


def test_patterns_in_conditions_keep_what_is_known_about_them() -> None:
    both = where("matching_token and not self")
    assert not both.looks_ahead and not both.same_keys and not both.needs
    assert both.on(tokens()).dense()[0].nonzero().tolist() == [[1, 3], [3, 1]], (
        "tokens that occur once match nothing else"
    )
    assert where("key.idf > 1 or rare").needs == ("idf", "word")
    assert where("key.stop_word").same_keys and not where("query.stop_word").same_keys
    assert where("key.frequency > 1").looks_ahead and not where("key.id == query.id").looks_ahead
    assert where("first").same_keys
    joined = read_pattern({"or": ["next", {"where": "distance == -1"}]})
    assert joined.on(tokens()).dense()[0, 2].tolist() == [0, 1, 0, 1, 0, 0]
    assert pattern_names({"or": ["next", {"where": "distance == -1 or first"}]}) == ["next", "first"]


def test_plans_carry_conditions_through_files_and_pickles() -> None:
    plan = Plan([Guide({"where": 'abs(distance) <= 2 and key.pos == "NOUN"'}, "mask", heads=[0])])
    again = Plan.parse(plan.dumps())
    assert again == plan and again.guides[0].bound_pattern.needs == ("pos",)
    pattern = pickle.loads(pickle.dumps(where("distance == 1")))
    assert pattern.on(tokens()).dense()[1].nonzero().tolist() == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no expression"),
        ("key.plac == 1", "did you mean 'place'"),
        ("nxt", "did you mean 'next'"),
        ("token.place == 1", "neither query nor key"),
        ("next and", "character 9: something is missing"),
        ("query.pos == 'NOUNS'", "did you mean 'NOUN'"),
        ("query.pos < 'NOUN'", "only =="),
        ("query.matrix == 1", "no feature 'matrix'"),
        ("(next", r"'\)' is missing"),
        ("1 + 1", "the whole must be a condition"),
        ("next + 1", "takes numbers"),
        ("key.place = 3", "'=' is not expected"),
        ("__import__('os')", "no pattern '__import__'"),
        ("next.__class__ == 1", "is not expected|neither query nor key|no feature"),
        ("not " * 60 + "next", "more than 50"),
        ("next or " * 90 + "next", "at most 500"),
        ("conflict", "has weights"),
        ("distance > 'a'", "quoted name"),
        ("next ; first", "';' is not expected"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        where(text)
    with pytest.raises(PlanError):
        Guide({"where": text}, "mask")


def test_a_condition_is_text() -> None:
    with pytest.raises(PlanError, match="not a condition in quotes"):
        Guide({"where": 3}, "mask")  # type: ignore[dict-item]
