"""Distances between heads, and relevance of patterns, against plain loops."""

from __future__ import annotations

import math
import statistics
import weakref

import pytest
import torch

import guidance
from guidance import Plan, install
from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import Tokens
from guidance.probes.distance import head_distances
from guidance.probes.relevance import Relevance, among, highest_entropy, keys_of, masses, outstanding, uniform
from guidance.sites import Site
from tests.guidance.models import batch, tiny_model


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    """The mean over rows of the Jensen-Shannon divergence of smoothed rows, written out."""
    total = 0.0
    for p, q in zip(one, other, strict=True):
        p, q = ([0.999 * value + 0.001 / len(row) for value in row] for row in (p, q))
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        total += sum(a * math.log(a / c) for a, c in zip(p, m, strict=True)) / 2
        total += sum(b * math.log(b / c) for b, c in zip(q, m, strict=True)) / 2
    return total / len(one)


def test_distances_are_those_of_the_equation() -> None:
    maps = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    maps[2] = torch.eye(4, 5)
    found = head_distances(maps[:2], maps)
    for i in range(2):
        for j in range(3):
            assert float(found[i, j]) == pytest.approx(distance(maps[i].tolist(), maps[j].tolist()), abs=1e-9)
    assert found[0, 0] == 0 and 0 < found[0, 2] < math.log(2)


def test_mass_is_the_mean_attention_on_a_pattern_and_padding_counts_nothing() -> None:
    attention = torch.tensor([[[[0.2, 0.8, 0.0], [0.5, 0.5, 0.0], [0.3, 0.3, 0.4]]]])
    ids, valid = torch.tensor([[5, 6, 0]]), torch.tensor([[True, True, False]])
    following = guidance.pattern("next", ids, valid).float()
    found = masses(attention, following[:, None], valid)
    assert found.tolist() == [[[pytest.approx(0.8 / 2)]]]
    assert uniform(following[:, None], valid, is_causal=False).tolist() == [[pytest.approx(0.5 / 2)]]
    assert uniform(following[:, None], valid, is_causal=True).tolist() == [[0]]
    weights = torch.tensor([[[0.0, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]])
    both = masses(attention, torch.stack([weights, following], dim=1), valid)
    assert both.tolist() == [[[pytest.approx((0.4 + 0.5) / 2), pytest.approx(0.8 / 2)]]]


def test_chance_and_the_highest_entropy_count_the_keys_that_a_query_can_see() -> None:
    valid = torch.tensor([[True, True, True, False], [True, False, False, False]])
    previous = guidance.pattern("previous", torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0]]), valid).float()[:, None]
    chance = {causal: uniform(previous, valid, is_causal=causal)[:, 0].tolist() for causal in (False, True)}
    assert chance == {False: pytest.approx([2 / 3 / 3, 0]), True: pytest.approx([(1 / 2 + 1 / 3) / 3, 0])}
    most = {causal: highest_entropy(valid, is_causal=causal).tolist() for causal in (False, True)}
    least = math.log(2)  # of texts of one token
    assert most == {False: pytest.approx([math.log(3), least]), True: pytest.approx([math.log(6) / 3, least])}


def test_attention_among_some_tokens_is_divided_anew() -> None:
    attention = torch.tensor([[[[0.2, 0.3, 0.5], [0.6, 0.1, 0.3], [1.0, 0.0, 0.0]]]])
    kept = torch.tensor([[False, True, True]])
    found = among(attention, kept)[0, 0]
    torch.testing.assert_close(found, torch.tensor([[0, 0, 0], [0, 0.25, 0.75], [0, 0, 0]]))
    without_itself = among(attention, torch.tensor([[True, True, True]]), diagonal=False)[0, 0]
    torch.testing.assert_close(without_itself, torch.tensor([[0, 0.375, 0.625], [2 / 3, 0, 1 / 3], [1, 0, 0]]))


def test_relevance_is_the_mean_over_examples_and_only_one_layer_is_held() -> None:
    model = tiny_model("bert")
    handle = install(model, Plan())
    inputs = batch()
    valid = inputs["attention_mask"].bool()
    pattern = guidance.pattern("previous", inputs["input_ids"], inputs["attention_mask"])
    relevance = Relevance(["previous"])
    wanted = pattern.float()[:, None]
    earlier: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def watch(site: Site, attention: torch.Tensor) -> None:
        held.append(sum(map_() is not None for map_ in earlier))
        earlier.append(weakref.ref(attention))
        relevance.add(site, masses(attention, wanted, valid))

    probabilities = handle.probabilities(**inputs)
    for _ in range(2):
        relevance.begin(range(len(valid)), uniform(wanted, valid, is_causal=False))
        handle.watch(watch, **inputs)
    assert held == [0] * 2 * len(probabilities)
    for site, attention in probabilities.items():
        for head in range(site.num_heads):
            means = []
            for row in range(len(valid)):
                length = int(valid[row].sum())
                total = sum(float(attention[row, head, i, i - 1]) for i in range(1, length))
                means.append(total / length)
            assert float(relevance.of("previous")[site][head]) == pytest.approx(sum(means) / len(means), abs=1e-6)
            for half, own in (("first", means[::2]), ("second", means[1::2])):
                assert float(relevance.of("previous", half)[site][head]) == pytest.approx(sum(own) / len(own), abs=1e-6)
            twice = [*means, *means]
            error = statistics.stdev(twice) / math.sqrt(len(twice))
            assert float(relevance.standard_error("previous")[site][head]) == pytest.approx(error, abs=1e-6)
    lengths = valid.sum(-1).tolist()
    assert relevance.by_chance("previous") == pytest.approx(sum((n - 1) / n / n for n in lengths) / len(lengths))


def test_tokens_that_occur_once_have_no_matching_token() -> None:
    ids, valid = torch.tensor([[5, 6, 5, 7, 0]]), torch.tensor([[True, True, True, True, False]])
    tokens = Tokens(ids, valid, {}, {})
    found = keys_of(read_pattern("matching_token"), tokens)[0]
    assert found.tolist() == [[1, 0, 1, 0, 0], [0] * 5, [1, 0, 1, 0, 0], [0] * 5, [0] * 5]
    torch.testing.assert_close(keys_of(read_pattern("next"), tokens), guidance.pattern("next", ids, valid).float())


def test_of_ten_heads_none_stands_out_and_of_eleven_one_may() -> None:
    for number in (10, 11):
        values = torch.zeros(number)
        values[3] = 1.0
        assert outstanding(values).tolist() == [number > 10 and place == 3 for place in range(number)]
