"""The learner of all tasks: a guided model that learns from labelled examples, and what a task adds to it (`Head`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from guidance.batch import BatchGuidance
from guidance.errors import InputError
from guidance.mechanisms.attacks import Form
from guidance.statistics.roles import COLUMNS
from pipelines.training.batches import Examples, pad
from pipelines.training.learner import Given
from pipelines.training.learners.guided import Guided, GuidedLearner
from pipelines.training.learners.perturbed import freelb_passes, smart_loss
from pipelines.training.model_checks import check_lengths
from pipelines.training.models import build_model
from pipelines.training.objective import Task


@dataclass(frozen=True)
class Prediction:
    """What a model says of one example.

    Attributes:
        number: the row of the example in the dataset's ``documents.parquet``.
        gold: the label as the dataset has it; None if it has none.
        prediction: the label that the model gives, in the same form.
        scores: the numbers behind it: one for each class or choice, or the value itself.
    """

    number: int
    gold: str | None
    prediction: str
    scores: Sequence[float]


@dataclass(frozen=True)
class Batch:
    """A micro-batch of examples, not yet padded.

    Attributes:
        ids: token ids of each row; ``labels``: its label; ``numbers``: the row of its example in ``documents.parquet``.
        columns: token features of each row.
        sizes: how many rows each example has.
        origins: the epoch and the number of each example.
    """

    ids: list[np.ndarray]
    labels: list[str | None]
    numbers: list[int]
    columns: Mapping[str, list[np.ndarray]]
    sizes: list[int]
    origins: Sequence[tuple[int, int]]

    @cached_property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.ids))

    @cached_property
    def tokens(self) -> float:
        """How many tokens there are."""
        return float(sum(map(len, self.ids)))

    @cached_property
    def firsts(self) -> list[int]:
        """The first row of each example."""
        return np.concatenate([[0], np.cumsum(self.sizes)])[:-1].astype(int).tolist()


class Grouped:
    """The examples of a split, each of one row or of several rows that follow each other."""

    def __init__(self, rows: Examples, *, together: bool, kept: np.ndarray | None = None) -> None:
        """
        Args:
            together: whether the rows with the same number are one example.
            kept: which examples to take, by number; all if None.
        """
        self.rows = rows
        new = np.ones(len(rows), bool)
        if together and len(rows):
            new[1:] = np.diff(rows.numbers) != 0
        bounds = np.append(np.flatnonzero(new), len(rows))
        chosen = np.arange(len(bounds) - 1) if kept is None else kept
        self.starts, self.ends = bounds[:-1][chosen], bounds[1:][chosen]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each example."""
        found: np.ndarray = self.rows.bounds[self.ends] - self.rows.bounds[self.starts]
        return found

    def batch(self, examples: Sequence[tuple[int, int]]) -> Batch:
        """The examples with these (epoch, number) pairs."""
        spans = [(int(self.starts[i]), int(self.ends[i])) for _, i in examples]
        chosen = [row for start, end in spans for row in range(start, end)]
        return Batch(
            [self.rows[row] for row in chosen],
            [self.rows.labels[row] for row in chosen],
            [int(self.rows.numbers[row]) for row in chosen],
            {name: [self.rows.column(name, row) for row in chosen] for name in self.rows.columns},
            [end - start for start, end in spans],
            examples,
        )


class Head(ABC):
    """What a task makes of the outputs of its model.

    Attributes:
        form: how an attack on its outputs is judged; see `guidance.mechanisms.attacks.divergence`.
        together: whether rows of the same document are one example.
    """

    form: ClassVar[Form] = "classification"
    together: ClassVar[bool] = False

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The fields of the configuration of its model, such as ``num_labels``."""

    @abstractmethod
    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        """The logits that are trained, (N, classes), from those of the model: (rows, classes), or (rows, T, classes)."""

    @abstractmethod
    def targets(self, batch: Batch) -> Tensor:
        """The target of each output, (N,)."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        """The sum of the losses of all outputs."""

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """What `loss` is divided by."""

    def kept(self, rows: Examples, config: Any) -> np.ndarray | None:
        """Which training examples to use, by number; None for all."""
        return None

    def judged(self, batch: Batch) -> float:
        """How many outputs there are, which is what the divergence under an attack is divided by."""
        return float(len(batch.ids))

    def divisor(self, batch: Batch) -> float:
        """What the sum of the losses is divided by while training; `count` unless a task's paper says otherwise."""
        return self.count(batch)

    @abstractmethod
    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """What the model says of each example."""

    @abstractmethod
    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """The metrics over all examples that have a label; the names are those of the task's row.

        None stands for a metric that these examples do not define."""

    def labels_of(self, gold: str) -> dict[str, bool]:
        """The labels in a true answer, and whether the model can give each; empty if answers are of another kind."""
        return {}

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        """What ``guide predict`` says of an example, in JSON's types."""
        return {"prediction": prediction.prediction, "scores": list(prediction.scores)}

    def report(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """What an evaluation says besides the metrics, as JSON; empty for most tasks."""
        return {}


class ExampleLearner(GuidedLearner):
    """Trains a guided model on the examples of a task; see `pipelines.training.learner.Learner`."""

    def __init__(self, given: Given, task: Task, head: Head) -> None:
        model = build_model(given, task, given.plan.for_part("model"), **head.fields())
        check_lengths(model.config, {"train": given.train, "valid": given.valid}, given.sequences.reference)
        guided = Guided(model, given.plan, given.tokenizer, given.tables, folder=given.folder, judged=("outputs",))
        super().__init__(model, guided, given)
        self.task, self.head, self.seed = task.name, head, given.config.seed
        splits = {"train": given.train, "valid": given.valid}
        kept = {"train": head.kept(given.train, given.config)}
        self.splits = {
            name: Grouped(rows, together=head.together, kept=kept.get(name)) for name, rows in splits.items()
        }
        limit = given.config.valid_sequences
        self.num_valid = min(len(self.splits["valid"]), limit or len(self.splits["valid"]))
        self.lengths = self.splits["train"].lengths
        self.sizes = [len(self.splits["train"])]
        self.inputs = ModelInputs(model, given.tokenizer.pad_token_id)
        self._config = given.config
        if given.config.adversarial == "freelb":
            self.passes = freelb_passes(self, given.config)
        self.scorers = {task.name: self._score} if self.num_valid else {}
        self._predicted: list[Prediction] = []

    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> Batch:
        return self.splits[split].batch(examples)

    def counts(self, batch: Batch) -> dict[str, float]:
        guides = self.guided.counts(float(len(batch.ids)), {"outputs": self.head.judged(batch)})
        smart = {"smart": self.head.judged(batch)} if self._config.adversarial == "smart" else {}
        return {self.task: self.head.divisor(batch), **guides, **smart, "tokens": batch.tokens}

    def losses(self, model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        inputs = self.inputs.of(batch)
        guidance = self.guided.handle.guide(**self.inputs.seen(inputs, batch), step=step)
        outputs = self.outputs(model, inputs, batch, self.guided.forward(guidance))
        targets = self.head.targets(batch).to(outputs.device)
        losses = {self.task: self.head.loss(outputs, targets, batch), **self.guided.losses(guidance)}
        if self._config.adversarial == "smart":
            losses["smart"] = smart_loss(self, self._config, model, batch, inputs, outputs)
        if not self.guided.attacks:
            return losses
        attack = guidance.attack(self.seeds(self.seed, self.origins(batch)))
        attacked = self.outputs(model, inputs, batch, {"guidance": attack})
        return losses | self.guided.attack_losses(attack, (outputs,), (attacked,), self.head.form)

    @staticmethod
    def origins(batch: Batch) -> list[tuple[int, int]]:
        """The epoch of each row of a batch, and the number of its example."""
        return [origin for origin, size in zip(batch.origins, batch.sizes, strict=True) for _ in range(size)]

    def outputs(
        self, model: nn.Module, inputs: Mapping[str, Tensor], batch: Batch, extra: Mapping[str, BatchGuidance]
    ) -> Tensor:
        """The outputs that are trained, from a forward pass; ``extra``: further arguments of the model."""
        return self.head.outputs(model(**inputs, **extra).logits, batch)

    def weights(self, step: int) -> dict[str, float]:
        smart = {"smart": self._config.adversarial_weight} if self._config.adversarial == "smart" else {}
        return {self.task: 1.0, **self.guided.weights(step), **smart}

    @property
    def validated(self) -> tuple[str, ...]:
        return (self.task,)

    def validate(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
        inputs = self.inputs.of(batch)
        extra = self.guided.handle.at_inference(**self.inputs.seen(inputs, batch))
        outputs = self.outputs(model, inputs, batch, extra)
        self._predicted += self.head.predictions(outputs, batch)
        loss = self.head.loss(outputs, self.head.targets(batch).to(outputs.device), batch)
        return {self.task: loss}, {self.task: self.head.count(batch)}

    def evaluate(self, model: nn.Module, rank: int, world: int) -> dict[str, tuple[float, float]]:
        self._predicted = []
        return super().evaluate(model, rank, world)

    def _score(self, model: nn.Module) -> dict[str, float]:
        if len(self._predicted) < self.num_valid:  # other processes have validated the rest
            self.evaluate(model, 0, 1)
        return {name: value for name, value in self.head.metrics(self._predicted).items() if value is not None}


class ModelInputs:
    """Makes the inputs of a model from batches of examples."""

    def __init__(self, model: Any, pad_id: int) -> None:
        self._model, self._pad_id = model, pad_id
        self._segments = getattr(model.config, "type_vocab_size", 0) > 1

    def of(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs of the model by name, each (rows, T), on its device."""
        device = next(self._model.parameters()).device
        found = {
            "input_ids": pad(batch.ids, self._pad_id, batch.length, device),
            "attention_mask": pad([np.ones(len(row), np.int64) for row in batch.ids], 0, batch.length, device),
        }
        if self._segments:
            found["token_type_ids"] = pad(batch.columns["text"], 0, batch.length, device)
        return found

    def seen(self, inputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """What guides read of a batch: its ids, attention mask and token features."""
        device = inputs["input_ids"].device
        features = {
            name: pad(rows, COLUMNS[name].fill, batch.length, device)
            for name, rows in batch.columns.items()
            if name in COLUMNS and rows
        }
        return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], **features}


def batches_of(data: Grouped, size: int, limit: int = 0) -> Iterator[Batch]:
    """The examples of a split in batches, in their order.

    Args:
        limit: how many examples; 0 for all.
    """
    number = min(len(data), limit or len(data))
    for start in range(0, number, size):
        yield data.batch([(0, i) for i in range(start, min(start + size, number))])


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in float32 if they are in half precision; losses are never computed there."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def training_labels(given: Given) -> list[str]:
    """The distinct labels of the training examples: numbers in numerical order, others in alphabetical order.

    Raises:
        InputError: an example has no label.
    """
    labels = given.train.labels.tolist()
    if missing := sum(label is None for label in labels):
        raise InputError(
            f"{given.sequences.reference}: {missing:,} of {len(labels):,} training examples have no label",
            hint="name their column: guide build-dataset --label-column NAME",
        )
    distinct = set(labels)
    if all(label.isdecimal() for label in distinct):
        return sorted(distinct, key=int)
    return sorted(distinct)


def without_gradients(model: Any, handle: Any, inputs: ModelInputs, batch: Batch) -> Tensor:
    """The logits of a trained model, with its plan at work."""
    with torch.no_grad():
        given = inputs.of(batch)
        found: Tensor = model(**given, **handle.at_inference(**inputs.seen(given, batch))).logits
        return found
