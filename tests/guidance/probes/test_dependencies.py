"""Attention as a dependency parser, on sentences worked by hand."""

from __future__ import annotations

import pytest
import torch

from guidance.probes.dependencies import ROOT, Parser, most_attended, offset_baseline

# "the dog sees cats": heads and relations
HEADS, RELATIONS = [1, 2, ROOT, 2], ["det", "nsubj", "root", "obj"]


def test_a_head_that_looks_at_heads_is_a_perfect_parser_in_one_direction() -> None:
    towards = torch.tensor([[0.6, 0.4, 0.0, 0.0], [0.3, 0.3, 0.4, 0.0], [0.2, 0.2, 0.3, 0.3], [0.1, 0.1, 0.5, 0.3]])
    parser = Parser()
    parser.add(torch.stack([towards, towards.T]), HEADS, RELATIONS)
    assert parser.total == {"det": 1, "nsubj": 1, "obj": 1}
    # the other way round "dog", which "the" looks at most, is not found from "sees"
    assert parser.attachment().tolist() == [[1.0, pytest.approx(2 / 3)], [pytest.approx(2 / 3), 1.0]]
    assert parser.scores()["obj"][:, 0].tolist() == [1.0, 1.0]
    assert parser.scores()["nsubj"][:, 0].tolist() == [1.0, 0.0]


def test_a_word_does_not_choose_itself_and_ties_are_never_right() -> None:
    attention = torch.tensor([[[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]]])
    assert most_attended(attention).tolist() == [[-1, 2, -1]]
    assert most_attended(torch.tensor([[[1.0]]])).tolist() == [[-1]]
    assert most_attended(torch.tensor([[[0.9, 0.1], [0.9, 0.1]]])).tolist() == [[1, 0]]


def test_the_baseline_is_the_best_distance_of_each_relation() -> None:
    sentences = [
        (HEADS, RELATIONS),
        ([1, 2, ROOT], ["det", "nsubj", "root"]),
        ([2, 2, ROOT], ["det", "nsubj", "punct"]),
    ]
    assert offset_baseline(sentences) == {
        "det": (1, pytest.approx(2 / 3)),
        "nsubj": (1, 1.0),
        "obj": (-1, 1.0),
    }
    assert offset_baseline([([30, *[ROOT] * 30], ["obj", *["root"] * 30])]) == {"obj": (1, 0.0)}
