"""Compares what models say of the same examples: is the difference of their metrics more than chance?

Accuracies are compared by McNemar's exact test.  Other metrics of single examples are functions of sums over examples, so the
examples are drawn anew (paired bootstrap) without computing the metric from scratch.  One model on two sets of examples
has a drop, whose examples are drawn independently.  BLEU and chrF of translations are
compared by approximate randomisation, by sacrebleu.  The p-values of all comparisons are corrected together by Holm's method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from guidance.errors import InputError
from guidance.tasks.entities import entity_agreement, token_agreement
from guidance.tasks.scores import Agreement, accuracy, macro_f1
from pipelines.correlations import pearson
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.views.significance import Difference, Statistic, holm, mcnemar, paired_bootstrap, unpaired_bootstrap

ROUNDS = 10_000
"""Draws of the bootstrap."""


@dataclass(frozen=True)
class Figure:
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
class Tested:
    """The difference of one metric between the baseline and another evaluation.

    Attributes:
        first, second: the metric of both.
        corrected: the p-value, corrected for all comparisons.
        unit: what was counted: examples, seeds or folds.
    """

    baseline: str
    other: str
    metric: str
    first: float
    second: float
    difference: Difference
    corrected: float = float("nan")
    unit: str = "examples"


def compare_evaluations(evaluations: Sequence[Artifact], labels: Sequence[str]) -> list[Tested]:
    """Each metric of the first evaluation beside that of every other one.

    Two models are compared on the same examples; a model is compared with itself on any examples, such as those of a clean
    and of an adversarial test set.

    Raises:
        ArtifactMismatch: they are of different tasks or examples.
        InputError: predictions of this task cannot be compared example by example.
    """
    first, *others = evaluations
    tables = [_predictions(evaluation) for evaluation in evaluations]
    found: list[Tested] = []
    for other, label, table in zip(others, labels[1:], tables[1:], strict=True):
        if other.counts["task"] != first.counts["task"]:
            raise ArtifactMismatch(
                f"{labels[0]} measures {first.counts['task']}, {label} measures {other.counts['task']}"
            )
        if _is_same_model(first, other) and not _are_same(tables[0], table):
            differences = _drops(first.counts["task"], tables[0], table)
        else:
            _check_same(tables[0], table, labels[0], label)
            differences = _differences(first.counts["task"], tables[0], table)
        for metric, one, two, difference in differences:
            found.append(Tested(labels[0], label, metric, one, two, difference))
    corrected = holm([tested.difference.p for tested in found])
    return [replace(tested, corrected=p) for tested, p in zip(found, corrected, strict=True)]


def _predictions(evaluation: Artifact) -> dict[str, list[Any]]:
    with evaluation.open("predictions.parquet") as file:
        columns: dict[str, list[Any]] = pq.read_table(file).to_pydict()
    return columns


def _is_same_model(*evaluations: Artifact) -> bool:
    made = [evaluation.manifest for evaluation in evaluations]
    models = {(one["inputs"].get("model", {}).get("content"), one["config"].get("weights")) for one in made}
    return len(models) == 1 and None not in {model for model, _ in models}


def _are_same(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> bool:
    return all(one.get(column) == other.get(column) for column in ("id", "gold", "reference"))


def _drops(
    task: str, one: dict[str, list[Any]], other: dict[str, list[Any]]
) -> list[tuple[str, float, float, Difference]]:
    """For each metric of a task on two sets of examples: its name, both values, and a test of their difference."""
    sides = []
    for table in (one, other):
        known = [place for place, gold in enumerate(table.get("gold") or ()) if gold is not None]
        gold, predicted = ([str(table[name][place]) for place in known] for name in ("gold", "prediction"))
        sides.append((gold, predicted))
    if not all(gold for gold, _ in sides):
        raise InputError(f"evaluations of {task} on other examples have no labels that could be compared")
    labels = [label for gold, predicted in sides for label in (*gold, *predicted)]
    figures: list[dict[str, Statistic]] = [
        {**_accuracy(task, gold, predicted), **_figures(task, gold, predicted, labels)} for gold, predicted in sides
    ]
    found = []
    for name in (name for name in figures[0] if name in figures[1]):
        (a, n), (b, m) = ((figure[name], len(gold)) for figure, (gold, _) in zip(figures, sides, strict=True))
        values = a(np.arange(n)), b(np.arange(m))
        found.append((name, *values, unpaired_bootstrap((a, n), (b, m), rounds=ROUNDS)))
    return found


def _accuracy(task: str, gold: Sequence[str], predicted: Sequence[str]) -> dict[str, Figure]:
    """The accuracy of tasks that are right or wrong."""
    if task not in ("classification", "choice"):
        return {}
    right = np.array([(1.0, g == p) for g, p in zip(gold, predicted, strict=True)])
    return {"accuracy": Figure(right, _mean)}


def _check_same(one: dict[str, list[Any]], other: dict[str, list[Any]], *labels: str) -> None:
    for column in ("id", "gold", "source", "reference"):
        if one.get(column) != other.get(column):
            raise ArtifactMismatch(
                f"{labels[0]} and {labels[1]} are of other examples: their columns {column!r} differ",
                hint="evaluate both models on the same split of the same dataset",
            )


def _differences(
    task: str, one: dict[str, list[Any]], other: dict[str, list[Any]]
) -> list[tuple[str, float, float, Difference]]:
    """For each metric of a task: its name, both values, and what a test says of their difference."""
    if task == "translation":
        return _translations(one, other)
    if task == "summarization":
        return _summaries(one, other)
    if "gold" not in one:
        raise InputError(f"evaluations of {task} have no predictions that could be compared")
    known = [place for place, gold in enumerate(one["gold"]) if gold is not None]
    if not known:
        raise InputError("no example has a label", hint="compare on a split with labels")
    gold, first, second = (
        [str(column[place]) for place in known] for column in (one["gold"], one["prediction"], other["prediction"])
    )
    found = []
    if task in ("classification", "choice"):
        right = [[g == p for g, p in zip(gold, predicted, strict=True)] for predicted in (first, second)]
        found.append(("accuracy", accuracy(gold, first), accuracy(gold, second), mcnemar(*right)))
    figures = [
        _figures(task, gold, predicted, labels)
        for labels in [[*gold, *first, *second]]
        for predicted in (first, second)
    ]
    everything = np.arange(len(known))
    for name in figures[0]:
        a, b = (figure[name] for figure in figures)
        found.append((name, a(everything), b(everything), paired_bootstrap(a, b, len(known), rounds=ROUNDS)))
    return found


def _figures(
    task: str, gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]
) -> Mapping[str, Statistic]:
    """The metrics of a task on chosen examples.

    Args:
        labels: all that occur, in gold labels or in predictions of either model.
    """
    if task == "classification":
        return _of_classes(gold, predicted, sorted(set(labels)))
    if task == "regression":
        return _of_numbers(gold, predicted)
    if task == "tagging":
        token_f1 = _f1(gold, predicted, lambda true, guess: token_agreement([true], [guess]))
        try:
            f1 = _f1(gold, predicted, lambda true, guess: entity_agreement([true], [guess])[""])
        except InputError:  # the tags name no entities
            return {"token_f1": token_f1}
        return {"f1": f1, "token_f1": token_f1}
    if task == "segmentation":
        return {"f1": _f1(gold, predicted, lambda true, guess: Agreement.on("1", true, guess))}
    return {}


def _of_classes(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Figure]:
    numbers = {label: number for number, label in enumerate(labels)}
    size = len(labels)
    right, guessed, named = (np.zeros((len(gold), size)) for _ in range(3))
    for row, (true, guess) in enumerate(zip(gold, predicted, strict=True)):
        named[row, numbers[true]] = guessed[row, numbers[guess]] = 1
        right[row, numbers[true]] = true == guess

    def combined(sums: np.ndarray) -> float:
        return macro_f1(Agreement(*counts) for counts in sums.reshape(3, size).T)

    return {"f1_macro": Figure(np.concatenate([right, guessed, named], axis=1), combined)}


def _of_numbers(gold: Sequence[str], predicted: Sequence[str]) -> dict[str, Statistic]:
    x, y = (np.array([float(value) for value in values]) for values in (gold, predicted))
    found: dict[str, Statistic] = {"mse": Figure(np.stack([np.ones_like(x), (x - y) ** 2], axis=1), _mean)}
    if len(set(gold)) == 1:
        return found
    # a draw may hold one number only
    return {"pearson": lambda chosen: pearson(x[chosen], y[chosen]) or 0.0, **found}


def _mean(sums: np.ndarray) -> float:
    """The mean, from the number of examples and the sum of their values."""
    return float(sums[1] / sums[0])


def _f1(
    gold: Sequence[str], predicted: Sequence[str], agreement: Callable[[list[str], list[str]], Agreement]
) -> Figure:
    """F1 over all examples, whose labels are rows of words."""
    found = [agreement(true.split(), guess.split()) for true, guess in zip(gold, predicted, strict=True)]
    return Figure(np.array([(a.correct, a.predicted, a.gold) for a in found], float), lambda s: Agreement(*s).f1)


def _translations(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> list[tuple[str, float, float, Difference]]:
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import PairedTest

    metrics = {"BLEU": BLEU(), "chrF": CHRF()}
    systems: list[tuple[str, Sequence[str]]] = [("baseline", one["hypothesis"]), ("other", other["hypothesis"])]
    test = PairedTest(systems, metrics, [one["reference"]], test_type="ar", n_samples=ROUNDS)
    scores: dict[str, Any] = test()[1]
    found, n, nan = [], len(one["reference"]), float("nan")
    for name in metrics:
        first, second = next(results for key, results in scores.items() if key.startswith(name))  # chrF2
        effect, p = float(second.score - first.score), float(second.p_value)
        difference = Difference("approximate randomisation", effect, nan, nan, p, n)
        found.append((name.lower(), float(first.score), float(second.score), difference))
    return found


def _summaries(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> list[tuple[str, float, float, Difference]]:
    from pipelines.training.learners.document_scores import rouge

    n = len(one["reference"])
    scores = [
        [
            rouge([summary.split("\n")], [reference.split("\n\n")])
            for summary, reference in zip(table["summary"], table["reference"], strict=True)
        ]
        for table in (one, other)
    ]
    found = []
    for name in scores[0][0]:
        a, b = (Figure(np.array([(1.0, each[name]) for each in own]), _mean) for own in scores)
        everything = np.arange(n)
        found.append((name, a(everything), b(everything), paired_bootstrap(a, b, n, rounds=ROUNDS)))
    return found
