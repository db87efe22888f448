"""Scores of how strongly tokens expect each other, from counts of how often they occur together.

Counts C are symmetric and come as parts of their upper triangle: arrays i, j (i ≤ j) and count.  They count ordered pairs
of distinct positions, so C_ii counts each pair of equal tokens twice, just as C_ij and C_ji together do.

Source: Xing et al. 2020, equations 9 and 10.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.patterns.features import Cooccurrence

Pairs = Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Parts (i, j, count) of an upper triangle; each pair is in exactly one part.  Must allow iterating more than once."""


def totals_of(pairs: Pairs, size: int) -> np.ndarray:
    """The exact row sums Σ_z C_iz, int64 (size,)."""
    totals = np.zeros(size, np.int64)
    for i, j, count in pairs:
        np.add.at(totals, i, count)
        apart = i != j
        np.add.at(totals, j[apart], count[apart])
    return totals


def context_scores(
    pairs: Pairs, size: int, *, totals: np.ndarray | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """S (size, size) in [0, 1]: S_ij says how strongly token i expects token j.

    Equation 9 divides C_ij by the totals of i and of j.  Equation 10 rescales each row so that its smallest value becomes 0
    and its largest 1.  The total of i is a common factor of its row, so it cancels.  What remains, C_ij / total_j, is a
    single float64 division of exact numbers, so equal ratios give equal values and a constant row stays constant.  0/0
    gives 0, and a constant row gives all 0.  S is not symmetric.

    Iterates over the pairs two or three times; besides S, memory holds no table of size (size, size).

    Args:
        totals: the totals to divide by, for example how often each token occurs; by default Σ_z C_iz.
    """
    totals = (totals_of(_checked(pairs, size), size) if totals is None else totals).astype(np.float64)
    if totals.shape != (size,):
        raise InputError(f"expected {size} totals, one for each row, found the shape {totals.shape}")
    lowest, highest = np.full(size, np.inf), np.zeros(size)
    cells = np.zeros(size, np.int64)
    for i, _, value in _ratios(_checked(pairs, size), totals):
        np.minimum.at(lowest, i, value)
        np.maximum.at(highest, i, value)
        cells += np.bincount(i, minlength=size)
    lowest[cells < size] = 0  # pairs that do not occur count as 0
    width = np.where(highest > lowest, highest - lowest, np.inf)
    scores = torch.zeros(size, size, dtype=dtype)
    table = scores.numpy()
    for i, j, value in _ratios(pairs, totals):
        table[i, j] = (value - lowest[i]) / width[i]
    return scores


def cooccurrence_table(
    ids: np.ndarray,
    vocabulary: int,
    pairs: Pairs,
    *,
    totals: np.ndarray | None = None,
    dtype: torch.dtype = torch.float32,
) -> Cooccurrence:
    """The table that the pattern ``conflict`` needs.

    Args:
        ids: the token id of each row.
        vocabulary: size of the tokenizer's vocabulary.
        pairs: counts between rows; see `context_scores`.
    """
    rows_V = torch.full((vocabulary,), -1, dtype=torch.int64)
    rows_V[torch.from_numpy(np.array(ids, np.int64))] = torch.arange(len(ids))
    return Cooccurrence(rows_V, context_scores(pairs, len(ids), totals=totals, dtype=dtype))


def _checked(pairs: Pairs, size: int) -> Pairs:
    for i, j, count in pairs:
        if len(i) and not (i.min() >= 0 and (i <= j).all() and j.max() < size and count.min() >= 0):
            raise InputError(f"pairs must have 0 ≤ i ≤ j < {size} and counts from 0; some do not")
        yield i, j, count


def _ratios(pairs: Pairs, totals: np.ndarray) -> Pairs:
    """C_ij / total_j for all of C, including below the diagonal."""
    for i, j, count in pairs:
        if not (totals[i] * totals[j])[count > 0].all():
            raise InputError("the total of a token that has pairs is 0")
        for row, column, number in ((i, j, count), (j[i != j], i[i != j], count[i != j])):
            yield row, column, np.divide(number, totals[column], out=np.zeros(len(row)), where=number > 0)
