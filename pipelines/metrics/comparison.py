"""The metrics of two systems side by side, from what each says of single examples: is the difference significant?

Shares of right answers are compared by McNemar's exact test.  Other metrics are functions of sums over examples, so examples
are drawn anew (paired bootstrap) without computing the metric from scratch.  On different sets of examples, those of each are
drawn independently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from guidance.errors import InputError
from guidance.tasks.scores import Agreement
from pipelines.metrics.significance import Difference, Statistic, mcnemar, paired_bootstrap, unpaired_bootstrap

ROUNDS = 10_000
"""Draws of the bootstrap."""

Table = Mapping[str, Sequence[Any]]
"""The columns of ``predictions.parquet``, among them ``gold`` and ``prediction``."""

Metrics = Callable[[Sequence[str], Sequence[str], Sequence[str]], Mapping[str, Statistic]]
"""From true answers, predicted ones, and all labels that occur among either, to metrics as functions of chosen examples."""


@dataclass(frozen=True)
class Compared:
    """A metric of two systems, and what a test says of the difference; ``unit`` is what was drawn or counted."""

    metric: str
    first: float
    second: float
    difference: Difference
    unit: str = "examples"


@dataclass(frozen=True)
class OfSums:
    """A metric that is a function of sums over examples.

    Attributes:
        parts: what each example adds, (examples, k).
        combine: from the k sums to the metric.
    """

    parts: np.ndarray
    combine: Callable[[np.ndarray], float]

    def __call__(self, chosen: np.ndarray) -> float:
        """The metric on these examples, which may repeat."""
        return self.combine(self.parts[chosen].sum(0))


@dataclass(frozen=True)
class ShareRight:
    """The share of the answers that are right; ``right``, (examples,), has True for each of them."""

    right: np.ndarray

    @classmethod
    def of(cls, gold: Sequence[str], predicted: Sequence[str]) -> ShareRight:
        """Of answers that are right if they equal the true ones."""
        return cls(np.array([true == guess for true, guess in zip(gold, predicted, strict=True)]))

    def __call__(self, chosen: np.ndarray) -> float:
        """The share on these examples, which may repeat."""
        return float(self.right[chosen].mean())


def mean_of(values: Sequence[float] | np.ndarray) -> OfSums:
    """The mean of a number of each example."""
    return OfSums(np.stack([np.ones(len(values)), np.asarray(values)], axis=1), lambda sums: float(sums[1] / sums[0]))


def of_agreements(agreements: Sequence[Agreement]) -> dict[str, OfSums]:
    """F1, precision and recall over all examples, from how well answers and truth agree in each."""
    parts = np.array([(each.correct, each.predicted, each.gold) for each in agreements], float)
    return {
        "f1": OfSums(parts, lambda sums: Agreement(*sums).f1),
        "precision": OfSums(parts, lambda sums: Agreement(*sums).precision),
        "recall": OfSums(parts, lambda sums: Agreement(*sums).recall),
    }


def compare_statistics(
    pairs: Mapping[str, tuple[Statistic, Statistic]], size: int, unit: str = "examples"
) -> list[Compared]:
    """Metrics of two systems on the same ``size`` examples, by name."""
    everything, compared = np.arange(size), []
    for name, (one, other) in pairs.items():
        if isinstance(one, ShareRight) and isinstance(other, ShareRight):
            difference = mcnemar(one.right.tolist(), other.right.tolist())
        else:
            difference = paired_bootstrap(one, other, size, rounds=ROUNDS)
        compared.append(Compared(name, one(everything), other(everything), difference, unit))
    return compared


def compare_on_same(metrics: Metrics, one: Table, other: Table, is_answer: Callable[[str], bool]) -> list[Compared]:
    """Metrics of two systems on the same examples; those without a true answer, as ``is_answer`` says, are left out.  Raises
    InputError if no example has a true answer."""
    (gold, first), (_, second) = _labelled(one, is_answer), _labelled(other, is_answer)
    if not gold:
        raise InputError("no example has a label", hint="compare on a split with labels")
    labels = [*gold, *first, *second]
    of_both = [metrics(gold, predicted, labels) for predicted in (first, second)]
    names = [name for name in of_both[0] if name in of_both[1]]
    return compare_statistics({name: (of_both[0][name], of_both[1][name]) for name in names}, len(gold))


def compare_on_others(metrics: Metrics, one: Table, other: Table, is_answer: Callable[[str], bool]) -> list[Compared]:
    """Metrics of one system on two sets of examples; see `compare_on_same`.  Raises InputError if no example of a set has a true
    answer."""
    sides = [_labelled(table, is_answer) for table in (one, other)]
    if not all(gold for gold, _ in sides):
        raise InputError("evaluations on other examples have no labels that could be compared")
    labels = [label for gold, predicted in sides for label in (*gold, *predicted)]
    n, m = (len(gold) for gold, _ in sides)
    first, second = (metrics(gold, predicted, labels) for gold, predicted in sides)
    return compare_unpaired((first, n), (second, m))


def compare_unpaired(
    one: tuple[Mapping[str, Statistic], int], other: tuple[Mapping[str, Statistic], int], unit: str = "examples"
) -> list[Compared]:
    """Metrics of two systems on different examples, by name; for each system its metrics and how many examples it has."""
    (first, n), (second, m) = one, other
    return [
        Compared(
            name,
            first[name](np.arange(n)),
            second[name](np.arange(m)),
            unpaired_bootstrap((first[name], n), (second[name], m), rounds=ROUNDS),
            unit,
        )
        for name in first
        if name in second
    ]


def _labelled(table: Table, is_answer: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """The true and the predicted answers of the examples that have a true one."""
    known = [row for row, gold in enumerate(table.get("gold") or ()) if gold is not None and is_answer(str(gold))]
    return [str(table["gold"][row]) for row in known], [str(table["prediction"][row]) for row in known]
