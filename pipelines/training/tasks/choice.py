"""The task ``choice``: which of several choices is right; one logit for each choice of a question, of which the highest wins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self

from guidance.errors import InputError, counted
from guidance.tasks.scores import accuracy
from pipelines.training.objective import Card, classifies, predicts_a_value
from pipelines.training.task import UNKNOWN, Batch, Prediction, Task, highest, known

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.metrics.significance import Statistic
    from pipelines.training.learner import Setup

ABSENT = -1e4
"""The logit of a choice that a question lacks: its probability is 0, and divergences stay finite."""


class Choice(Task):
    """Cross-entropy over the choices of each question.

    Questions may have different numbers of choices: an output is a question, and the logits of choices that it lacks are
    `ABSENT`.
    """

    name = "choice"
    learns = "which choice is right"
    needs = "choice learns from multiple-choice questions (--format dream, hellaswag, arc, or --choices-column)."
    card = Card("multiple-choice model", "multiple-choice", "AutoModelForSequenceClassification")
    examples = ("guide finetune dream --init my-model --max-length 512 --plan preset:asa --epochs 6",)
    columns = ("text",)
    shape = "choices"
    reads_last = True
    selectable = ("accuracy",)
    output = "right"
    together: ClassVar[bool] = True

    @classmethod
    def is_of(cls, config: Any) -> bool:
        return classifies(config) and predicts_a_value(config)

    @classmethod
    def of_training(cls, setup: Setup) -> Self:
        """Raises InputError when a training example has no right choice."""
        examples = zip(setup.train.numbers.tolist(), setup.train.labels.tolist(), strict=True)
        if missing := len({number for number, label in examples if label is None}):
            raise InputError(
                f"{setup.sequences.reference}: the right choice of {counted(missing, 'training question')} is not known",
                hint="name the field of the answer: guide build-dataset --label-column NAME",
            )
        return cls()

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "problem_type": None}

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        import torch

        outputs = logits.new_full((len(batch.sizes), max(batch.sizes)), ABSENT)
        rows = torch.repeat_interleave(torch.arange(len(batch.sizes)), torch.tensor(batch.sizes))
        columns = torch.tensor(list(chain.from_iterable(map(range, batch.sizes))))
        return outputs.index_put((rows.to(logits.device), columns.to(logits.device)), logits[:, 0])

    def targets(self, batch: Batch) -> list[int]:
        labels = (batch.labels[row] for row in batch.firsts)
        return [UNKNOWN if label is None else int(label) for label in labels]

    def judged(self, batch: Batch) -> float:
        return float(len(batch.sizes))

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        predictions = []
        for row, size, logits in zip(batch.firsts, batch.sizes, outputs.detach().double().cpu(), strict=True):
            scores = logits[:size].softmax(-1).tolist()
            chosen = highest(scores, batch.labels[row])
            predictions.append(Prediction(batch.numbers[row], batch.labels[row], str(chosen), scores))
        return predictions

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        return {"prediction": int(prediction.prediction), "scores": list(prediction.scores)}

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Accuracy."""
        gold, predicted = known(predictions)
        return {"accuracy": accuracy(gold, predicted)} if gold else {}

    def signatures(self) -> dict[str, str]:
        return {"accuracy": "share of the questions"}

    @classmethod
    def statistics(cls, gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Statistic]:
        from pipelines.metrics.comparison import ShareRight

        return {"accuracy": ShareRight.of(gold, predicted)}
