"""Entities, segments and extractive summaries, against cases worked by hand and slow definitions."""

from __future__ import annotations

import random

import numpy as np
import pytest
import sklearn.metrics

from guidance.errors import InputError
from guidance.tasks.entities import entities, entity_agreement, token_agreement
from guidance.tasks.scores import Agreement, accuracy, macro_f1
from guidance.tasks.segments import pk, window_diff, window_size
from guidance.tasks.summaries import greedy_oracle, select
from pipelines.metrics.correlations import matthews, pearson, pearson_of_draws, spearman, spearman_of_draws


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O", []),
        ("B-A I-A O B-B", [(0, 2, "A"), (3, 4, "B")]),
        ("B-A B-A", [(0, 1, "A"), (1, 2, "A")]),
        ("I-A I-A O I-A", [(0, 2, "A"), (3, 4, "A")]),  # IOB1
        ("I-A B-A I-A", [(0, 1, "A"), (1, 3, "A")]),  # IOB1: B only parts neighbours
        ("B-A I-B", [(0, 1, "A"), (1, 2, "B")]),  # a change of type begins an entity
        ("S-A S-A", [(0, 1, "A"), (1, 2, "A")]),
        ("B-A I-A E-A I-A", [(0, 3, "A"), (3, 4, "A")]),  # nothing goes on after an end
        ("B-A L-A U-A", [(0, 2, "A"), (2, 3, "A")]),
        ("E-A E-A", [(0, 1, "A"), (1, 2, "A")]),
        ("B-A-x I-A-x", [(0, 2, "A-x")]),
        ("", []),
    ],
)
def test_entities_follow_the_rules_of_conlleval(tags: str, expected: list[tuple[int, int, str]]) -> None:
    assert entities(tags.split()) == expected


@pytest.mark.parametrize("tag", ["PER", "X-PER", "B-", "-PER", "b-PER", ""])
def test_a_tag_that_is_none_is_named(tag: str) -> None:
    with pytest.raises(InputError, match="not a tag"):
        entities(["O", tag])


def test_agreement_of_entities_is_counted_by_type() -> None:
    gold = ["B-A I-A O B-B", "B-B O"]
    guesses = ["B-A I-A O B-A", "B-B I-B"]
    found = entity_agreement([t.split() for t in gold], [t.split() for t in guesses])
    assert found == {"": Agreement(1, 3, 3), "A": Agreement(1, 2, 1), "B": Agreement(0, 1, 2)}
    assert (found[""].precision, found[""].recall, found[""].f1) == (1 / 3, 1 / 3, pytest.approx(1 / 3))
    assert (found["A"].precision, found["A"].recall) == (0.5, 1.0)
    tokens = token_agreement([t.split() for t in gold], [t.split() for t in guesses])
    assert tokens == Agreement(3, 5, 4)


def test_scores_of_nothing_are_zero() -> None:
    nothing = entity_agreement([["O"]], [["O"]])[""]
    assert (nothing.precision, nothing.recall, nothing.f1) == (0.0, 0.0, 0.0)


def test_sentences_and_tags_must_be_as_many() -> None:
    with pytest.raises(InputError, match="2 sentences"):
        entity_agreement([["O"], ["O"]], [["O"]])
    with pytest.raises(InputError, match="sentence 1 has 2 true tags and 1"):
        token_agreement([["O"], ["O", "O"]], [["O"], ["O"]])


def test_scores_are_those_of_scikit_learn_and_scipy() -> None:
    draw = random.Random(0)
    gold, predicted = ([draw.choice("abcd") for _ in range(50)] for _ in range(2))
    gold = [label.replace("d", "c") for label in gold]  # one class is only predicted
    each = {label: Agreement.on(label, gold, predicted) for label in "abcde"}
    precision, recall, f1, number = sklearn.metrics.precision_recall_fscore_support(
        gold, predicted, labels=list("abcde"), zero_division=0.0
    )
    assert [a.precision for a in each.values()] == pytest.approx(precision)
    assert [a.recall for a in each.values()] == pytest.approx(recall)
    assert [a.f1 for a in each.values()] == pytest.approx(f1)
    assert [a.gold for a in each.values()] == number.tolist()
    assert macro_f1(each.values()) == pytest.approx(
        sklearn.metrics.f1_score(gold, predicted, average="macro", zero_division=0.0)
    )
    assert accuracy(gold, predicted) == pytest.approx(sklearn.metrics.accuracy_score(gold, predicted))
    assert matthews(gold, predicted) == pytest.approx(sklearn.metrics.matthews_corrcoef(gold, predicted))
    times = [1.7e9 + value for value in (-10, -2, 3, 10)]
    assert pearson(times, [times[i] for i in (1, 0, 3, 2)]) == pytest.approx(
        np.corrcoef([-10, -2, 3, 10], [-2, -10, 10, 3])[0, 1]
    )
    assert spearman([1, 2, 3], [1, 9, 8]) == pytest.approx(0.5)


@pytest.mark.filterwarnings("error")
def test_correlations_with_one_true_label_are_undefined_and_with_one_answer_0() -> None:
    assert matthews(["a", "a"], ["a", "a"]) is None is matthews(["a", "a"], ["a", "b"])
    assert matthews(["a", "b"], ["a", "a"]) == 0
    for correlation in (pearson, spearman):
        assert correlation([1, 1], [1, 2]) is None and correlation([1, 2], [1, 1]) == 0


@pytest.mark.filterwarnings("error")
def test_correlations_of_draws_are_those_of_their_numbers() -> None:
    draw = np.random.default_rng(0)
    gold = draw.integers(0, 6, 40) / 5 + 1.7e9
    predicted = np.round(gold + draw.normal(size=40), 1)
    pairs = ((pearson_of_draws, pearson), (spearman_of_draws, spearman))
    draws = [np.arange(40), *draw.integers(0, 40, (30, 40)), *draw.integers(0, 40, (30, 3))]
    for fast, slow in pairs:
        for chosen in draws:
            expected = slow(gold[chosen], predicted[chosen])
            assert fast(gold, predicted)(chosen) == pytest.approx(expected or 0.0, abs=1e-6), chosen
        assert fast(gold, predicted)(np.zeros(5, dtype=int)) == 0.0, "one number only"


def ends(text: str) -> list[bool]:
    return [mark == "1" for mark in text]


def test_segment_scores_by_hand() -> None:
    # units  0 1 2 3 | 4 5 6 7 ; predicted 0 1 2 | 3 4 5 6 7
    reference, near = ends("00010001"), ends("00100001")
    assert window_size(reference) == 2
    # windows (i, i + 2): the reference parts 2-4 and 3-5, the prediction 1-3 and 2-4
    assert pk(reference, near) == pytest.approx(2 / 6)
    assert window_diff(reference, near) == pytest.approx(2 / 6)
    # two boundaries in one window differ from one for WindowDiff only
    both = ends("00110001")
    assert pk(reference, both) == pytest.approx(1 / 6)
    assert window_diff(reference, both) == pytest.approx(2 / 6)
    assert pk(reference, reference) == window_diff(reference, reference) == 0.0


def test_the_last_unit_says_nothing_and_short_documents_have_no_score() -> None:
    assert pk(ends("0001000"), ends("0001001")) == 0.0
    assert pk(ends("01"), ends("01")) is None
    assert pk(ends("001"), ends("011"), k=1) == 0.5
    assert window_size([]) == 2
    with pytest.raises(InputError, match="3 units"):
        pk(ends("001"), ends("01"))
    with pytest.raises(InputError, match="at least 1"):
        window_diff(ends("001"), ends("001"), k=0)


def test_segment_scores_agree_with_their_definitions() -> None:
    draw = random.Random(0)
    for _ in range(200):
        n = draw.randint(4, 30)
        two = [[draw.random() < 0.3 for _ in range(n)] for _ in "rp"]
        k = draw.randint(1, n - 1)
        counts = [[sum(each[i : i + k]) for i in range(n - k)] for each in two]
        pairs = list(zip(*counts, strict=True))
        assert pk(*two, k=k) == pytest.approx(sum((a > 0) != (b > 0) for a, b in pairs) / (n - k))
        assert window_diff(*two, k=k) == pytest.approx(sum(a != b for a, b in pairs) / (n - k))


def test_the_oracle_takes_what_raises_rouge_and_stops() -> None:
    document = ["the cat sat", "a dog ran home", "the dog ran"]
    # "a dog ran home" has 4 of 4 words and 3 of 3 pairs
    assert greedy_oracle(document, ["A dog ran home .".lower()]) == [1]
    # searched best first: sentence 2 (3 of 5 words), then 0 adds cat and sat; only two, so in the order of the search
    assert greedy_oracle(document, ["the dog ran", "cat sat"]) == [2, 0]
    assert greedy_oracle(["x y", "b", "a", "c d"], ["c d a b"]) == [1, 2, 3]  # three taken: sorted
    assert greedy_oracle(["same words", "same words"], ["same words"]) == [0]
    assert greedy_oracle(document, ["nothing shared"]) == []
    assert greedy_oracle(document, []) == greedy_oracle([], ["a"]) == []


def test_the_oracle_reads_other_scripts_when_asked() -> None:
    document, summary = ["በርታ ልጄ", "ሰላም ነው"], ["ሰላም ነው።"]
    assert greedy_oracle(document, summary) == []
    assert greedy_oracle(document, summary, letters="any") == [1]


def test_bigrams_of_a_document_do_not_cross_sentences() -> None:
    # the pair (b, c) of the summary is in no sentence; sentence 2 has both words and the pair
    assert greedy_oracle(["a b", "c d", "b c"], ["b c"]) == [2]


def test_selection_ranks_blocks_and_keeps_ties_in_order() -> None:
    sentences = ["a b c d", "x b c d", "e f g", "h"]
    assert select([0.9, 0.8, 0.1, 0.1], sentences) == [0, 2, 3]
    assert select([0.9, 0.8, 0.1, 0.1], sentences, block_trigrams=False) == [0, 1, 2]
    assert select([0.1, 0.1, 0.1, 0.9], sentences, size=2) == [3, 0]
    assert select([1.0, 0.5], ["A b c", "a b c"]) == [0, 1]  # case counts
    assert select([], []) == []
