"""Trees: dropping words, spans of multi-word tokens, label schemes, and attachment scores."""

from __future__ import annotations

import random

import pytest

from guidance.patterns.features import RELATIONS, relation_id
from guidance.statistics.dependencies import Tree, label_scheme, spell, without
from tests.attachment import Attachment, attachment

MAJOR = {"nsubj", "obj", "amod", "advmod"}


def tree(text: str, heads: str, relations: str) -> Tree:
    """A tree written by hand; heads count from 1, and 0 is the root."""
    words, start = text.split(), []
    for word in words:
        start.append(text.index(word, start[-1] + 1 if start else 0))
    end = [first + len(word) for first, word in zip(start, words, strict=True)]
    places = [int(head) - 1 if head != "0" else n for n, head in enumerate(heads.split())]
    empty = [""] * len(words)
    return Tree(start, end, words, empty, list(empty), places, relations.split())


def test_dependents_of_a_dropped_word_attach_to_the_nearest_kept_ancestor():
    chain = tree("a b c d", "2 3 4 0", "x x x root")
    assert without(chain, [1]).head == [1, 2, 2]
    assert without(chain, [1, 2]).head == [1, 1]
    assert without(chain, [1, 2]).form == ["a", "d"]
    assert without(chain, []) is chain
    assert len(without(chain, range(4))) == 0


def test_dependents_of_a_dropped_root_become_roots():
    assert without(tree("a b c", "2 0 2", "x root x"), [1]).head == [0, 1]


def test_dropping_words_keeps_the_paths_of_the_others():
    chance = random.Random(0)
    for _ in range(200):
        size = chance.randint(1, 12)
        heads = [0 if n == 0 else chance.randrange(n) for n in range(size)]
        names = [str(n) for n in range(size)]
        spans = list(range(size))
        whole = Tree(spans, spans, names, names, names, heads, names)
        dropped = {n for n in range(size) if chance.random() < 0.4}
        left = without(whole, dropped)
        for place, name in enumerate(left.form):
            expected = heads[int(name)]
            while expected in dropped and heads[expected] != expected:
                expected = heads[expected]
            found = left.form[left.head[place]]
            assert found == (name if expected in dropped else str(expected))


@pytest.mark.parametrize(
    ("token", "words", "spans"),
    [
        ("don't", ["do", "n't"], [(3, 5), (5, 8)]),
        ("du", ["de", "le"], [(3, 5), (3, 5)]),
        ("dámelo", ["da", "me", "lo"], [(3, 9)] * 3),
        ("gonna", ["gon", "na"], [(3, 6), (6, 8)]),
    ],
)
def test_words_that_spell_their_token_have_their_own_span(token, words, spans):
    assert spell(token, 3, 3 + len(token), words) == spans


def test_the_label_scheme_is_recognised():
    assert label_scheme(["ROOT", "nsubj", "dobj", "nsubjpass"]) == "spacy-en"
    assert label_scheme(["root", "nsubj", "obj", "nsubj:pass"]) == "ud"
    assert label_scheme(["ROOT", "sb", "oa", "mo"]) == "other"
    assert label_scheme([]) == "other"
    assert label_scheme(RELATIONS) == "ud"


@pytest.mark.parametrize(
    ("ud", "spacy", "roles"),
    [
        (
            tree("The old dog chased a cat", "3 3 4 0 6 4", "det amod nsubj root det obj"),
            tree("The old dog chased a cat", "3 3 4 0 6 4", "det amod nsubj ROOT det dobj"),
            {"dog": "nsubj", "cat": "obj", "old": "amod"},
        ),
        (
            tree("She very quickly gave him books", "4 3 4 0 4 4", "nsubj advmod advmod root iobj obj"),
            tree("She very quickly gave him books", "4 3 4 0 4 4", "nsubj advmod advmod ROOT dative dobj"),
            {"She": "nsubj", "very": "advmod", "quickly": "advmod", "books": "obj"},
        ),
        (
            tree("The cat was chased by dogs", "2 4 4 0 6 4", "det nsubj:pass aux:pass root case obl:agent"),
            tree("The cat was chased by dogs", "2 4 4 0 4 5", "det nsubjpass auxpass ROOT agent pobj"),
            {},
        ),
        (
            tree("Dogs and cats sleep", "4 3 1 0", "nsubj cc conj root"),
            tree("Dogs and cats sleep", "4 1 1 0", "nsubj cc conj ROOT"),
            {"Dogs": "nsubj"},
        ),
    ],
)
def test_both_schemes_give_the_same_words_the_same_roles(ud, spacy, roles):
    for parse in (ud, spacy):
        found = {}
        for form, label in zip(parse.form, parse.relation, strict=True):
            name = RELATIONS[relation_id(label)]
            if name in MAJOR:
                found[form] = name
        assert found == roles
    assert (label_scheme(["dobj", *spacy.relation]), label_scheme(["obj", *ud.relation])) == ("spacy-en", "ud")


def test_a_tree_agrees_with_itself():
    parse = tree("The old dog chased a cat", "3 3 4 0 6 4", "det amod nsubj root det obj")
    same = attachment(parse, parse)
    assert same == Attachment(6, 6, 6, 6, 6)
    assert (same.uas, same.las) == (1.0, 1.0)


def test_attachment_of_a_case_counted_by_hand():
    gold = tree("The old dog chased a cat", "3 3 4 0 6 4", "det amod nsubj root det obj")
    # a different head for `old`, a different label for `cat`, and ROOT in capitals
    found = tree("The old dog chased a cat", "3 4 4 0 6 4", "det amod nsubj ROOT det obl")
    assert attachment(gold, found) == Attachment(6, 6, 6, 5, 4)
    assert attachment(gold, found).uas == pytest.approx(5 / 6)


def test_unaligned_words_lower_the_score():
    gold = tree("He did-n't go", "3 3 0", "nsubj advmod root")
    found = tree("He did -n't go", "4 4 4 0", "nsubj aux advmod root")
    found = Tree([0, 3, 6, 11], [2, 6, 10, 13], *list(vars(found).values())[2:])
    counts = attachment(gold, found)
    assert counts == Attachment(3, 4, 2, 2, 2)
    assert counts.las == pytest.approx(2 * 2 / 7)


def test_a_head_that_only_one_tree_has_is_a_different_head():
    gold = Tree([0, 2], [1, 5], ["a", "bcd"], [""] * 2, [""] * 2, [1, 1], ["x", "root"])
    found = Tree([0, 2, 3], [1, 3, 5], ["a", "b", "cd"], [""] * 3, [""] * 3, [1, 1, 1], ["x", "root", "y"])
    assert attachment(gold, found) == Attachment(2, 3, 1, 0, 0)


def test_counts_add_up_and_empty_trees_score_zero():
    assert Attachment(1, 2, 3, 4, 5) + Attachment(1, 1, 1, 1, 1) == Attachment(2, 3, 4, 5, 6)
    assert (Attachment().uas, Attachment().las) == (0.0, 0.0)
