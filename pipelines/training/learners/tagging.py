"""The head of ``tagging``: a tag for each word, read at the first token of the word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from guidance.errors import InputError
from guidance.tasks.entities import OUTSIDE, entity_agreement, token_agreement
from guidance.tasks.scores import Agreement, accuracy
from pipelines.training.learner import Given
from pipelines.training.learners.examples import Batch, ExampleLearner, Head, Prediction, at_least_float32
from pipelines.training.objective import Task

UNKNOWN = -100
"""The target of a word without a tag, or with one that the model does not know."""


class Tags(Head):
    """Cross-entropy over tags, the mean over words.

    A word counts once: in a long example, whose rows overlap, it is read in the row where its first token is farthest from
    both ends, of equal ones in the first.  A word without tokens is not trained, and its prediction is ``O``.

    Attributes:
        tags: the tag of each class.
    """

    together: ClassVar[bool] = True

    def __init__(self, tags: Sequence[str]) -> None:
        self.tags = tuple(tags)
        self._numbers = {tag: number for number, tag in enumerate(tags)}

    @classmethod
    def of_training(cls, given: Given) -> Tags:
        """For the tags of the training examples, ``O`` first.

        Raises:
            InputError: an example has no tags, or all words have the same one.
        """
        labels = given.train.labels.tolist()
        if missing := sum(label is None for label in labels):
            raise InputError(
                f"{given.sequences.reference}: {missing:,} of {len(labels):,} training examples have no tags"
            )
        tags = sorted({tag for label in labels for tag in label.split()}, key=lambda tag: (tag != OUTSIDE, tag))
        if len(tags) < 2:
            raise InputError(
                f"{given.sequences.reference}: all words have the tag {tags[0]!r}",
                hint="--label-column of `guide build-dataset` chooses the column of the tags",
            )
        return cls(tags)

    @classmethod
    def of_model(cls, config: Any) -> Tags:
        """For the tags of a trained model."""
        return cls([str(config.id2label[number]) for number in range(config.num_labels)])

    def fields(self) -> dict[str, Any]:
        return {"num_labels": len(self.tags), "id2label": dict(enumerate(self.tags)), "label2id": dict(self._numbers)}

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        read = _words(batch)
        rows, places = (torch.from_numpy(found).to(logits.device) for found in (read.rows, read.places))
        return logits[rows, places]

    def labels_of(self, gold: str) -> dict[str, bool]:
        return {tag: tag in self._numbers for tag in gold.split() if tag != OUTSIDE}

    def targets(self, batch: Batch) -> Tensor:
        labels = [batch.labels[row] for row in batch.firsts]
        tags = [label.split() if label is not None else [] for label in labels]
        read = _words(batch)
        found = [
            self._numbers.get(tags[example][word], UNKNOWN) if word < len(tags[example]) else UNKNOWN
            for example, word in zip(read.examples.tolist(), read.words.tolist(), strict=True)
        ]
        return torch.tensor(found, dtype=torch.int64)

    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(at_least_float32(outputs), targets, ignore_index=UNKNOWN, reduction="sum")

    def count(self, batch: Batch) -> float:
        return float((self.targets(batch) != UNKNOWN).sum())

    def judged(self, batch: Batch) -> float:
        return float(len(_words(batch).words))

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        probabilities, classes = (found.cpu().numpy() for found in outputs.detach().double().softmax(-1).max(-1))
        read = _words(batch)
        found = []
        for example, row in enumerate(batch.firsts):
            own = read.examples == example
            words, label = read.words[own], batch.labels[row]
            size = len(label.split()) if label is not None else int(words.max(initial=-1)) + 1
            tags, scores = [OUTSIDE] * size, [0.0] * size
            for word, class_, score in zip(
                words.tolist(), classes[own].tolist(), probabilities[own].tolist(), strict=True
            ):
                if word < size:
                    tags[word], scores[word] = self.tags[class_], score
            found.append(Prediction(batch.numbers[row], label, " ".join(tags), scores))
        return found

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        return {"tags": prediction.prediction.split(), "scores": list(prediction.scores)}

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Precision, recall and F1 of entities as conlleval counts them, F1 of the tags of single tokens without ``O``, and
        accuracy; of tags that name no entities, such as parts of speech, only the last two."""
        gold, predicted = _tags(predictions)
        if not gold:
            return {}
        found: dict[str, float | None] = {
            "accuracy": accuracy([tag for tags in gold for tag in tags], [tag for tags in predicted for tag in tags]),
            "token_f1": token_agreement(gold, predicted).f1,
        }
        if (agreement := _entities(gold, predicted)) is None:
            return found
        all_ = agreement[""]
        return {"f1": all_.f1, "precision": all_.precision, "recall": all_.recall, **found}

    def report(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Precision, recall and F1 of each type of entity."""
        agreement = _entities(*_tags(predictions)) or {}
        return {
            "classes": {
                kind: {"precision": a.precision, "recall": a.recall, "f1": a.f1, "examples": a.gold}
                for kind, a in agreement.items()
                if kind
            }
        }


class _Words(NamedTuple):
    """The words of a batch that have tokens, example by example: its number, that of the word in it, and where it is read."""

    examples: np.ndarray
    words: np.ndarray
    rows: np.ndarray
    places: np.ndarray


def _words(batch: Batch) -> _Words:
    found = [np.zeros((5, 0), np.int64)]
    examples = np.repeat(np.arange(len(batch.sizes)), batch.sizes)
    for row, (example, numbers) in enumerate(zip(examples, batch.columns["word"], strict=True)):
        text = np.flatnonzero(numbers >= 0)
        words, first = np.unique(numbers[text], return_index=True)
        places = text[first]
        nearest_end = np.minimum(places, len(numbers) - 1 - places)
        found.append(np.stack([np.full(len(words), example), words, -nearest_end, np.full(len(words), row), places]))
    all_ = np.concatenate(found, axis=1)
    examples, words, _, rows, places = all_[:, np.lexsort(all_[3::-1])]
    is_first = np.ones(len(words), bool)
    is_first[1:] = (np.diff(examples) != 0) | (np.diff(words) != 0)
    return _Words(examples[is_first], words[is_first], rows[is_first], places[is_first])


def _tags(predictions: Sequence[Prediction]) -> tuple[list[list[str]], list[list[str]]]:
    """The gold tags of the examples that have some, and the predicted ones."""
    known = [(p.gold, p.prediction) for p in predictions if p.gold is not None]
    return [gold.split() for gold, _ in known], [predicted.split() for _, predicted in known]


def _entities(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, Agreement] | None:
    """How well entities agree; None if the tags name no entities."""
    try:
        return entity_agreement(gold, predicted)
    except InputError:
        return None


def prepare(given: Given, task: Task) -> ExampleLearner:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    return ExampleLearner(given, task, Tags.of_training(given))
