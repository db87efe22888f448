"""Heads of the tasks that answer yes or no with one logit: ``summarization`` and ``segmentation``.

The outputs that are trained are the logits of *no*, which is always 0, and of *yes*: their softmax is the sigmoid of the one
logit, and their cross-entropy is the binary one, so an attack compares two probabilities.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from guidance.errors import InputError
from guidance.tasks.scores import Agreement
from guidance.tasks.segments import pk, window_diff
from pipelines.training.batches import Examples
from pipelines.training.learner import Given
from pipelines.training.learners.examples import Batch, ExampleLearner, Head, Prediction, at_least_float32
from pipelines.training.objective import Task


def two_logits(logits: Tensor) -> Tensor:
    """(N, 2) logits of no and yes, from the logits (N,) of yes."""
    return torch.stack((torch.zeros_like(logits), logits), -1)


class _Binary(Head):
    """Binary cross-entropy."""

    @classmethod
    def of_training(cls, given: Given) -> _Binary:
        """For any training examples that have both answers.

        Raises:
            InputError: no answer is yes, or none is no.
        """
        found = {answer for label in given.train.labels for answer in (label or "").split()}
        if found != {"0", "1"}:
            raise InputError(
                f"{given.sequences.reference}: " + cls.one_answer(found),
                hint="look at the warnings of build-dataset and build-sequences",
            )
        return cls()

    @classmethod
    def of_model(cls, config: Any) -> _Binary:
        """For any model with one output."""
        return cls()

    @classmethod
    @abstractmethod
    def one_answer(cls, found: set[str]) -> str:
        """What to say if all training examples have the same answer."""

    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(at_least_float32(outputs), targets, reduction="sum")


def _scores(outputs: Tensor) -> list[float]:
    found: list[float] = outputs.detach().double().softmax(-1)[:, 1].cpu().tolist()
    return found


class Sentences(_Binary):
    """Says of each sentence of a document whether it belongs to the summary, from the state of its ``[CLS]``.

    Source: Liu & Lapata 2019: the loss is the sum over all sentences of a batch.
    """

    @classmethod
    def one_answer(cls, found: set[str]) -> str:
        return f"{'every' if '1' in found else 'no'} sentence of the training documents belongs to its summary"

    def fields(self) -> dict[str, Any]:
        return {"num_labels": 1, "id2label": {0: "in_summary"}, "label2id": {"in_summary": 0}}

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        rows, places = [], []
        for row, segment in enumerate(batch.columns["segment"]):
            found = np.flatnonzero(np.diff(segment, prepend=-1))
            rows += [row] * len(found)
            places += found.tolist()
        return two_logits(logits[rows, places, 0])

    def targets(self, batch: Batch) -> Tensor:
        return torch.tensor([int(answer) for label in batch.labels for answer in (label or "").split()])

    def count(self, batch: Batch) -> float:
        return float(sum(len((label or "").split()) for label in batch.labels))

    def judged(self, batch: Batch) -> float:
        """An attack is judged by every sentence."""
        return self.count(batch)

    def divisor(self, batch: Batch) -> float:
        """None: the loop divides by at least 1, so that the sum stays as it is."""
        return 0.0

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        scores = iter(_scores(outputs))
        found = []
        for label, number in zip(batch.labels, batch.numbers, strict=True):
            own = [next(scores) for _ in (label or "").split()]
            answers = " ".join(str(int(score > 0.5)) for score in own)
            found.append(Prediction(number, label, answers, own))
        return found

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """How well as many of the best sentences as the oracle takes are those that the oracle takes."""
        gold: list[bool] = []
        chosen: list[bool] = []
        for prediction in predictions:
            own = [answer == "1" for answer in (prediction.gold or "").split()]
            best = sorted(range(len(own)), key=lambda n, p=prediction: -p.scores[n])[: sum(own)]  # type: ignore[misc]
            gold += own
            chosen += [number in best for number in range(len(own))]
        return {"oracle_f1": Agreement.on(True, gold, chosen).f1} if gold else {}


class Boundaries(_Binary):
    """Says of the boundary between two sentences whether a section ends there, from the state of ``[CLS]``.

    Source: Lukasik et al. 2020, cross-segment BERT.
    """

    @classmethod
    def one_answer(cls, found: set[str]) -> str:
        if "1" in found:
            return "every sentence of the training documents is a section of its own"
        return "no training document has a boundary between sections"

    def fields(self) -> dict[str, Any]:
        return {"num_labels": 1, "id2label": {0: "section_ends"}, "label2id": {"section_ends": 0}}

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        return two_logits(logits[:, 0])

    def kept(self, rows: Examples, config: Any) -> np.ndarray | None:
        """All boundaries, and the share of the other places that ``negatives`` says."""
        if config.negatives == 1:
            return None
        drawn = np.random.default_rng(config.seed).random(len(rows)) < config.negatives
        return np.flatnonzero(drawn | (rows.labels == "1"))

    def targets(self, batch: Batch) -> Tensor:
        return torch.tensor([int(label or "0") for label in batch.labels])

    def count(self, batch: Batch) -> float:
        return float(len(batch.labels))

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        return [
            Prediction(number, label, str(int(score > 0.5)), [score])
            for number, label, score in zip(batch.numbers, batch.labels, _scores(outputs), strict=True)
        ]

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Precision, recall and F1 of boundaries, all documents together, and the means of Pk and WindowDiff over documents.

        A document with no more sentences than its window has no Pk; `report` counts such documents.
        """
        if not predictions:
            return {}
        agreed = Agreement.on("1", [p.gold for p in predictions], [p.prediction for p in predictions])
        found: dict[str, float | None] = {"precision": agreed.precision, "recall": agreed.recall, "f1": agreed.f1}
        for name, measure in (("pk", pk), ("window_diff", window_diff)):
            values = [measure(*ends) for ends in documents_of(predictions)]
            known = [value for value in values if value is not None]
            if known:
                found[name] = math.fsum(known) / len(known)
        return found

    def report(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """How many documents there are, and how many of them are too short for a window."""
        documents = documents_of(predictions)
        short = sum(pk(*ends) is None for ends in documents)
        return {"documents": len(documents), "documents_without_pk": short}


def documents_of(predictions: Sequence[Prediction]) -> list[tuple[list[bool], list[bool]]]:
    """For each document, of each of its sentences whether a section ends there: as it is, and as predicted."""
    found: list[tuple[list[bool], list[bool]]] = []
    number = None
    for prediction in predictions:
        if prediction.number != number:
            found.append(([], []))
            number = prediction.number
        found[-1][0].append(prediction.gold == "1")
        found[-1][1].append(prediction.prediction == "1")
    # the last sentence has no row; it always ends a section
    return [([*gold, True], [*predicted, True]) for gold, predicted in found]


def prepare(given: Given, task: Task, head: type[Sentences | Boundaries]) -> ExampleLearner:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    return ExampleLearner(given, task, head.of_training(given))
