"""Drawing replacements of masked tokens, and the loss of the discriminator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from guidance.objectives.masked_lm import cross_entropy
from guidance.objectives.replaced_token import Unigram, draw, two_classes, uniform_numbers
from guidance.objectives.selection import put_at

SEEDS = {"seed": 3, "epoch": 5, "example": 17}


# numbers


def test_the_numbers_depend_only_on_seed_epoch_and_example() -> None:
    first = uniform_numbers(50, **SEEDS)
    np.random.seed(0)
    torch.manual_seed(0)
    assert np.array_equal(first, uniform_numbers(50, **SEEDS))
    assert np.array_equal(first[:20], uniform_numbers(20, **SEEDS))
    for name in SEEDS:
        assert not np.array_equal(first, uniform_numbers(50, **(SEEDS | {name: SEEDS[name] + 1}))), name


def test_the_numbers_are_independent_of_those_that_choose_masked_tokens() -> None:
    """Masking chooses tokens with small numbers; with the same numbers, all drawn tokens would have low ids."""
    masking = np.random.Generator(np.random.Philox(key=[3, 5], counter=[0, 0, 0, 17])).random(100_000)
    assert abs(np.corrcoef(masking, uniform_numbers(100_000, **SEEDS))[0, 1]) < 0.02


# drawing


def test_tokens_are_drawn_by_the_inverse_of_the_cumulative_distribution() -> None:
    """By hand: the ids 2, 4 and 5 have probabilities 1/2, 1/4 and 1/4."""
    logits = torch.tensor([9.0, 9.0, math.log(2), 9.0, 0.0, 0.0]).expand(7, -1)
    numbers = torch.tensor([0.0, 0.25, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, numbers, torch.tensor([2, 4, 5])).tolist() == [2, 2, 2, 4, 4, 5, 5]


def test_the_unigram_distribution_is_that_of_the_counts() -> None:
    """By hand: the id 5 three times, 7 once, 6 never; 0 and 9 are not drawn."""
    ids = np.array([0, 5, 5, 9, 7, 0, 5], np.uint16)
    unigram = Unigram.of(ids, np.array([5, 6, 7]))
    assert unigram.draw(torch.tensor([0.0, 0.74, 0.76, 1 - 2**-53], dtype=torch.float64)).tolist() == [5, 5, 7, 7]
    assert unigram.draw(torch.zeros(0, dtype=torch.float64)).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_drawn_tokens_follow_the_softmax(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(40, generator=generator)).to(dtype)
    ordinary = torch.arange(5, 40)
    size = 60_000
    found = draw(logits.expand(size, -1), torch.from_numpy(uniform_numbers(size, **SEEDS)), ordinary)
    counts = torch.bincount(found, minlength=40)
    assert counts[:5].sum() == 0
    expected = size * logits[5:].double().softmax(-1)
    # chi-square of 34 degrees of freedom: above 75 once in 15,000 times
    assert ((counts[5:] - expected).square() / expected).sum() < 75


def test_unigram_tokens_follow_the_counts() -> None:
    ids = np.random.default_rng(0).zipf(1.4, 5000).clip(1, 30)
    unigram, size = Unigram.of(ids, np.arange(2, 31)), 60_000
    counts = torch.bincount(unigram.draw(torch.from_numpy(uniform_numbers(size, **SEEDS))), minlength=31)
    wanted = torch.from_numpy(np.bincount(ids, minlength=31)[2:]).double()
    expected = size * wanted / wanted.sum()
    assert counts[:2].sum() == 0 and not counts[2:][expected == 0].any()
    seen = expected > 0
    assert ((counts[2:] - expected)[seen].square() / expected[seen]).sum() < 75


def test_non_finite_logits_still_give_valid_tokens() -> None:
    """The loss reports the error; an id outside the vocabulary would crash the process."""
    logits = torch.full((3, 8), torch.nan)
    found = draw(logits, torch.tensor([0.0, 0.5, 0.9]), torch.tensor([3, 4]))
    assert set(found.tolist()) <= {3, 4}


def test_drawing_has_no_gradient() -> None:
    logits = torch.randn(4, 8, requires_grad=True)
    assert not draw(logits, torch.rand(4), torch.arange(8)).requires_grad


def test_put_at_changes_a_copy() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert put_at(ids, torch.tensor([1, 5]), torch.tensor([8, 9])).tolist() == [[1, 8, 3], [4, 5, 9]]
    assert put_at(ids, torch.tensor([3]), 0).tolist() == [[1, 2, 3], [0, 5, 6]]
    assert ids.tolist() == [[1, 2, 3], [4, 5, 6]]


# the loss


def test_the_loss_is_the_binary_cross_entropy_by_hand() -> None:
    """Numbers 0, ln 3 and -ln 3: replaced with probabilities 1/2, 3/4 and 1/4."""
    logits = two_classes(torch.tensor([0.0, math.log(3), -math.log(3)]))
    loss = cross_entropy(logits, torch.tensor([0, 1, 1]))
    assert loss.item() == pytest.approx(math.log(2) + math.log(4 / 3) + math.log(4))
    numbers = torch.randn(50, dtype=torch.float64)
    labels = torch.arange(50) % 3 // 2
    torch.testing.assert_close(
        cross_entropy(two_classes(numbers), labels),
        torch.nn.functional.binary_cross_entropy_with_logits(numbers, labels.double(), reduction="sum"),
    )


def test_no_token_gives_zero_with_a_graph() -> None:
    numbers = torch.randn(0, requires_grad=True)
    loss = cross_entropy(two_classes(numbers), torch.zeros(0, dtype=torch.int64))
    assert loss.item() == 0 and loss.requires_grad


def test_half_precision_is_summed_in_single_precision() -> None:
    logits = two_classes(torch.randn(5).bfloat16())
    assert cross_entropy(logits, torch.zeros(5, dtype=torch.int64)).dtype == torch.float32
