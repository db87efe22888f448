"""The head of ``choice``: one logit for each choice of a question, of which the highest wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.tasks.scores import accuracy
from pipelines.training.learner import Given
from pipelines.training.learners.examples import Batch, ExampleLearner, Head, Prediction, at_least_float32
from pipelines.training.objective import Task

MISSING = -1e4
"""The logit of a choice that a question lacks: its probability is 0, and divergences stay finite."""


class Choices(Head):
    """Cross-entropy over the choices of each question.

    Questions may have different numbers of choices: an output is a question, and the logits of choices that it lacks are
    `MISSING`.
    """

    together: ClassVar[bool] = True

    @classmethod
    def of_training(cls, given: Given) -> Choices:
        """Raises InputError when a training example has no right choice."""
        labels = given.train.labels.tolist()
        if missing := sum(label is None for label in labels):
            raise InputError(
                f"{given.sequences.reference}: the right choice of {missing:,} training rows is not known",
                hint="name the field of the answer: guide build-dataset --label-column NAME",
            )
        return cls()

    @classmethod
    def of_model(cls, config: Any) -> Choices:
        """For any model with one output for each row."""
        return cls()

    def fields(self) -> dict[str, Any]:
        return {"num_labels": 1, "id2label": {0: "right"}, "label2id": {"right": 0}, "problem_type": None}

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        found = logits.new_full((len(batch.sizes), max(batch.sizes)), MISSING)
        rows = torch.repeat_interleave(torch.arange(len(batch.sizes)), torch.tensor(batch.sizes))
        columns = torch.cat([torch.arange(size) for size in batch.sizes])
        return found.index_put((rows.to(logits.device), columns.to(logits.device)), logits[:, 0])

    def targets(self, batch: Batch) -> Tensor:
        labels = (batch.labels[row] for row in batch.firsts)
        return torch.tensor([-100 if label is None else int(label) for label in labels])

    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        return torch.nn.functional.cross_entropy(at_least_float32(outputs), targets, ignore_index=-100, reduction="sum")

    def count(self, batch: Batch) -> float:
        return float((self.targets(batch) != -100).sum())

    def judged(self, batch: Batch) -> float:
        return float(len(batch.sizes))

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        found = []
        for row, size, logits in zip(batch.firsts, batch.sizes, outputs.detach().double().cpu(), strict=True):
            scores = logits[:size].softmax(-1).tolist()
            # equal scores never count as right
            tied = [str(place) for place, score in enumerate(scores) if score == max(scores)]
            chosen = next((place for place in tied if place != batch.labels[row]), tied[0])
            found.append(Prediction(batch.numbers[row], batch.labels[row], chosen, scores))
        return found

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        return {"prediction": int(prediction.prediction), "scores": list(prediction.scores)}

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Accuracy."""
        known = [p for p in predictions if p.gold is not None]
        return {"accuracy": accuracy([p.gold for p in known], [p.prediction for p in known])} if known else {}


def prepare(given: Given, task: Task) -> ExampleLearner:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    return ExampleLearner(given, task, Choices.of_training(given))
