"""Heads of ``classification`` and ``regression``: one label, or one number, for each example."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from guidance.checkpoint import read_config
from guidance.errors import InputError
from guidance.mechanisms.attacks import Form
from guidance.tasks.calibration import calibration
from guidance.tasks.scores import Agreement, accuracy, macro_f1
from pipelines.correlations import matthews, pearson, spearman
from pipelines.training.learner import Given, folder_of
from pipelines.training.learners.examples import (
    Batch,
    ExampleLearner,
    Head,
    Prediction,
    at_least_float32,
    training_labels,
)
from pipelines.training.objective import Task

UNKNOWN = -100
"""The target of an example without a label, or with one that the model does not know."""


class Classes(Head):
    """Cross-entropy over classes.

    Attributes:
        labels: the label of each class.
    """

    def __init__(self, labels: Sequence[str], class_weights: Mapping[str, float] | None = None) -> None:
        self.labels = tuple(labels)
        self._numbers = {label: number for number, label in enumerate(labels)}
        weights = [(class_weights or {}).get(label, 1.0) for label in labels]
        self._weights = torch.tensor(weights) if class_weights else None

    @classmethod
    def of_training(cls, given: Given) -> Classes:
        """For the labels of the training examples.

        Raises:
            InputError: there is only one label, or a training example has none.
        """
        labels = training_labels(given)
        if len(labels) < 2:
            raise InputError(
                f"{given.sequences.reference}: all training examples have the label {labels[0]!r}",
                hint="a classifier needs at least two",
            )
        if given.init is not None:
            labels = list(_same_order(labels, given))
        weighted = given.config.class_weights == "balanced"
        return cls(labels, _balanced(given.train.labels.tolist()) if weighted else None)

    @classmethod
    def of_model(cls, config: Any) -> Classes:
        """For the labels of a trained model.  Class n of a model that only knows ``LABEL_n`` is the label n."""
        return cls([str(config.id2label[number]).removeprefix("LABEL_") for number in range(config.num_labels)])

    def fields(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": dict(self._numbers),
            "problem_type": "single_label_classification",
        }

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        return logits

    def number(self, label: str | None) -> int:
        """The class of a label, or `UNKNOWN`."""
        return UNKNOWN if label is None else self._numbers.get(label, UNKNOWN)

    def labels_of(self, gold: str) -> dict[str, bool]:
        return {gold: gold in self._numbers}

    def targets(self, batch: Batch) -> Tensor:
        return torch.tensor([self.number(batch.labels[row]) for row in batch.firsts])

    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        outputs = at_least_float32(outputs)
        weights = None if self._weights is None else self._weights.to(outputs)
        return functional.cross_entropy(outputs, targets, weights, ignore_index=UNKNOWN, reduction="sum")

    def count(self, batch: Batch) -> float:
        return float((self.targets(batch) != UNKNOWN).sum())

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        probabilities = outputs.detach().double().softmax(-1).cpu()
        found = []
        for row, scores in zip(batch.firsts, probabilities.tolist(), strict=True):
            best = max(scores)
            # equal scores never count as right: with a tie the answer is the tied class that is not the gold label
            tied = [number for number, score in enumerate(scores) if score == best]
            gold = self.number(batch.labels[row])
            chosen = next((number for number in tied if number != gold), tied[0])
            found.append(Prediction(batch.numbers[row], batch.labels[row], self.labels[chosen], scores))
        return found

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Accuracy, macro F1, F1 of the second of two classes, and the Matthews correlation."""
        gold, predicted = _labels(predictions)
        if not gold:
            return {}
        classes = self._classes(gold, predicted)
        found = {
            "accuracy": accuracy(gold, predicted),
            "f1_macro": macro_f1(classes.values()),
            "matthews": matthews(gold, predicted),
        }
        if len(self.labels) == 2:
            found["f1"] = classes[self.labels[1]].f1
        return found

    def _classes(self, gold: Sequence[str], predicted: Sequence[str]) -> dict[str, Agreement]:
        """How well each class is found: those of the model, and then those that only the examples have."""
        labels = [*self.labels, *sorted(set(gold) - set(self.labels))]
        return {label: Agreement.on(label, gold, predicted) for label in labels}

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        scores = dict(zip(self.labels, prediction.scores, strict=True))
        return {"prediction": prediction.prediction, "scores": scores}

    def report(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Precision, recall and F1 of each class, the confusion matrix, and how well probabilities are calibrated."""
        from sklearn.metrics import confusion_matrix

        gold, predicted = _labels(predictions)
        if not gold:
            return {}
        classes = self._classes(gold, predicted)
        confidence = [max(p.scores) for p in predictions if p.gold is not None]
        error, bins = calibration(confidence, [true == guess for true, guess in zip(gold, predicted, strict=True)])
        return {
            "classes": {
                label: {"precision": a.precision, "recall": a.recall, "f1": a.f1, "examples": int(a.gold)}
                for label, a in classes.items()
            },
            "confusion": {
                "labels": list(classes),
                "counts": confusion_matrix(gold, predicted, labels=list(classes)).tolist(),
            },
            "calibration": {"expected_error": error, "bins": bins},
        }


def _labels(predictions: Sequence[Prediction]) -> tuple[list[str], list[str]]:
    """The true labels of the examples that have one, and the predicted ones."""
    known = [(p.gold, p.prediction) for p in predictions if p.gold is not None]
    return [gold for gold, _ in known], [predicted for _, predicted in known]


def _same_order(labels: Sequence[str], given: Given) -> Sequence[str]:
    """The labels in the order of the model to start from, if it has the same ones, so that its head stays right."""
    path = folder_of(given.init) / "config.json"
    try:
        config = read_config(path.read_bytes(), str(path))
    except OSError:
        return labels  # opening the model reports it
    known = [str(config.id2label[number]) for number in sorted(config.id2label)]
    return known if sorted(known) == sorted(labels) else labels


def _balanced(labels: Sequence[str]) -> dict[str, float]:
    """Weights with which all classes weigh the same: examples / (classes * examples of the class)."""
    counts: dict[str, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    return {label: len(labels) / (len(counts) * count) for label, count in counts.items()}


class Value(Head):
    """Mean squared error of one number."""

    form: ClassVar[Form] = "regression"

    @classmethod
    def of_training(cls, given: Given) -> Value:
        """Raises InputError when the label of a training example is no number."""
        for label, number in zip(given.train.labels.tolist(), given.train.numbers.tolist(), strict=True):
            if _value(label) is None:
                raise InputError(
                    f"{given.sequences.reference}: regression needs numbers as labels; the example in row {number} of the "
                    f"dataset has {label!r}",
                    hint="--task classification, or mend the file",
                )
        return cls()

    @classmethod
    def of_model(cls, config: Any) -> Value:
        """For any model with one output."""
        return cls()

    def fields(self) -> dict[str, Any]:
        return {"num_labels": 1, "id2label": {0: "value"}, "label2id": {"value": 0}, "problem_type": "regression"}

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        return logits

    def labels_of(self, gold: str) -> dict[str, bool]:
        return {gold: _value(gold) is not None}

    def targets(self, batch: Batch) -> Tensor:
        values = (_value(batch.labels[row]) for row in batch.firsts)
        return torch.tensor([math.nan if value is None else value for value in values])

    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        known = ~targets.isnan()
        values = at_least_float32(outputs[known, 0])
        return functional.mse_loss(values, targets[known].to(values), reduction="sum")

    def count(self, batch: Batch) -> float:
        return float((~self.targets(batch).isnan()).sum())

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        values = outputs.detach().double().cpu()[:, 0].tolist()
        return [
            Prediction(batch.numbers[row], batch.labels[row], repr(value), [value])
            for row, value in zip(batch.firsts, values, strict=True)
        ]

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        return {"prediction": prediction.scores[0]}

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Pearson's and Spearman's correlation, and the mean squared error."""
        pairs = [(value, p.scores[0]) for p in predictions if (value := _value(p.gold)) is not None]
        if not pairs:
            return {}
        gold, predicted = zip(*pairs, strict=True)
        return {
            "mse": sum((a - b) ** 2 for a, b in pairs) / len(pairs),
            "pearson": pearson(gold, predicted),
            "spearman": spearman(gold, predicted),
        }


def _value(label: str | None) -> float | None:
    """A label as a finite number, or None."""
    try:
        value = float(label or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def prepare(given: Given, task: Task, head: type[Classes | Value]) -> ExampleLearner:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    return ExampleLearner(given, task, head.of_training(given))
