"""Is a difference between two systems real?  Tests over seeds, folds or examples.

A difference is the second system's figure minus the first one's.  All tests are two-sided.

Sources: Nadeau & Bengio 2003 (folds share training data); Koehn 2004, Efron & Tibshirani 1993 (bootstrap); Noreen 1989,
Riezler & Maxwell 2005 (approximate randomisation); McNemar 1947; Agresti & Min 2005 (interval of paired shares); Holm 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from guidance.errors import InputError

Statistic = Callable[[np.ndarray], float]
"""From the indices of examples, with repetitions, to the figure of a system on them."""


@dataclass(frozen=True)
class Difference:
    """What a test says about two systems.

    Attributes:
        test: its name.
        effect: the difference.
        low, high: an interval that covers the true difference with the confidence asked for; NaN where the test has none.
        p: how often chance alone gives a difference at least as large; NaN where it cannot be said.
        n: how many seeds, folds or examples it is based on.  Different examples of two systems are added up.
    """

    test: str
    effect: float
    low: float
    high: float
    p: float
    n: int


def paired_t(
    differences: Sequence[float], *, shared_folds: bool = False, held_out: float = 0.0, confidence: float = 0.95
) -> Difference:
    """Student's paired t-test over seeds, or its correction for the folds of one cross-validation.

    The training parts of k folds overlap, so their scores are not independent: the variance of the mean is taken as
    s² (1/k + r) instead of s²/k, where r is the ratio of test examples to training examples, 1/((k-1)(1-h)) if a share h of the
    other folds is for validation.

    Args:
        differences: one for each seed or fold.
        shared_folds: they are the k folds of one cross-validation.
        held_out: the share h.
    """
    from scipy import stats

    values = np.asarray(differences, dtype=float)
    n = len(values)
    effect = float(values.mean()) if n else float("nan")
    name = "corrected paired t-test" if shared_folds else "paired t-test"
    if n < 2 or (effect and np.ptp(values) == 0):  # equal differences leave nothing to estimate chance from
        return Difference(name, effect, float("nan"), float("nan"), float("nan"), n)
    share = 1 / n + (1 / ((n - 1) * (1 - held_out)) if shared_folds else 0)
    error = float(values.std(ddof=1)) * share**0.5
    reach = float(stats.t.ppf(0.5 + confidence / 2, n - 1)) * error
    p = float(effect == 0)
    if error > 0:
        p = float(2 * stats.t.sf(abs(effect) / error, n - 1))
    return Difference(name, effect, effect - reach, effect + reach, p, n)


def paired_bootstrap(
    first: Statistic, second: Statistic, n: int, *, rounds: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> Difference:
    """Draw the examples anew, with repetitions, and see how the difference varies.  Raises InputError if there are no
    examples.

    The interval is that of percentiles.  The p-value asks how often a centred draw is at least as far from 0 as the
    difference itself.

    Args:
        first, second: the figure of each system on chosen examples.
        n: the number of examples.
        rounds: how many draws.
    """
    effect = _effect(first, second, n)
    draw = np.random.default_rng(seed)
    differences = np.empty(rounds)
    for each in range(rounds):
        chosen = draw.integers(0, n, n)
        differences[each] = second(chosen) - first(chosen)
    low, high = np.quantile(differences, [0.5 - confidence / 2, 0.5 + confidence / 2])
    as_far = int((np.abs(differences - differences.mean()) >= abs(effect)).sum())
    return Difference("paired bootstrap", effect, float(low), float(high), (1 + as_far) / (1 + rounds), n)


def unpaired_bootstrap(
    first: tuple[Statistic, int],
    second: tuple[Statistic, int],
    *,
    rounds: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """The same for two systems on different examples, which are drawn independently of each other.  Raises InputError if
    one of them has no examples.

    Args:
        first, second: the figure of each system on chosen examples, and how many examples it has.
    """
    (one, n), (other, m) = first, second
    if min(n, m) < 1:
        raise InputError("there are no examples to compare")
    effect = other(np.arange(m)) - one(np.arange(n))
    draw = np.random.default_rng(seed)
    differences = np.array([other(draw.integers(0, m, m)) - one(draw.integers(0, n, n)) for _ in range(rounds)])
    low, high = np.quantile(differences, [0.5 - confidence / 2, 0.5 + confidence / 2])
    as_far = int((np.abs(differences - differences.mean()) >= abs(effect)).sum())
    return Difference("unpaired bootstrap", effect, float(low), float(high), (1 + as_far) / (1 + rounds), n + m)


def mcnemar(first: Sequence[bool], second: Sequence[bool], *, confidence: float = 0.95) -> Difference:
    """The exact McNemar test of two accuracies: is a change for the better as frequent as one for the worse?

    The interval is Wald's after half an example was added to each of the four counts of right and wrong.  It does not come from the
    test, so beside a p-value near 0.05 it may or may not contain 0.

    Args:
        first, second: whether each system is right, example by example.

    Raises:
        InputError: the systems have different numbers of examples, or none.
    """
    from scipy import stats

    if len(first) != len(second):
        raise InputError(f"one system has {len(first)} examples, the other {len(second)}")
    if not len(first):
        raise InputError("there are no examples to compare")
    before, after = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    better, worse = int((after & ~before).sum()), int((before & ~after).sum())
    p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
    n = len(before) + 2.0
    middle, changed = (better - worse) / n, (better + worse + 1) / n
    reach = float(stats.norm.ppf(0.5 + confidence / 2)) * ((changed - middle**2) / n) ** 0.5
    low, high = max(-1.0, middle - reach), min(1.0, middle + reach)
    return Difference("McNemar's exact test", (better - worse) / len(before), low, high, p, len(before))


def detectable(deviation: float, n: int, *, level: float = 0.05, power: float = 0.8) -> float:
    """The smallest true mean difference that a two-sided paired t-test finds with the probability ``power``.

    Args:
        deviation: standard deviation of the differences of pairs.
        n: how many pairs there are; at least two.
        level: the test finds a difference if its p-value is below this.
    """
    from scipy import optimize, stats

    bound = stats.t.ppf(1 - level / 2, n - 1)
    # the power grows with the shift, from the level at 0
    shift = optimize.brentq(lambda shift: stats.nct.sf(bound, n - 1, shift) - power, 0.0, 10 * bound)
    return float(deviation * shift / n**0.5)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for how many there are, by Holm's method; NaN stays and does not count."""
    known = [index for index, p in enumerate(p_values) if not np.isnan(p)]
    corrected = list(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(known, key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(known) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def _effect(first: Statistic, second: Statistic, n: int) -> float:
    if n < 1:
        raise InputError("there are no examples to compare")
    everything = np.arange(n)
    return second(everything) - first(everything)
