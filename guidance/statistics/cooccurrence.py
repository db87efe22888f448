"""How strongly tokens expect each other, from counts of how often they stand together.

Counts C are symmetric and come as parts of their upper triangle: arrays i, j (i ≤ j) and count.  They are counts of
ordered pairs of distinct positions, so that C_ii counts each pair of equal tokens twice, as C_ij and C_ji together do.

Source: Xing et al. 2020, equations 9 and 10.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.patterns.features import Cooccurrence

__all__ = ["Pairs", "context_scores", "cooccurrence_table", "totals_of"]

Pairs = Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Parts of an upper triangle, i, j and count, each pair in one of them; it is gone through more than once."""


def totals_of(pairs: Pairs, size: int) -> np.ndarray:
    """Σ_z C_iz for each row i, exactly: int64 (size,)."""
    totals = np.zeros(size, np.int64)
    for i, j, count in pairs:
        np.add.at(totals, i, count)
        apart = i != j
        np.add.at(totals, j[apart], count[apart])
    return totals


def context_scores(
    pairs: Pairs, size: int, *, totals: np.ndarray | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """S: how strongly token i expects each of the others, ``dtype`` (size, size) in [0, 1]; row i is token i's.

    Equation 9 divides C_ij by the totals of i and of j, equation 10 stretches each row from 0, its smallest value, to 1,
    its largest.  The total of i is one factor of a whole row and cancels there; what is left, C_ij / total_j, is one
    division in float64 of exact numbers, so that equal ratios are equal and a row that is constant stays so.  0/0 is 0,
    a constant row is all 0.  S is not symmetric.

    The pairs are gone through twice, or three times; of all (i, j) at once nothing but S is held.

    Args:
        totals: what to divide by, for example how often each token occurs; Σ_z C_iz when not given.

    Raises:
        InputError: pairs outside the table, negative counts, or totals that are 0 where there are pairs.
    """
    totals = (totals_of(_checked(pairs, size), size) if totals is None else totals).astype(np.float64)
    if totals.shape != (size,):
        raise InputError(f"{size} totals are needed, one for each row, not {totals.shape}")
    lowest, highest = np.full(size, np.inf), np.zeros(size)
    cells = np.zeros(size, np.int64)
    for i, _, value in _ratios(_checked(pairs, size), totals):
        np.minimum.at(lowest, i, value)
        np.maximum.at(highest, i, value)
        cells += np.bincount(i, minlength=size)
    lowest[cells < size] = 0  # pairs that never were
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
    """The table that the pattern ``conflict`` reads.

    Args:
        ids: the token id of each row.
        vocabulary: number of token ids there are.
        pairs: counts between rows; see `context_scores`.
    """
    rows_V = torch.full((vocabulary,), -1, dtype=torch.int64)
    rows_V[torch.from_numpy(np.array(ids, np.int64))] = torch.arange(len(ids))
    return Cooccurrence(rows_V, context_scores(pairs, len(ids), totals=totals, dtype=dtype))


def _checked(pairs: Pairs, size: int) -> Pairs:
    for i, j, count in pairs:
        if len(i) and not (i.min() >= 0 and (i <= j).all() and j.max() < size and count.min() >= 0):
            raise InputError(f"pairs are i ≤ j below {size} with counts that are not negative; these are others")
        yield i, j, count


def _ratios(pairs: Pairs, totals: np.ndarray) -> Pairs:
    """C_ij / total_j for all of C, below its diagonal too."""
    for i, j, count in pairs:
        if not (totals[i] * totals[j])[count > 0].all():
            raise InputError("a total is 0 where there are pairs")
        for row, column, number in ((i, j, count), (j[i != j], i[i != j], count[i != j])):
            yield row, column, np.divide(number, totals[column], out=np.zeros(len(row)), where=number > 0)
