"""The sentences of the probe of reflexives."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from guidance.probes.reflexives import DISTRACTORS, NOUNS, Reflexive, confusion, sentences, with_distractors


def test_sentences_are_different_and_their_antecedent_is_never_next_to_them() -> None:
    found = list(sentences(10_000))
    assert len({one.words for one in found}) == 10_000
    sizes = [len(one.words) for one in found]
    assert set(sizes) == {5, 8} and abs(sizes.count(8) - 4_430) < 200
    for one in found:
        assert one.words[one.place] in NOUNS and one.place == len(one.words) - 1
        assert one.words[1] in NOUNS[one.words[one.place]] and one.antecedent == (0, 1)
        assert one.place - one.antecedent[1] > 1
    assert list(islice(sentences(100), 10)) == found[:10] and list(sentences(10, seed=1)) != found[:10]


def test_confusion_is_the_surprise_at_the_share_of_the_antecedent() -> None:
    heads = torch.tensor([[0.5, 0.1, 0.2, 0.2], [0.1, 0.1, 0.2, 0.6]])
    # on average 0.3 + 0.1 against 0.4
    assert float(confusion(heads, [0, 1], [[3]])) == pytest.approx(1.0)
    assert float(confusion(heads, [0, 1], [])) == 0.0
    # a mask can keep a layer from the phrases
    assert float(confusion(torch.tensor([[0.0, 0.0, 1.0]]), [0], [[1]])) == 1.0
    assert 28 < float(confusion(torch.tensor([[0.0, 1.0]]), [0], [[1]])) < 30


def test_distractors_move_the_places() -> None:
    one = Reflexive(("the", "man", "can", "see", "himself"), 4, (0, 1))
    assert one.beside(["and"], before=True) == Reflexive(("and", *one.words), 5, (1, 2))
    assert one.beside(["and"], before=False) == Reflexive((*one.words, "and"), 4, (0, 1))
    girl = one.beside(["the", "girl", "believes", "that", "."], before=True)
    assert (girl.antecedent, girl.others) == ((5, 6), ((0, 1),))
    asked = Reflexive(one.words, 4, (0, 1), ((2,),)).beside(
        ["and", "that", "is", "what", "the", "boy", "said", "."], before=False
    )
    assert asked.others == ((2,), (9, 10))
    many = with_distractors([one] * 200, before=True)
    assert {" ".join(each.words[: -len(one.words)]) for each in many} == set(DISTRACTORS)
    assert all(each.words[each.place] == "himself" and each.words[each.antecedent[1]] == "man" for each in many)
