"""Distances between heads, and relevance of patterns, against plain loops."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

import guidance
from guidance import Plan, install
from guidance.probes.distance import head_distances
from guidance.probes.relevance import Relevance, keys_of, mass, outstanding
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
    some = head_distances(maps[:1], maps[1:2], torch.tensor([True, False, True, False]))
    assert float(some) == pytest.approx(distance(maps[0, ::2].tolist(), maps[1, ::2].tolist()), abs=1e-9)


def test_mass_is_the_mean_attention_on_a_pattern_and_padding_counts_nothing() -> None:
    attention = torch.tensor([[[[0.2, 0.8, 0.0], [0.5, 0.5, 0.0], [0.3, 0.3, 0.4]]]])
    ids, valid = torch.tensor([[5, 6, 0]]), torch.tensor([[True, True, False]])
    found = mass(attention, guidance.pattern("next", ids, valid), valid)
    assert found.tolist() == [[pytest.approx(0.8 / 2)]]
    weights = torch.tensor([[[0.0, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]])
    assert mass(attention, weights, valid).tolist() == [[pytest.approx((0.4 + 0.5) / 2)]]


def test_relevance_is_the_mean_over_examples_and_only_one_layer_is_held() -> None:
    model = tiny_model("bert")
    handle = install(model, Plan())
    inputs = batch()
    valid = inputs["attention_mask"].bool()
    pattern = guidance.pattern("previous", inputs["input_ids"], inputs["attention_mask"])
    relevance = Relevance()
    earlier: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def watch(site: Site, attention: torch.Tensor) -> None:
        held.append(sum(map_() is not None for map_ in earlier))
        earlier.append(weakref.ref(attention))
        relevance.add("previous", site, mass(attention, pattern, valid))

    probabilities = handle.probabilities(**inputs)
    for _ in range(2):
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


def test_tokens_that_occur_once_have_no_matching_token() -> None:
    ids, valid = torch.tensor([[5, 6, 5, 7, 0]]), torch.tensor([[True, True, True, True, False]])
    found = keys_of("matching_token", ids, valid)[0]
    assert found.tolist() == [[1, 0, 1, 0, 0], [0] * 5, [1, 0, 1, 0, 0], [0] * 5, [0] * 5]
    torch.testing.assert_close(keys_of("next", ids, valid), guidance.pattern("next", ids, valid).float())


def test_of_ten_heads_none_stands_out_and_of_eleven_one_may() -> None:
    for number in (10, 11):
        values = torch.zeros(number)
        values[3] = 1.0
        assert outstanding(values).tolist() == [number > 10 and place == 3 for place in range(number)]
