"""Pairs of texts: their labels are right, only their content gives the label away, and what they depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from guidance.objectives.masked_lm import IGNORED
from guidance.objectives.next_sentence import FOREIGN, NEXT, CutDocuments, Pair, next_sentence_loss

STOP = 1


def documents(
    sizes: Sequence[Sequence[int]],
    room: int,
    missing: Sequence[tuple[int, int]] = (),
    corpora: Sequence[int] = (),
) -> CutDocuments:
    """Documents of sentences with so many tokens; each sentence ends with `STOP`, and all other ids are different.

    Args:
        missing: (document, sentence) before which text is in another split.
        corpora: how many of the documents each corpus has.
    """
    ids: list[int] = []
    document: list[int] = []
    sentence: list[int] = []
    for d, lengths in enumerate(sizes):
        jump = 0
        for s, length in enumerate(lengths):
            jump += 5 * ((d, s) in missing)
            ids += [*range(len(ids) + 10, len(ids) + 9 + length), STOP]
            document += [d * 3] * length
            sentence += [s + jump] * length
    ends = np.cumsum(corpora, dtype=int)
    parts = [sum(map(sum, sizes[end - number : end])) for number, end in zip(corpora, ends, strict=True)]
    columns = np.array(ids, np.uint32), np.array(document, np.int16), np.array(sentence, np.int16)
    return CutDocuments.of(*columns, room, parts)


def many(seed: int = 0, number: int = 60, room: int = 40) -> CutDocuments:
    """Documents of very different lengths."""
    random = np.random.default_rng(seed)
    return documents([random.integers(2, 16, random.integers(1, 60)).tolist() for _ in range(number)], room)


def pairs(given: CutDocuments, epochs: int = 1, seed: int = 0) -> list[tuple[int, Pair]]:
    examples = np.flatnonzero(given.has_pair).tolist()
    return [(i, given.pair(i, seed=seed, epoch=epoch)) for epoch in range(epochs) for i in examples]


def size(part: slice | None) -> int:
    assert part is not None
    return int(part.stop - part.start)


# stretches


def test_documents_are_cut_in_order_at_sentences_as_a_plain_loop_would() -> None:
    for seed in range(5):
        random = np.random.default_rng(seed)
        sizes = [random.integers(1, 9, random.integers(1, 20)).tolist() for _ in range(12)]
        given = documents(sizes, 11)
        expected, place = [], 0
        for lengths in sizes:
            used = 99
            for length in lengths:
                if used + length > 11:
                    expected.append(place)
                    used = 0
                used += length
                place += length
        assert given.starts[given.stretches].tolist() == [*expected, place]
        assert given.lengths.tolist() == (np.diff([*expected, place]) + 2 + given.has_pair).tolist()


def test_a_single_sentence_or_one_without_foreign_text_of_its_length_has_no_second_text() -> None:
    given = documents([[2, 3, 2], [2, 2], [4]], 5)
    assert given.stretches.tolist() == [0, 2, 3, 5, 6]
    # the second text of the first example has 3 tokens, and elsewhere 2 tokens at most follow a sentence
    assert given.has_pair.tolist() == [False, False, True, False]
    assert given.lengths.tolist() == [7, 4, 7, 6]
    assert given.pair(0, seed=0, epoch=0) == Pair(slice(0, 5), None, IGNORED)
    for epoch in range(20):
        pair = given.pair(2, seed=0, epoch=epoch)
        assert pair.first == slice(7, 9)
        assert pair.second == (slice(9, 11) if pair.label == NEXT else slice(5, 7))


def test_second_texts_are_short_enough_for_another_document_to_replace() -> None:
    given = documents([[1] * 10, [1, 1, 1, 1]], 10)
    assert given.earliest.tolist() == [7, 11]
    drawn = {size(pair.second) for example, pair in pairs(given, 60) if example == 0}
    assert drawn == {1, 2, 3}


def test_missing_text_between_two_sentences_separates_them() -> None:
    given = documents([[2, 2, 2, 2], [2, 2]], 20, missing=[(0, 2)])
    assert given.stretches.tolist() == [0, 2, 4, 6]
    assert 2 not in given.sources and given.sources.tolist() == [1, 3, 5]
    assert given.document.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_sentence_longer_than_an_example_is_cut_and_never_continued_by_another_text() -> None:
    given = documents([[12, 2], [3, 3]], 5)
    assert given.cut == 1
    assert given.starts.tolist() == [0, 5, 10, 12, 14, 17, 20]
    assert given.stretches.tolist() == [0, 1, 2, 4, 5, 6]
    assert given.sources.tolist() == [3, 5]


@pytest.mark.parametrize("sizes", [[], [[2, 3, 2]], [[2, 3], [5], [1]]])
def test_without_a_second_document_of_two_sentences_there_is_no_pair(sizes: list[list[int]]) -> None:
    given = documents(sizes, 6)
    assert not given.has_pair.any()
    assert all(given.pair(i, seed=0, epoch=0).label == IGNORED for i in range(len(given)))


# pairs


def test_both_texts_are_what_the_label_says() -> None:
    given = many()
    found = pairs(given, 3)
    bounds = set(given.starts.tolist())
    owner = np.repeat(given.document, np.diff(given.starts))
    for example, (first, second, label) in found:
        begin, end = given.starts[given.stretches[example : example + 2]]
        assert second is not None
        assert first.start == begin and size(first) + size(second) == end - begin
        assert first.stop in bounds and begin < first.stop < end
        if label == NEXT:
            assert second == slice(first.stop, end)
        else:
            sentence = np.searchsorted(given.starts, second.start)
            assert given.starts[sentence] == second.start and sentence in given.sources
            assert len({owner[begin], *owner[second.start : second.stop]}) == 2
            assert len(set(owner[second.start : second.stop])) == 1
    assert {label for _, (_, _, label) in found} == {NEXT, FOREIGN}


def test_lengths_and_places_do_not_tell_the_label() -> None:
    given = many()
    found = pairs(given, 20)
    seen = np.array([[size(p.first), size(p.second), example] for example, p in found])
    labels = np.array([pair.label for _, pair in found])
    margin = 4 * math.sqrt(0.25 / len(labels))
    assert abs(labels.mean() - 0.5) < margin
    # for every column, and both lengths at once: a table of the label that was seen more often in the first half
    for columns in ([0], [1], [2], [0, 1], [0, 1, 2]):
        _, places = np.unique(seen[:, columns], axis=0, return_inverse=True)
        balance = np.zeros(places.max() + 1)
        half = len(labels) // 2
        np.add.at(balance, places[:half], labels[:half] - 0.5)
        guessed = balance[places[half:]] > 0
        assert abs((guessed == labels[half:]).mean() - 0.5) < 1.5 * margin
    # each length by itself: counts of both labels differ no more than those of a coin
    for column in (0, 1):
        values, places = np.unique(seen[:, column], return_inverse=True)
        foreign, all_ = np.bincount(places, labels, len(values)), np.bincount(places)
        score = ((foreign - all_ / 2) ** 2 / (all_ / 4)).sum()
        assert abs(score - len(values)) < 5 * math.sqrt(2 * len(values))


def test_how_a_text_begins_and_ends_does_not_tell_the_label() -> None:
    given = many(number=200)
    ends = {NEXT: [0, 0], FOREIGN: [0, 0]}
    initial = set(given.starts[:-1][np.diff(given.document, prepend=-1) != 0].tolist())
    for _, pair in pairs(given, 2):
        assert pair.second is not None
        assert pair.second.start not in initial
        ends[pair.label][int(given.ids[pair.second.stop - 1]) == STOP] += 1
    assert ends[NEXT][0] == 0
    assert ends[FOREIGN][0] < 0.005 * ends[FOREIGN][1]


def test_texts_are_drawn_evenly_from_all_other_documents() -> None:
    given = documents([[2, 2, 2]] * 2 + [[2] * 6] * 3, 6)
    drawn = [given.pair(0, seed=0, epoch=epoch) for epoch in range(2000)]
    begun = [pair.second.start for pair in drawn if pair.second and pair.label == FOREIGN]
    owner = np.repeat(given.document, np.diff(given.starts))
    # texts of 2 or 4 tokens: each sentence but the first, and for 4 tokens also but the last, of the other documents
    counts = np.bincount(owner[begun], minlength=5)
    shares = 0.5 * np.array([0, 2, 5, 5, 5]) / 17 + 0.5 * np.array([0, 1, 4, 4, 4]) / 13
    assert counts / counts.sum() == pytest.approx(shares, abs=4 * math.sqrt(0.25 / len(begun)))


def test_texts_of_several_corpora_come_from_the_same_one() -> None:
    random = np.random.default_rng(1)
    sizes = [random.integers(2, 16, random.integers(1, 30)).tolist() for _ in range(40)]
    given = documents(sizes, 40, corpora=[15, 0, 24, 1])
    owner = np.repeat(given.document, np.diff(given.starts))
    corpus = np.repeat([0, 2, 3], [15, 24, 1])
    assert given.corpus.tolist() == corpus.tolist()
    seen = set()
    for _, (first, second, label) in pairs(given, 30):
        assert second is not None
        here, there = owner[first.start], owner[second.start]
        assert corpus[here] == corpus[there] != 3  # one document alone has none to be held against
        if label == FOREIGN:
            seen.add((int(corpus[here]), int(there)))
            assert here != there
    long_enough = {d for d, lengths in enumerate(sizes[:39]) if len(lengths) > 3}
    assert {document for _, document in seen} >= long_enough


def test_pairs_of_a_corpus_are_drawn_as_if_it_were_alone() -> None:
    sizes = [[2, 3, 4, 5] * 6, [3] * 20, [4, 2] * 9]
    alone, among = documents(sizes, 12), documents([*sizes, [5, 5] * 30, [6] * 9], 12, corpora=[3, 2])
    assert pairs(alone, 3) == [(i, pair) for i, pair in pairs(among, 3) if i < len(alone)]


def test_foreign_text_never_comes_from_another_corpus() -> None:
    given = documents([[1, 9], [1, 1], [1, 9], [1, 9]], 10, corpora=[2, 2])
    assert given.has_pair.tolist() == [False, True, True, True]


def test_short_documents_are_skipped_however_many_there_are() -> None:
    given = documents([[1, 9], *[[1, 1]] * 2000, [1, 9], *[[1, 1]] * 2000], 10)
    (other,) = np.flatnonzero(given.has_pair & (given.lengths == 13))[1:]
    for epoch in range(40):
        pair = given.pair(0, seed=0, epoch=epoch)
        assert pair.second is not None
        if pair.label == FOREIGN:
            assert pair.second.start == given.starts[given.stretches[other]] + 1


def test_pairs_depend_only_on_seed_epoch_and_example() -> None:
    given = many()
    first = pairs(given, 2, seed=3)
    np.random.seed(0)
    assert pairs(many(), 2, seed=3) == first
    assert given.pair(first[5][0], seed=3, epoch=0) == first[5][1]
    labels = np.array([[pair.label for _, pair in pairs(given, 2, seed)] for seed in range(2)]).reshape(4, -1)
    sizes = np.array([[size(pair.first) for _, pair in pairs(given, 2, seed)] for seed in range(2)]).reshape(4, -1)
    for one in range(4):
        for other in range(one):
            assert (labels[one] == labels[other]).mean() == pytest.approx(0.5, abs=0.1)
            assert not np.array_equal(sizes[one], sizes[other])


# what the model reads


def test_a_pair_is_laid_out_as_by_hand() -> None:
    given = documents([[2, 1, 3], [2, 2, 2]], 9)
    assert given.ids.tolist() == [10, 1, 1, 13, 14, 1, 16, 1, 18, 1, 20, 1]
    true = given.lay_out(Pair(slice(0, 3), slice(3, 6), NEXT), 7, 8)
    assert true.ids.tolist() == [7, 10, 1, 1, 8, 13, 14, 1, 8]
    assert true.types.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert true.segments.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    other = given.lay_out(Pair(slice(0, 3), slice(8, 11), FOREIGN), 7, 8)
    assert other.ids.tolist() == [7, 10, 1, 1, 8, 18, 1, 20, 8]
    assert other.types.tolist() == true.types.tolist()
    assert other.segments.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    alone = given.lay_out(Pair(slice(0, 6), None, IGNORED), 7, 8)
    assert alone.ids.tolist() == [7, 10, 1, 1, 13, 14, 1, 8]
    assert alone.types.tolist() == [0] * 8
    assert alone.segments.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]


def test_laid_out_examples_have_the_announced_lengths() -> None:
    given = many()
    for example in range(len(given)):
        laid = given.lay_out(given.pair(example, seed=0, epoch=0), 7, 8)
        assert len(laid.ids) == len(laid.types) == len(laid.segments) == given.lengths[example] <= 43


# the loss


def test_the_loss_is_the_sum_over_pairs_by_hand() -> None:
    """Logits (0, ln 3) give probabilities 1/4 and 3/4."""
    logits = torch.tensor([[0.0, math.log(3)]] * 3)
    loss, found = next_sentence_loss(logits, torch.tensor([FOREIGN, NEXT, IGNORED]))
    assert loss.item() == pytest.approx(math.log(4 / 3) + math.log(4))
    assert found.item() == 1


def test_no_pair_gives_zero_with_a_graph() -> None:
    logits = torch.randn(3, 2, requires_grad=True)
    loss, found = next_sentence_loss(logits, torch.full((3,), IGNORED))
    assert loss.item() == 0 and found.item() == 0
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient.any()


def test_half_precision_is_summed_in_single_precision() -> None:
    logits, labels = torch.randn(4, 2).bfloat16(), torch.tensor([0, 1, 1, 0])
    assert next_sentence_loss(logits, labels)[0].dtype == torch.float32
    assert next_sentence_loss(logits.double(), labels)[0].dtype == torch.float64
