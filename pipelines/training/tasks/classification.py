"""The task ``classification``: one label for each text, or for each pair of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from guidance.errors import InputError
from guidance.tasks.scores import Agreement, accuracy, macro_f1
from pipelines.engine.stage import Config
from pipelines.lazy import np
from pipelines.training.labels import are_numbers, training_labels
from pipelines.training.models import WORD_MODELS
from pipelines.training.objective import Card, classifies, predicts_a_value
from pipelines.training.task import UNKNOWN, Batch, Prediction, Task, at_least_float32, highest, known

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.metrics.significance import Statistic
    from pipelines.training.learner import Setup


class Settings(Config):
    """Settings of tasks with classes."""

    class_weights: Literal["none", "balanced"] = Field(
        "none", description="Weights of the classes in the loss; with balanced every class weighs the same."
    )


class Classification(Task):
    """Cross-entropy over classes.

    Attributes:
        labels: the label of each class.
    """

    name = "classification"
    learns = "a label for each text or pair"
    needs = "classification and regression learn from the labelled texts that `guide build-dataset` reads."
    families = (*Task.families, *WORD_MODELS)
    card = Card("text classifier", "text-classification", "AutoModelForSequenceClassification")
    settings: ClassVar = (Settings,)
    examples = (
        "guide finetune reviews --init my-model",
        "guide finetune reviews --init ./bert-base --plan preset:asa --learning-rate 2e-5 --warmup-fraction 0.06",
        "guide finetune trec --architecture role-transformer --layers 2 --hidden 96 --heads 6 --ffn 256 --plan preset:roles --parser spacy:en_core_web_sm --learning-rate 1e-3 --epochs 30 --patience 5",
    )
    columns = ("text",)
    shape = "examples"
    reads_last = True
    selectable = ("accuracy", "f1_macro", "f1", "matthews")

    def __init__(self, labels: Sequence[str], class_weights: Mapping[str, float] | None = None) -> None:
        self.labels = tuple(labels)
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._weights = [class_weights.get(label, 1.0) for label in labels] if class_weights else None

    @classmethod
    def fits(cls, counts: Mapping[str, Any]) -> bool:
        return not are_numbers(counts)

    @classmethod
    def is_of(cls, config: Any) -> bool:
        return classifies(config) and not predicts_a_value(config)

    @classmethod
    def of_training(cls, setup: Setup) -> Self:
        """Raises InputError when there is only one label, or a training example has none."""
        labels = training_labels(setup.train.labels.tolist(), setup.sequences.reference)
        if len(labels) < 2:
            raise InputError(
                f"{setup.sequences.reference}: all training examples have the label {labels[0]!r}",
                hint="a classifier needs at least two",
            )
        if setup.init is not None:
            labels = _same_order(labels, setup)
        weighted = setup.config.class_weights == "balanced"
        return cls(labels, _balanced(setup.train.labels.tolist()) if weighted else None)

    @classmethod
    def of_model(cls, config: Any) -> Self:
        """Class n of a model that only knows ``LABEL_n`` is the label n."""
        return cls([str(config.id2label[number]).removeprefix("LABEL_") for number in range(config.num_labels)])

    def fields(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": dict(self._numbers),
            "problem_type": "single_label_classification",
        }

    def number(self, label: str | None) -> int:
        """The class of a label, or `UNKNOWN`."""
        return UNKNOWN if label is None else self._numbers.get(label, UNKNOWN)

    def targets(self, batch: Batch) -> list[int]:
        return [self.number(batch.labels[row]) for row in batch.firsts]

    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        if self._weights is None:
            return super().loss(outputs, targets, batch)
        from torch.nn import functional

        outputs = at_least_float32(outputs)
        weights = outputs.new_tensor(self._weights)
        return functional.cross_entropy(outputs, targets, weights, ignore_index=UNKNOWN, reduction="sum")

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        probabilities = outputs.detach().double().softmax(-1).cpu()
        predictions = []
        for row, scores in zip(batch.firsts, probabilities.tolist(), strict=True):
            chosen = highest(scores, self.number(batch.labels[row]))
            predictions.append(Prediction(batch.numbers[row], batch.labels[row], self.labels[chosen], scores))
        return predictions

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        return {
            "prediction": prediction.prediction,
            "scores": dict(zip(self.labels, prediction.scores, strict=True)),
        }

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Accuracy, macro F1, F1 of the second of two classes, and the Matthews correlation."""
        from pipelines.metrics.correlations import matthews

        gold, predicted = known(predictions)
        if not gold:
            return {}
        classes = self._classes(gold, predicted)
        metrics = {
            "accuracy": accuracy(gold, predicted),
            "f1_macro": macro_f1(classes.values()),
            "matthews": matthews(gold, predicted),
        }
        if len(self.labels) == 2:
            metrics["f1"] = classes[self.labels[1]].f1
        return metrics

    def signatures(self) -> dict[str, str]:
        of_class = {"f1": f"of the class {self.labels[1]}"} if len(self.labels) == 2 else {}
        return {
            "accuracy": "share of the examples",
            "f1_macro": "mean F1 of the classes that occur, as true ones or as predicted ones",
            "matthews": "Matthews correlation, from -1 to 1; 0 is chance",
            **of_class,
        }

    def _classes(self, gold: Sequence[str], predicted: Sequence[str]) -> dict[str, Agreement]:
        """How well each class is found: those of the model, and then those that only the examples have."""
        labels = [*self.labels, *sorted(set(gold) - set(self.labels))]
        return {label: Agreement.on(label, gold, predicted) for label in labels}

    def report(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Precision, recall and F1 of each class, the confusion matrix, and how well probabilities are calibrated."""
        from sklearn.metrics import confusion_matrix

        from guidance.tasks.calibration import calibration

        gold, predicted = known(predictions)
        if not gold:
            return {}
        classes = self._classes(gold, predicted)
        confidence = [max(p.scores) for p in predictions if p.gold is not None]
        error, bins = calibration(confidence, [true == guess for true, guess in zip(gold, predicted, strict=True)])
        return {
            "classes": {label: {**a.defined_scores(), "examples": int(a.gold)} for label, a in classes.items()},
            "confusion": {
                "labels": list(classes),
                "counts": confusion_matrix(gold, predicted, labels=list(classes)).tolist(),
            },
            "calibration": {"expected_error": error, "bins": bins},
        }

    def labels_of(self, gold: str) -> dict[str, bool]:
        return {gold: gold in self._numbers}

    @classmethod
    def statistics(cls, gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Statistic]:
        """Accuracy, macro F1, the Matthews correlation and, of two classes, the F1 of the last one in alphabetical order."""
        from pipelines.metrics.comparison import OfSums, ShareRight
        from pipelines.metrics.correlations import matthews_of_sums

        numbers = {label: number for number, label in enumerate(sorted(set(labels)))}
        counts = np.zeros((len(gold), 3, len(numbers)))  # right, predicted, true
        for row, (true, guess) in enumerate(zip(gold, predicted, strict=True)):
            counts[row, 2, numbers[true]] = counts[row, 1, numbers[guess]] = 1
            counts[row, 0, numbers[true]] = true == guess

        def combined(sums: np.ndarray) -> float:
            return macro_f1(Agreement(*of_class) for of_class in sums.T)

        found: dict[str, Statistic] = {
            "accuracy": ShareRight.of(gold, predicted),
            "f1_macro": OfSums(counts, combined),
        }
        if len(set(gold)) > 1:  # it is undefined where all true labels are the same
            found["matthews"] = OfSums(counts, lambda sums: matthews_of_sums(*sums))
        if len(numbers) == 2:
            found[f"f1 of {max(numbers)}"] = OfSums(counts, lambda sums: Agreement(*sums[:, 1]).f1)
        return found


def _same_order(labels: list[str], setup: Setup) -> list[str]:
    """The labels in the order of the model to start from, if it has the same ones, so that its head stays right."""
    from guidance.checkpoint import config_of

    assert setup.folder is not None
    config = config_of(setup.folder)
    known = [str(config.id2label[number]) for number in sorted(config.id2label)]
    return known if sorted(known) == sorted(labels) else labels


def _balanced(labels: Sequence[str]) -> dict[str, float]:
    """Weights with which all classes weigh the same: examples / (classes * examples of the class)."""
    counts = Counter(labels)
    return {label: len(labels) / (len(counts) * count) for label, count in counts.items()}
