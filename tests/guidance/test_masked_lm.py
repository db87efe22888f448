"""Masking: its proportions, the tokens that it never masks, and what it depends on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from guidance.objectives.masked_lm import IGNORED, Masker, cross_entropy, num_chosen

MASK, SPECIAL, VOCABULARY = 4, (0, 1, 2, 3, 4), 50
MASKER = Masker(MASK, SPECIAL, VOCABULARY)


def ids(length: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.concatenate([[0], random.integers(5, VOCABULARY, length - 2), [2]]).astype(np.int32)


def test_fifteen_percent_are_chosen_of_which_80_are_masked_10_replaced_and_10_kept() -> None:
    given = ids(200_002)
    seen, labels = MASKER(given, seed=1, epoch=0, example=0)
    chosen = labels != IGNORED
    assert chosen.mean() == pytest.approx(0.15, abs=0.004)
    assert np.array_equal(labels[chosen], given[chosen]) and np.array_equal(seen[~chosen], given[~chosen])
    masked, kept = seen[chosen] == MASK, seen[chosen] == given[chosen]
    assert masked.mean() == pytest.approx(0.8, abs=0.01)
    # one replacement in 45 is the token itself
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 45, abs=0.01)
    replaced = seen[chosen][~masked & ~kept]
    counts = np.bincount(replaced, minlength=VOCABULARY)
    assert counts[:5].sum() == 0
    assert (counts[5:] > 0).all() and counts[5:].max() < 1.5 * counts[5:].mean()


def test_special_tokens_are_neither_chosen_nor_drawn() -> None:
    always = Masker(MASK, SPECIAL, VOCABULARY, probability=1.0)
    given = np.array([0, 7, 1, 8, 2, 3, 4, 9] * 200)
    seen, labels = always(given, seed=0, epoch=0, example=0)
    special = np.isin(given, SPECIAL)
    assert (labels[special] == IGNORED).all() and np.array_equal(seen[special], given[special])
    assert np.array_equal(labels[~special], given[~special])
    assert not np.isin(seen[~special], (0, 1, 2, 3)).any()


def test_the_choice_depends_only_on_seed_epoch_and_example() -> None:
    given = ids(400)
    place = {"seed": 3, "epoch": 5, "example": 17}
    first = MASKER(given, **place)
    np.random.seed(0)
    for other in range(5):
        MASKER(ids(50, other), seed=3, epoch=5, example=other)
    again = Masker(MASK, SPECIAL, VOCABULARY)(given.copy(), **place)
    assert all(map(np.array_equal, first, again))
    for name in place:
        assert not np.array_equal(first[1], MASKER(given, **(place | {name: place[name] + 1}))[1]), name


def test_neighbouring_examples_and_epochs_draw_unrelated_choices() -> None:
    given = ids(20_002)
    choices = [
        MASKER(given, seed=0, epoch=epoch, example=example)[1] != IGNORED for epoch in (0, 1) for example in (0, 1, 2)
    ]
    for a in range(6):
        for b in range(a):
            assert (choices[a] & choices[b]).mean() == pytest.approx(0.15**2, abs=0.006)


def test_inputs_are_not_modified_and_empty_examples_work() -> None:
    given = ids(30)
    before = given.copy()
    MASKER(given, seed=0, epoch=0, example=0)
    assert np.array_equal(given, before)
    seen, labels = MASKER(np.array([], dtype=np.int64), seed=0, epoch=0, example=0)
    assert len(seen) == len(labels) == 0


def test_the_loss_is_the_sum_over_chosen_tokens_by_hand() -> None:
    """Three tokens of two kinds; logits (0, ln 3) give probabilities 1/4 and 3/4."""
    logits = torch.tensor([[[0.0, math.log(3)]] * 3])
    labels = torch.tensor([[1, IGNORED, 0]])
    assert cross_entropy(logits, labels).item() == pytest.approx(math.log(4 / 3) + math.log(4))
    assert num_chosen([np.array([1, IGNORED, 0]), np.array([IGNORED])]) == 2


def test_no_chosen_token_gives_zero_with_a_graph() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((2, 3), IGNORED))
    assert loss.item() == 0
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.shape == logits.shape and not gradient.any()


def test_half_precision_logits_are_summed_in_single_precision() -> None:
    logits = torch.randn(1, 4, 9).bfloat16()
    labels = torch.tensor([[1, 2, IGNORED, 8]])
    assert cross_entropy(logits, labels).dtype == torch.float32
    torch.testing.assert_close(cross_entropy(logits, labels), cross_entropy(logits.float(), labels))
    assert cross_entropy(logits.double(), labels).dtype == torch.float64
