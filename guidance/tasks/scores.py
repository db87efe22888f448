"""How well answers agree with the truth: precision, recall, F1 and accuracy, here once for all tasks.

They are functions of counts, because a bootstrap adds up the counts of examples anew for every draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Agreement:
    """How many things were predicted, how many there are, and how many of both are the same.

    A score whose denominator is 0 is 0.
    """

    correct: float
    predicted: float
    gold: float

    @classmethod
    def on(cls, wanted: Any, gold: Sequence[Any], predicted: Sequence[Any]) -> Agreement:
        """How well one of several answers is given.

        Example:
            >>> Agreement.on("b", ["a", "b", "b"], ["b", "b", "a"])
            Agreement(correct=1, predicted=2, gold=2)
        """
        correct = sum(true == wanted == guess for true, guess in zip(gold, predicted, strict=True))
        return cls(correct, sum(guess == wanted for guess in predicted), sum(true == wanted for true in gold))

    @property
    def precision(self) -> float:
        """The share of the predicted ones that are right."""
        return float(self.correct / self.predicted) if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The share of the true ones that were predicted."""
        return float(self.correct / self.gold) if self.gold else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        both = self.predicted + self.gold
        return float(2 * self.correct / both) if both else 0.0

    def scores(self) -> dict[str, float]:
        """All three, by name."""
        return {"precision": self.precision, "recall": self.recall, "f1": self.f1}

    def defined_scores(self) -> dict[str, float | None]:
        """All three, by name; None where nothing can be measured: precision without predictions, recall and F1 without true ones.

        Example:
            >>> Agreement(correct=0, predicted=0, gold=2).defined_scores()
            {'precision': None, 'recall': 0.0, 'f1': 0.0}
        """
        sizes = {"precision": self.predicted, "recall": self.gold, "f1": self.gold}
        return {name: value if sizes[name] else None for name, value in self.scores().items()}


def macro_f1(classes: Iterable[Agreement]) -> float:
    """The mean F1 of the classes that occur, as true ones or as predicted ones."""
    scores = [each.f1 for each in classes if each.predicted or each.gold]
    return sum(scores) / len(scores) if scores else 0.0


def accuracy(gold: Sequence[Any], predicted: Sequence[Any]) -> float:
    """The share of answers that are right."""
    return sum(true == guess for true, guess in zip(gold, predicted, strict=True)) / max(1, len(gold))
