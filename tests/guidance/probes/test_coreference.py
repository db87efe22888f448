"""Antecedent selection on documents worked by hand: ties, nested mentions, a mention at position 0, rules, halves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from guidance.probes.coreference import (
    BASELINES,
    Mention,
    Tally,
    agree,
    among_all_words,
    answers,
    baseline,
    head_word,
    kind_of,
    queries,
)

# 0    1   2    3     4    5       6   7    8   9     10     11
WORDS = ["Anna", "saw", "the", "dog", "of", "her", "uncle", ".", "She", "fed", "it", "."]
ANNA = Mention(0, 1, 0, "anna", "proper")
DOG = Mention(2, 7, 3, "dog", "nominal")
HER = Mention(5, 6, 5, "anna", "pronominal")
UNCLE = Mention(5, 7, 6, "uncle", "nominal")
SHE = Mention(8, 9, 8, "anna", "pronominal")
IT = Mention(10, 11, 10, "dog", "pronominal")
MENTIONS = [IT, SHE, UNCLE, HER, DOG, ANNA]
ORDINARY = [True] * len(WORDS)


def asked(**options: Any) -> dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(q.word, *q.targets): (q.targets, q.others) for q in queries(MENTIONS, ORDINARY, **options)}


def test_mentions_with_an_antecedent_are_asked() -> None:
    everything = set(range(len(WORDS)))
    assert [q.mention for q in queries(MENTIONS, ORDINARY)] == [HER, SHE, IT]
    for (word, *_), (targets, others) in asked().items():
        assert set(targets) | set(others) | {word} == everything
    assert [targets for targets, _ in asked().values()] == [(0,), (0, 5), (3,)]
    assert asked(candidates="preceding_words")[10, 3][1] == (0, 1, 2, 4, 5, 6, 7, 8, 9)
    assert asked(candidates="preceding_mentions")[8, 0, 5] == ((0, 5), (3, 6))
    # a word inside the phrase of an antecedent; the query itself is never a target
    assert asked(target="span")[10, 2, 3, 4, 5, 6][0] == (2, 3, 4, 5, 6)
    pairs = queries(MENTIONS, ORDINARY, unit="pair", candidates="preceding_mentions")
    assert [(q.word, q.targets, q.others) for q in pairs] == [
        (5, (0,), (3,)),
        (8, (0,), (3, 5, 6)),
        (8, (5,), (0, 3, 6)),
        (10, (3,), (0, 5, 6, 8)),
    ]
    special = [word != 7 for word in range(len(WORDS))]
    assert all(7 not in q.others for q in queries(MENTIONS, special))


def test_a_head_answers_right_if_a_target_is_strictly_highest() -> None:
    attention = torch.full((3, len(WORDS), len(WORDS)), 0.01)
    attention[0, 5, 0] = attention[0, 8, 5] = attention[0, 10, 3] = 0.5
    attention[:, 8, 8] = 0.9  # itself is no candidate
    attention[1, 5, 0] = attention[1, 5, 3] = 0.3  # a tie
    attention[1, 8, 0], attention[1, 10, 9] = 0.3, 0.4
    found = answers(attention, queries(MENTIONS, ORDINARY))
    assert found.tolist() == [[True, True, True], [False, True, False], [False, False, False]]
    nearer = answers(attention, queries(MENTIONS, ORDINARY, candidates="preceding_mentions"))
    assert nearer[1].tolist() == [False, True, False]
    alone = queries([ANNA, Mention(8, 9, 8, "anna", "pronominal")], ORDINARY, candidates="preceding_mentions")
    assert answers(attention, alone)[2].tolist() == [True], "the only candidate"


def test_rules_choose_the_nearest_mention_that_fits() -> None:
    questions = queries(MENTIONS, ORDINARY)
    right = {name: baseline(WORDS, questions, rules) for name, rules in BASELINES.items()}
    # nearest before "her" is the dog, before "She" the uncle, before "it" "She"
    assert right["nearest"] == [False, False, False]
    assert right["head match"] == [False, False, False]
    # the dog may be a "her"; an uncle is no she, but "her" is; of all before "it" only the dog may be an it
    assert right["rules"] == [False, True, True]
    words = ["the", "king", "saw", "the", "queen", ".", "The", "king", "slept"]
    kings = [Mention(0, 2, 1, "k", "nominal"), Mention(3, 5, 4, "q", "nominal"), Mention(6, 8, 7, "k", "nominal")]
    again = queries(kings, [True] * len(words))
    assert baseline(words, again, BASELINES["head match"]) == [True]
    assert baseline(words, again, BASELINES["nearest"]) == [False]
    assert baseline(words, again, BASELINES["rules"]) == [True]


def test_a_pronoun_chooses_between_candidates_on_either_side_of_it() -> None:
    words = ["After", "her", "talk", "Anna", "Martin", "thanked", "Berta", "Lee", "."]
    pronoun = Mention(1, 2, 1, "x", "pronominal", asks=True)
    right = Mention(3, 5, 4, "x", "proper", asks=False)
    wrong = Mention(6, 8, 7, "B", "proper", asks=False)
    (query,) = queries([pronoun, right, wrong], [True] * 9)
    assert (query.word, query.targets, query.others) == (1, (4,), (7,))
    assert query.rest == (0, 2, 3, 5, 6, 7, 8) and query.candidates == (right, wrong)
    (span,) = queries([wrong, right, pronoun], [True] * 9, target="span", candidates="preceding_mentions", unit="pair")
    assert (span.targets, span.others) == ((3, 4), (6, 7)), "what other mentions may look at does not matter"
    assert baseline(words, [query], BASELINES["nearest"]) == [True]
    assert queries([pronoun, right, wrong], [True] * 9, is_causal=True) == [], "none stands before it"
    last = replace(pronoun, start=8, end=9, head=8)
    assert queries([right, wrong, last], [True] * 9, is_causal=True) == queries([right, wrong, last], [True] * 9)
    between = replace(pronoun, start=5, end=6, head=5)
    assert queries([right, wrong, between], [True] * 9, is_causal=True) == [], "nothing that it sees is wrong"
    assert queries([pronoun, wrong], [True] * 9) == [], "no candidate is right"
    assert queries([pronoun, right], [True] * 9) == [], "no candidate is wrong"
    assert queries([right, right, wrong], [True] * 9) == [], "names do not ask"
    attention = torch.zeros(3, 9, 9)
    attention[:, 1, 2] = 0.5
    attention[0, 1, 4], attention[1, 1, 7], attention[2, 1, 4], attention[2, 1, 2] = 0.2, 0.2, 0.2, 0.1
    assert answers(attention, [query])[:, 0].tolist() == [True, False, True]
    assert answers(attention, among_all_words([query]))[:, 0].tolist() == [False, False, True]
    assert among_all_words(queries(MENTIONS, ORDINARY)) == []


def test_number_gender_and_person_agree_unless_both_are_known() -> None:
    words = ["Mr.", "Hill", ",", "the", "girls", ",", "I", ",", "they", ",", "he", ",", "the", "house"]
    hill, girls = Mention(0, 2, 1, "a", "proper"), Mention(3, 5, 4, "b", "nominal")
    i, they, he = (Mention(n, n + 1, n, "c", "pronominal") for n in (6, 8, 10))
    house = Mention(12, 14, 13, "d", "nominal")
    assert agree(words, hill, he) and not agree(words, girls, he) and agree(words, girls, they)
    assert not agree(words, hill, they) and not agree(words, i, he) and agree(words, house, he)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("the old man", 2),
        ("the man of the house", 1),
        ("the dog 's", 1),
        ("Anna", 0),
        ("the woman , who came", 1),
        ("( sic )", 1),
        ("of", 0),
    ],
)
def test_heads_of_mentions_by_rule(text: str, head: int) -> None:
    assert head_word(text.split(), 0, len(text.split())) == head


def test_kinds_of_mentions_by_their_words() -> None:
    words = ["Men", "saw", "Anna", ".", "Dogs", "like", "her", "and", "She", "too"]
    kinds = [kind_of(words, place, place, place + 1) for place in (0, 2, 4, 6, 8)]
    assert kinds == ["nominal", "proper", "nominal", "pronominal", "pronominal"]


def test_halves_and_kinds_are_tallied() -> None:
    tally = Tally()
    questions = queries(MENTIONS, ORDINARY)  # pronominal, all three
    tally.add(torch.tensor([[True, True, False], [False, False, False]]), questions, 0)
    tally.add(torch.tensor([[False, False, False], [True, True, True]]), questions, 1)
    assert tally.accuracy().tolist() == [pytest.approx(2 / 6), pytest.approx(3 / 6)]
    assert tally.accuracy("pronominal", half=0).tolist() == [pytest.approx(2 / 3), 0]
    assert math.isnan(float(tally.accuracy("proper")))


def test_a_model_whose_weights_look_at_the_antecedent_is_found() -> None:
    """One layer, one head, whose queries and keys are set by hand: same vector, so same entity, looks at each other."""
    from transformers import BertConfig, BertModel

    import guidance

    config = BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    model = BertModel(config)
    with torch.no_grad():
        embeddings = model.embeddings
        embeddings.word_embeddings.weight.copy_(torch.eye(8))
        embeddings.position_embeddings.weight.zero_()
        embeddings.token_type_embeddings.weight.zero_()
        layer = model.encoder.layer[0].attention.self
        for linear in (layer.query, layer.key):
            linear.weight.copy_(3 * torch.eye(8))
            linear.bias.zero_()
    ids = torch.tensor([[1, 2, 3, 4, 2, 5, 3]])
    mentions = [Mention(n, n + 1, n, str(int(ids[0, n])), "nominal") for n in (1, 2, 4, 6)]
    questions = queries(mentions, [True] * 7)
    found = []
    guidance.install(model, guidance.Plan()).watch(lambda site, maps: found.append(answers(maps[0], questions)), ids)
    assert [q.word for q in questions] == [4, 6]
    assert found[0].tolist() == [[True, True]]
