"""Induction scores of heads that are made by hand."""

from __future__ import annotations

import pytest
import torch

from guidance.errors import InputError
from guidance.probes.induction import induction_scores, repeated_tokens
from guidance.probes.relevance import even_attention

START, LENGTH = 1, 4
SIZE = START + 2 * LENGTH + 1


def looking(*keys: int) -> torch.Tensor:
    """A head whose queries of the second copy, 5 to 8, look at these keys, and all others at the first token, (T, T)."""
    rows = torch.zeros(SIZE, SIZE)
    rows[:, 0] = 1
    for query, key in zip(range(START + LENGTH, START + 2 * LENGTH), keys, strict=True):
        rows[query] = torch.nn.functional.one_hot(torch.tensor(key), SIZE)
    return rows


def test_each_head_has_the_score_of_what_it_does() -> None:
    """The text is ``<s> a b c d a b c d </s>``."""
    heads = {
        "induction": looking(2, 3, 4, 5),
        "duplicate": looking(1, 2, 3, 4),
        "previous": looking(4, 5, 6, 7),
        "half": looking(2, 3, 0, 0),
        "none": looking(0, 0, 0, 0),
    }
    found = induction_scores(torch.stack([*heads.values()])[None], START, LENGTH)
    assert found.shape == (1, 5, 3)
    assert found[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0, 0], [0, 0, 0]]


def test_scores_are_those_of_plain_loops() -> None:
    attention = torch.rand(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).softmax(-1)
    found = induction_scores(attention, START, LENGTH)
    queries = range(START + LENGTH, START + 2 * LENGTH)
    for b in range(2):
        for h in range(3):
            for number, back in enumerate((LENGTH - 1, LENGTH, 1)):
                expected = sum(float(attention[b, h, q, q - back]) for q in queries) / LENGTH
                assert float(found[b, h, number]) == pytest.approx(expected)


def test_even_attention_by_hand() -> None:
    valid = torch.ones(1, SIZE, dtype=torch.bool)
    both = [induction_scores(even_attention(valid, is_causal=causal), START, LENGTH)[0, 0] for causal in (False, True)]
    assert both[0].tolist() == pytest.approx([1 / SIZE] * 3)
    # a query at place q sees q + 1 tokens
    assert both[1].tolist() == pytest.approx([(1 / 6 + 1 / 7 + 1 / 8 + 1 / 9) / 4] * 3)


def test_tokens_are_drawn_without_repetition_and_repeated_once() -> None:
    ids = torch.tensor([3, 5, 8, 9, 11])
    made = repeated_tokens(ids, 20, 4, seed=1)
    assert made.shape == (20, 8) and torch.equal(made[:, :4], made[:, 4:])
    assert all(len(set(row.tolist())) == 4 and set(row.tolist()) <= set(ids.tolist()) for row in made)
    assert torch.equal(made, repeated_tokens(ids, 20, 4, seed=1))
    assert not torch.equal(made, repeated_tokens(ids, 20, 4, seed=2))
    with pytest.raises(InputError, match="6 different tokens cannot be drawn from 5 ordinary tokens"):
        repeated_tokens(ids, 1, 6, seed=0)
