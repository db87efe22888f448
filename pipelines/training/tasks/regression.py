"""The task ``regression``: one number for each text, or for each pair of texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from guidance.errors import InputError
from pipelines.lazy import np
from pipelines.training.labels import are_numbers
from pipelines.training.models import WORD_MODELS
from pipelines.training.objective import Card, classifies, predicts_a_value
from pipelines.training.task import Batch, Prediction, Task, at_least_float32

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.mechanisms.attacks import Form
    from pipelines.metrics.significance import Statistic
    from pipelines.training.learner import Setup


class Regression(Task):
    """Mean squared error of one number."""

    name = "regression"
    learns = "a number for each text or pair"
    needs = ""
    families = (*Task.families, *WORD_MODELS)
    card = Card("text regressor", "text-classification", "AutoModelForSequenceClassification")
    examples = ("guide finetune sts --init my-model --task regression --select spearman",)
    columns = ("text",)
    shape = "examples"
    reads_last = True
    selectable = ("pearson", "spearman")
    output = "value"
    unit = "squared error"
    form: ClassVar[Form] = "regression"

    @classmethod
    def fits(cls, counts: Mapping[str, Any]) -> bool:
        return are_numbers(counts)

    @classmethod
    def is_of(cls, config: Any) -> bool:
        return classifies(config) and predicts_a_value(config)

    @classmethod
    def of_training(cls, setup: Setup) -> Self:
        """Raises InputError when the label of a training example is no number."""
        for label, number in zip(setup.train.labels.tolist(), setup.train.numbers.tolist(), strict=True):
            if _value(label) is None:
                raise InputError(
                    f"{setup.sequences.reference}: regression needs numbers as labels; the example in row {number} of the "
                    f"dataset has {label!r}",
                    hint="--task classification, or mend the file",
                )
        return cls()

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "problem_type": "regression"}

    def targets(self, batch: Batch) -> list[float]:
        values = (_value(batch.labels[row]) for row in batch.firsts)
        return [math.nan if value is None else value for value in values]

    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        from torch.nn import functional

        known = ~targets.isnan()
        values = at_least_float32(outputs[known, 0])
        return functional.mse_loss(values, targets[known].to(values), reduction="sum")

    def count(self, batch: Batch) -> float:
        return float(sum(not math.isnan(target) for target in self.targets(batch)))

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
        from pipelines.metrics.correlations import pearson, spearman

        pairs = [(value, p.scores[0]) for p in predictions if (value := _value(p.gold)) is not None]
        if not pairs:
            return {}
        gold, predicted = zip(*pairs, strict=True)
        return {
            "mse": sum((a - b) ** 2 for a, b in pairs) / len(pairs),
            "pearson": pearson(gold, predicted),
            "spearman": spearman(gold, predicted),
        }

    def signatures(self) -> dict[str, str]:
        return {
            "mse": "mean squared error, in the unit of the labels squared",
            "pearson": "correlation of the values, from -1 to 1",
            "spearman": "correlation of their ranks, from -1 to 1",
        }

    def labels_of(self, gold: str) -> dict[str, bool]:
        return {gold: self.is_answer(gold)}

    @classmethod
    def is_answer(cls, gold: str) -> bool:
        return _value(gold) is not None

    @classmethod
    def statistics(cls, gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Statistic]:
        """Pearson's and Spearman's correlation, and the mean squared error."""
        from pipelines.metrics.comparison import mean_of
        from pipelines.metrics.correlations import pearson_of_draws, spearman_of_draws

        x, y = (np.array([float(value) for value in values]) for values in (gold, predicted))
        error: dict[str, Statistic] = {"mse": mean_of((x - y) ** 2)}
        if len(set(gold)) == 1:
            return error
        return {"pearson": pearson_of_draws(x, y), "spearman": spearman_of_draws(x, y), **error}


def _value(label: str | None) -> float | None:
    """A label as a finite number, or None."""
    try:
        value = float(label or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
