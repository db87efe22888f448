"""The task ``tagging``: a tag for each word, such as named entities, read at the first token of the word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import eq
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from guidance.errors import InputError, counted
from guidance.tasks.entities import OUTSIDE, entity_agreement, token_agreement
from guidance.tasks.scores import Agreement, accuracy
from pipelines.lazy import np
from pipelines.training.labels import TAGGED_WORD
from pipelines.training.objective import Card
from pipelines.training.task import UNKNOWN, Batch, Prediction, Task, known

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.metrics.significance import Statistic
    from pipelines.storage.artifacts import Artifact
    from pipelines.training.learner import Setup


class Tagging(Task):
    """Cross-entropy over tags, the mean over words.

    A word counts once: in a long example, whose rows overlap, it is read in the row where its first token is farthest from
    both ends, of equal ones in the first.  A word without tokens is not trained, and its prediction is ``O``.

    Attributes:
        tags: the tag of each class.
    """

    name = "tagging"
    learns = "a tag for each word"
    needs = "tagging learns from words in CoNLL columns (--format conll)."
    card = Card("token tagger", "token-classification", "AutoModelForTokenClassification")
    examples = ("guide finetune ner --init my-model --select f1 --epochs 10",)
    columns = ("text", "word")
    shape = "tags"
    selectable = ("f1", "precision", "recall", "token_f1", "accuracy")
    together: ClassVar[bool] = True
    counted: ClassVar[str] = "entities"

    def __init__(self, tags: Sequence[str]) -> None:
        self.tags = tuple(tags)
        self._numbers = {tag: number for number, tag in enumerate(tags)}

    @classmethod
    def of_training(cls, setup: Setup) -> Self:
        """For the tags of the training examples, ``O`` first.

        Raises:
            InputError: an example has no tags, or all words have the same one.
        """
        labels = setup.train.labels.tolist()
        if missing := sum(label is None for label in labels):
            have = counted(missing, "has", "have", of=f"{len(labels):,} training examples")
            raise InputError(f"{setup.sequences.reference}: {have} no tags")
        tags = sorted({tag for label in labels for tag in label.split()}, key=lambda tag: (tag != OUTSIDE, tag))
        if len(tags) < 2:
            raise InputError(
                f"{setup.sequences.reference}: all words have the tag {tags[0]!r}",
                hint="--label-column of `guide build-dataset` chooses the column of the tags",
            )
        return cls(tags)

    @classmethod
    def of_model(cls, config: Any) -> Self:
        return cls([str(config.id2label[number]) for number in range(config.num_labels)])

    @classmethod
    def answers(cls, run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
        """The words of each example, and the tag of each."""
        from pipelines.training.learners.task_scores import documents, predict

        task = cls.of_model(model.config)
        predictions, _ = predict(run, model, handle, task)
        (ids, _), words = documents(run.inputs["corpus"]), _words_of(run.inputs["corpus"])
        for prediction in predictions:
            yield {"id": ids[prediction.number], "words": words[prediction.number], **task.answer(prediction)}

    def fields(self) -> dict[str, Any]:
        return {"num_labels": len(self.tags), "id2label": dict(enumerate(self.tags)), "label2id": dict(self._numbers)}

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        import torch

        words = _words(batch)
        rows, tokens = (torch.from_numpy(numbers).to(logits.device) for numbers in (words.rows, words.tokens))
        return logits[rows, tokens]

    def targets(self, batch: Batch) -> list[int]:
        labels = [batch.labels[row] for row in batch.firsts]
        tags = [label.split() if label is not None else [] for label in labels]
        words = _words(batch)
        return [
            self._numbers.get(tags[example][word], UNKNOWN) if word < len(tags[example]) else UNKNOWN
            for example, word in zip(words.examples.tolist(), words.numbers.tolist(), strict=True)
        ]

    def judged(self, batch: Batch) -> float:
        return float(len(_words(batch).numbers))

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        probabilities, classes = (best.cpu().numpy() for best in outputs.detach().double().softmax(-1).max(-1))
        words = _words(batch)
        predictions = []
        for example, row in enumerate(batch.firsts):
            own = words.examples == example
            numbers, label = words.numbers[own], batch.labels[row]
            size = len(label.split()) if label is not None else int(numbers.max(initial=-1)) + 1
            tags, scores = [OUTSIDE] * size, [0.0] * size
            for word, class_, score in zip(
                numbers.tolist(), classes[own].tolist(), probabilities[own].tolist(), strict=True
            ):
                if word < size:
                    tags[word], scores[word] = self.tags[class_], score
            predictions.append(Prediction(batch.numbers[row], label, " ".join(tags), scores))
        return predictions

    def completed(self, predictions: Sequence[Prediction], corpus: Artifact) -> list[Prediction]:
        """Predictions with a tag for each word: without labels nothing else tells of last words that have no tokens."""
        words, completed = _words_of(corpus), []
        for one in predictions:
            missing = len(words[one.number]) - len(one.scores)
            tags = [*one.prediction.split(), *[OUTSIDE] * missing]
            completed.append(replace(one, prediction=" ".join(tags), scores=[*one.scores, *[0.0] * missing]))
        return completed

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        return {"tags": prediction.prediction.split(), "scores": list(prediction.scores)}

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Precision, recall and F1 of entities as conlleval counts them, F1 of the tags of single tokens without ``O``, and
        accuracy; of tags that name no entities, such as parts of speech, only the last two."""
        gold, predicted = _tags(predictions)
        if not gold:
            return {}
        metrics: dict[str, float | None] = {
            "accuracy": accuracy([tag for tags in gold for tag in tags], [tag for tags in predicted for tag in tags]),
            "token_f1": token_agreement(gold, predicted).f1,
        }
        if (agreement := _entities(gold, predicted)) is None:
            return metrics
        return {"f1": agreement[""].f1, **agreement[""].scores(), **metrics}

    def signatures(self) -> dict[str, str]:
        entities = "of whole entities, words and type, as conlleval counts them"
        return {
            **dict.fromkeys(("f1", "precision", "recall"), entities),
            "accuracy": "share of the words",
            "token_f1": "of the tags of words, O left out",
        }

    def report(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Precision, recall and F1 of each type of entity."""
        agreement = _entities(*_tags(predictions)) or {}
        return {"classes": {kind: {**a.defined_scores(), "examples": a.gold} for kind, a in agreement.items() if kind}}

    def labels_of(self, gold: str) -> dict[str, bool]:
        return {tag: tag in self._numbers for tag in gold.split() if tag != OUTSIDE}

    @classmethod
    def statistics(cls, gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Statistic]:
        """The metrics of `metrics`, as functions of sentences."""
        from pipelines.metrics.comparison import OfSums, of_agreements

        pairs = [([true.split()], [guess.split()]) for true, guess in zip(gold, predicted, strict=True)]
        words = np.array([(len(true), sum(map(eq, true, guess))) for (true,), (guess,) in pairs], float)
        statistics: dict[str, Statistic] = {
            "accuracy": OfSums(words, lambda sums: float(sums[1] / max(1, sums[0]))),
            "token_f1": of_agreements([token_agreement(*pair) for pair in pairs])["f1"],
        }
        each = [_entities(*pair) for pair in pairs]
        if None in each:
            return statistics
        return {**of_agreements([agreement[""] for agreement in each if agreement]), **statistics}


class _Words(NamedTuple):
    """The words of a batch that have tokens, example by example: its number, that of the word in it, and where it is read."""

    examples: np.ndarray
    numbers: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray


def _words(batch: Batch) -> _Words:
    parts = [np.zeros((5, 0), np.int64)]
    examples = np.repeat(np.arange(len(batch.sizes)), batch.sizes)
    for row, (example, numbers) in enumerate(zip(examples, batch.columns[TAGGED_WORD], strict=True)):
        text = np.flatnonzero(numbers >= 0)
        words, first = np.unique(numbers[text], return_index=True)
        tokens = text[first]
        nearest_end = np.minimum(tokens, len(numbers) - 1 - tokens)
        parts.append(np.stack([np.full(len(words), example), words, -nearest_end, np.full(len(words), row), tokens]))
    all_ = np.concatenate(parts, axis=1)
    examples, words, _, rows, tokens = all_[:, np.lexsort(all_[3::-1])]
    is_first = np.ones(len(words), bool)
    is_first[1:] = (np.diff(examples) != 0) | (np.diff(words) != 0)
    return _Words(examples[is_first], words[is_first], rows[is_first], tokens[is_first])


def _words_of(corpus: Artifact) -> list[list[str]]:
    """The words of each document of a dataset of tagged words."""
    from pipelines.text.document_sequences import texts_of

    return [" ".join(text.sentences).split() for text in texts_of(corpus)]


def _tags(predictions: Sequence[Prediction]) -> tuple[list[list[str]], list[list[str]]]:
    """The gold tags of the examples that have some, and the predicted ones."""
    gold, predicted = known(predictions)
    return [tags.split() for tags in gold], [tags.split() for tags in predicted]


def _entities(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, Agreement] | None:
    """How well entities agree; None if the tags name no entities."""
    try:
        return entity_agreement(gold, predicted)
    except InputError:
        return None
