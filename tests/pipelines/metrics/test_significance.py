"""Tests of significance, against scipy, cases worked by hand, and what must be so for systems that do not differ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from guidance.errors import InputError
from pipelines.metrics.significance import detectable, holm, mcnemar, paired_bootstrap, paired_t

DIFFERENCES = [0.5, 1.0, 0.2, 0.9]


def test_paired_t_is_that_of_scipy() -> None:
    from scipy import stats

    found, expected = paired_t(DIFFERENCES), stats.ttest_1samp(DIFFERENCES, 0.0)
    interval = expected.confidence_interval(0.95)
    assert found.effect == pytest.approx(0.65)
    assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, interval.low, interval.high))


def test_folds_widen_the_interval_by_the_correction() -> None:
    plain, folds = paired_t(DIFFERENCES), paired_t(DIFFERENCES, shared_folds=True)
    # 1/4 becomes 1/4 + 1/3
    assert (folds.high - folds.low) / (plain.high - plain.low) == pytest.approx((7 / 12 / (1 / 4)) ** 0.5)
    assert folds.p > plain.p
    # of the three other folds a fifth is for validation: 1/4 + 1/2.4
    held = paired_t(DIFFERENCES, shared_folds=True, held_out=0.2)
    assert (held.high - held.low) / (plain.high - plain.low) == pytest.approx((8 / 12 / (1 / 4)) ** 0.5)


@pytest.mark.parametrize(
    ("values", "p"), [([], math.nan), ([1.0], math.nan), ([0.0, 0.0], 1.0), ([1.0, 1.0], math.nan)]
)
def test_paired_t_of_few_or_equal_values(values: list[float], p: float) -> None:
    assert paired_t(values).p == pytest.approx(p, nan_ok=True)


def test_mcnemar_by_hand() -> None:
    # five changes for the better, one for the worse: 2 * (1 + 6) / 64
    first = [False] * 5 + [True] + [True] * 4
    second = [True] * 5 + [False] + [True] * 4
    found = mcnemar(first, second)
    assert (found.effect, found.p, found.n) == (pytest.approx(0.4), pytest.approx(14 / 64), 10)
    # (5 - 1) / 12, and 1.96 times the root of ((6 + 1) / 12 - (4 / 12)^2) / 12
    assert (found.low, found.high) == (pytest.approx(1 / 3 - 0.3888, abs=1e-4), pytest.approx(1 / 3 + 0.3888, abs=1e-4))
    assert mcnemar([False] * 5, [True] * 5).high == 1.0
    assert mcnemar(first, first).p == 1.0
    with pytest.raises(InputError, match="10 examples, the other 9"):
        mcnemar(first, second[1:])


@pytest.mark.parametrize("shares", [(0.05, 0.05), (0.02, 0.1), (0.3, 0.1)])
def test_the_interval_of_two_accuracies_holds_the_true_difference_nineteen_times_of_twenty(
    shares: tuple[float, float],
) -> None:
    worse, better = shares
    draw = np.random.default_rng(0).random((400, 150))
    # a draw below the first share is right in the first system alone, one above 1 less the second share in the second alone
    found = [mcnemar(list(row < 1 - better), list(row >= worse)) for row in draw]
    held = np.mean([each.low <= better - worse <= each.high for each in found])
    assert 0.92 < held < 0.98


def right(share: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(300) < share


def test_bootstrap_finds_a_real_difference_and_none_where_there_is_none() -> None:
    first, better, equal = right(0.6, 0), right(0.8, 1), right(0.6, 2)

    def accuracy(values: np.ndarray):  # type: ignore[no-untyped-def]
        return lambda chosen: float(values[chosen].mean())

    found = paired_bootstrap(accuracy(first), accuracy(better), 300, rounds=2000)
    assert found.low < found.effect < found.high
    assert found.p < 0.01 < found.low
    spread = (better.astype(float) - first).std() / 300**0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.1)
    nothing = paired_bootstrap(accuracy(first), accuracy(equal), 300, rounds=2000)
    assert nothing.low < 0 < nothing.high
    assert nothing.p > 0.05
    assert paired_bootstrap(accuracy(first), accuracy(first), 300, rounds=100).p == 1.0


@pytest.mark.parametrize(("n", "level"), [(3, 0.05), (3, 0.05 / 3), (10, 0.05)])
def test_a_detectable_difference_is_found_in_four_of_five_experiments(n: int, level: float) -> None:
    effect = detectable(2.0, n, level=level)
    from scipy import stats

    draws = np.random.default_rng(0).normal(effect, 2.0, (20_000, n))
    shift = draws.mean(1) / (draws.std(1, ddof=1) / n**0.5)
    assert (2 * stats.t.sf(abs(shift), n - 1) < level).mean() == pytest.approx(0.8, abs=0.01)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, math.nan, 0.9])[0] == 1.0
    assert holm([]) == []
