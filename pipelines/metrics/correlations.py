"""Correlations of answers with the truth, by scikit-learn and scipy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def matthews(gold: Sequence[str], predicted: Sequence[str]) -> float | None:
    """The Matthews correlation; None if all true labels are the same, and 0 if all predicted ones are."""
    if len(set(gold)) < 2:
        return None
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(gold, predicted))


def matthews_of_sums(right: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> float:
    """The Matthews correlation from how often each class is right, predicted and true, (classes,); 0 if all labels of a side are
    the same.  It is much faster than `matthews`, for draws of a bootstrap.

    Source: Gorodkin 2004.
    """
    total = true.sum()
    square = (total**2 - (predicted**2).sum()) * (total**2 - (true**2).sum())
    return float((right.sum() * total - (predicted * true).sum()) / square**0.5) if square > 0 else 0.0


def pearson(gold: ArrayLike, predicted: ArrayLike) -> float | None:
    """Pearson's correlation; None if all true numbers are the same, and 0 if all predicted ones are."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, gold, predicted)


def spearman(gold: ArrayLike, predicted: ArrayLike) -> float | None:
    """Spearman's correlation of ranks; None and 0 as in `pearson`."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, gold, predicted)


def _correlation(measure: Any, gold: ArrayLike, predicted: ArrayLike) -> float | None:
    if not np.ptp(gold):
        return None
    return float(measure(gold, predicted).statistic) if np.ptp(predicted) else 0.0
