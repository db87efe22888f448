"""Scores of co-occurrence follow equations 9 and 10 for any counts and any division into parts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from guidance.errors import InputError
from guidance.statistics.cooccurrence import context_scores, cooccurrence_table, totals_of

Parts = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


def parts_of(counts: np.ndarray, rows_each: int = 3) -> Parts:
    """The pairs that occur in the upper triangle of a matrix, in parts of some rows."""
    found = []
    for first in range(0, len(counts), rows_each):
        i, j = np.triu(counts, 0)[first : first + rows_each].nonzero()
        i = i + first
        found.append((i.astype(np.int32), j.astype(np.int32), counts[i, j]))
    return found


def written_out(counts: np.ndarray, totals: list[int] | None = None) -> list[list[float]]:
    """Equations 9 and 10 with plain loops and exact fractions."""
    size = len(counts)
    sums = totals or [sum(int(counts[i, z]) for z in range(size)) for i in range(size)]
    scores = []
    for i in range(size):
        row = [
            Fraction(int(counts[i, j]), sums[i] * sums[j]) if sums[i] * sums[j] else Fraction(0) for j in range(size)
        ]
        low, high = min(row), max(row)
        scores.append([float((value - low) / (high - low)) if high > low else 0.0 for value in row])
    return scores


def random_counts(size: int, seed: int, density: float) -> np.ndarray:
    random = np.random.default_rng(seed)
    half = np.triu(random.integers(1, 50, (size, size)) * (random.random((size, size)) < density))
    counts = half + np.triu(half, 1).T
    counts[np.diag_indices(size)] *= 2
    return counts.astype(np.int64)


def test_scores_match_a_case_worked_by_hand() -> None:
    # sentences "a b a" and "b c": a occurs twice with itself and twice with b
    counts = np.array([[2, 2, 0], [2, 0, 1], [0, 1, 0]])
    assert totals_of(parts_of(counts), 3).tolist() == [4, 3, 1]
    scores = context_scores(parts_of(counts), 3)
    assert torch.allclose(scores, torch.tensor([[0.75, 1.0, 0.0], [0.5, 0.0, 1.0], [0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("density", [0.05, 0.4, 1.0])
@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_scores_match_the_equations(size: int, density: float) -> None:
    for seed in range(5):
        counts = random_counts(size, seed, density)
        scores = context_scores(parts_of(counts, 1 + seed), size, dtype=torch.float64)
        assert torch.allclose(scores, torch.tensor(written_out(counts), dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("size", [3, 15])
def test_counts_can_be_divided_by_occurrences(size: int) -> None:
    counts = random_counts(size, 3, 0.5)
    totals = np.random.default_rng(0).integers(1, 90, size)
    scores = context_scores(parts_of(counts), size, totals=totals, dtype=torch.float64)
    expected = written_out(counts, totals.tolist())
    assert torch.allclose(scores, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_rows_go_from_0_to_1_and_the_matrix_is_not_symmetric() -> None:
    scores = context_scores(parts_of(random_counts(30, 1, 0.5)), 30)
    assert float(scores.min()) == 0 and bool((scores.amax(1) == 1).all())
    assert not torch.equal(scores, scores.T)


def test_a_token_without_pairs_has_scores_of_zero() -> None:
    counts = random_counts(8, 2, 1.0)
    counts[3], counts[:, 3] = 0, 0
    scores = context_scores(parts_of(counts), 8)
    assert bool(torch.isfinite(scores).all()) and not scores[3].any() and not scores[:, 3].any()
    assert not context_scores([], 4).any()


def test_a_constant_row_is_zero_even_if_division_rounds() -> None:
    # row i is proportional to the totals, so all its ratios are equal, even where the division rounds
    random = np.random.default_rng(7)
    for _ in range(50):
        weights = random.integers(1, 10**6, 9)
        counts = np.outer(weights, weights)  # the totals of such a matrix are proportional to the weights
        assert not context_scores(parts_of(counts), 9).any()


def test_counts_beyond_float_precision_are_summed_exactly() -> None:
    large = 2**53 + 1
    parts = [(np.array([0]), np.array([0]), np.array([large])), (np.array([0]), np.array([1]), np.array([2**31 + 7]))]
    assert totals_of(parts, 2).tolist() == [large + 2**31 + 7, 2**31 + 7]
    assert bool(torch.isfinite(context_scores(parts, 2)).all())


def test_half_precision_is_the_rounded_matrix() -> None:
    parts = parts_of(random_counts(25, 5, 0.6))
    half = context_scores(parts, 25, dtype=torch.float16)
    assert half.dtype == torch.float16
    assert torch.equal(half, context_scores(parts, 25, dtype=torch.float64).to(torch.float16))


def test_scores_do_not_depend_on_the_parts_and_their_order() -> None:
    counts = random_counts(20, 6, 0.5)
    whole = context_scores(parts_of(counts, 20), 20)
    for rows_each in (1, 7):
        assert torch.equal(context_scores(parts_of(counts, rows_each)[::-1], 20), whole)


def test_counts_are_not_modified() -> None:
    parts = parts_of(random_counts(6, 0, 0.8))
    before = [tuple(column.copy() for column in part) for part in parts]
    context_scores(parts, 6)
    assert all((a == b).all() for part, old in zip(parts, before, strict=True) for a, b in zip(part, old, strict=True))


@pytest.mark.parametrize(("i", "j", "count"), [([1], [0], [1]), ([0], [3], [1]), ([-1], [0], [1]), ([0], [1], [-2])])
def test_pairs_outside_an_upper_triangle_are_refused(i: list[int], j: list[int], count: list[int]) -> None:
    with pytest.raises(InputError, match="0 ≤ i ≤ j < 3"):
        context_scores([(np.array(i), np.array(j), np.array(count))], 3)


def test_totals_of_zero_are_refused_for_tokens_with_pairs() -> None:
    parts = [(np.array([0]), np.array([1]), np.array([5]))]
    with pytest.raises(InputError, match="a token that has pairs is 0"):
        context_scores(parts, 2, totals=np.array([3, 0]))
    with pytest.raises(InputError, match="expected 2 totals"):
        context_scores(parts, 2, totals=np.array([3]))


def test_the_table_maps_ids_to_rows() -> None:
    parts = parts_of(random_counts(3, 0, 1.0))
    table = cooccurrence_table(np.array([7, 2, 9]), 12, parts)
    assert table.rows_V.tolist() == [-1, -1, 1, -1, -1, -1, -1, 0, -1, 2, -1, -1]
    assert torch.equal(table.scores_NN, context_scores(parts, 3))
