"""What a task is: a class in `pipelines.training.tasks`, which holds every fact about it and what it does with outputs.

As with objectives, what needs torch or numpy is imported inside methods.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Self

from guidance.errors import InputError, NumericalError
from pipelines.training.objective import Objective, has_head

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from guidance.guide import Guide
    from guidance.mechanisms.attacks import Form
    from pipelines.engine.stage import Run
    from pipelines.metrics.comparison import Compared, Table
    from pipelines.metrics.significance import Statistic
    from pipelines.storage.artifacts import Artifact
    from pipelines.training.batches import Examples
    from pipelines.training.learner import Setup

SPARSITY_ROWS = 32
"""How many examples the `sparsity` of a plan is counted on."""

UNKNOWN = -100
"""The target of an example without a true answer, or with one that the model cannot give."""


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
        return [0, *accumulate(self.sizes[:-1])]


class Task(Objective, ABC):
    """A task of ``guide finetune``: an objective that learns from the labelled examples of a dataset.

    The class holds what is known about the task.  An instance is the task with the labels of one model, and says what to make
    of the outputs of that model.

    Attributes:
        shape: of the datasets that it reads; see `pipelines.stages.dataset`.
        selectable: the metrics that a validation reports and ``--select`` names; all of them are better when they are higher.
        output: the name of the model's output, if it has only one; it tells a trained model's task.
        form: how an attack on its outputs is judged; see `guidance.mechanisms.attacks.divergence`.
        together: whether rows of the same document are one example.
        reads_last: whether it can judge a row by its last token alone, as it must with a causal language model, in which no
            other token sees the whole row.
        counted: what the scores of a class are about, of which an evaluation says how many there are.
    """

    command: ClassVar[str] = "finetune"
    flag: ClassVar[str] = "--task"
    families: ClassVar[tuple[str, ...]] = ("bert", "roberta", "electra", "modernbert")
    needs_mask_token: ClassVar[bool] = False
    needs_pad_token: ClassVar[bool] = False
    needs_corpus: ClassVar[bool] = True
    learner: ClassVar[str] = "pipelines.training.learners.perturbed:prepare"

    shape: ClassVar[str]
    selectable: ClassVar[tuple[str, ...]]
    output: ClassVar[str] = ""
    form: ClassVar[Form] = "classification"
    together: ClassVar[bool] = False
    reads_last: ClassVar[bool] = False
    counted: ClassVar[str] = "examples"

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.measured_as = getattr(cls, "name", "")

    # what is known about it

    @classmethod
    def fits(cls, counts: Mapping[str, Any]) -> bool:
        """Whether ``--task auto`` chooses it for a dataset of its shape with these counts.  The first task that fits is chosen."""
        return True

    @classmethod
    def is_of(cls, config: Any) -> bool:
        """Whether a model with this configuration has outputs of this kind."""
        return has_head(config, cls.card.auto_class.removeprefix("AutoModel"))

    @classmethod
    def measures(cls, config: Any, data: Artifact) -> bool:
        return data.counts.get("shape") == cls.shape and cls.is_of(config)

    @classmethod
    def opened_as(cls) -> str:
        return cls.card.auto_class

    @classmethod
    def refusal(cls, guide: Guide) -> str:
        if reason := super().refusal(guide):
            return reason
        if guide.bound_pattern and {"original", "predicted"} & set(guide.bound_pattern.needs):
            return f"{guide.pattern} reads what a generator predicts, and fine-tuning has none"
        return ""

    @classmethod
    @abstractmethod
    def of_training(cls, setup: Setup) -> Self:
        """The task for the labels of the training examples.

        Raises:
            InputError: the task cannot be learned from them.
        """

    @classmethod
    def of_model(cls, config: Any) -> Self:
        """The task for the labels of a trained model; by default a task without labels of its own."""
        return cls()

    @classmethod
    def evaluate(cls, run: Run[Any], folder: Path, model: Any, handle: Any) -> None:
        resolve_name("pipelines.training.learners.task_scores:evaluate")(run, model, handle, cls.of_model(model.config))

    @classmethod
    def answers(cls, run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
        """What ``guide predict`` says of each example of a split, in JSON's types.

        Args:
            run: see `pipelines.training.learners.task_scores.predict`.
        """
        answers = resolve_name("pipelines.training.learners.task_scores:answers")
        rows: Iterator[dict[str, Any]] = answers(run, model, handle, cls.of_model(model.config))
        return rows

    # its model and its loss

    def fields(self) -> dict[str, Any]:
        """The fields of the configuration of its model, such as ``num_labels``; by default for the only `output`."""
        return {"num_labels": 1, "id2label": {0: self.output}, "label2id": {self.output: 0}}

    def kept(self, rows: Examples, config: Any) -> np.ndarray | None:
        """Which training examples to use, by number; None for all."""
        return None

    def judged_together(self, rows: Examples, number: int) -> int:
        """How many examples a validation or evaluation scores that is limited to ``number``: just so many, unless the task scores
        several examples as one."""
        return number

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        """The logits that are trained, (N, classes), from those of the model: (rows, classes), or (rows, T, classes)."""
        return logits

    @abstractmethod
    def targets(self, batch: Batch) -> Sequence[float]:
        """The target of each output: the number of its class, or `UNKNOWN`."""

    def loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        """The sum of the losses of all outputs: by default the cross-entropy."""
        from guidance.objectives.masked_lm import cross_entropy

        return cross_entropy(outputs, targets)

    def count(self, batch: Batch) -> float:
        """What `loss` is divided by: how many outputs have a target."""
        return float(sum(target != UNKNOWN for target in self.targets(batch)))

    def judged(self, batch: Batch) -> float:
        """How many outputs there are, which is what the divergence under an attack is divided by."""
        return float(len(batch.ids))

    unit: ClassVar[str] = "nats"
    """That of its loss."""

    sums_losses: ClassVar[bool] = False
    """Training adds the losses of a batch up, as a task's paper does; ``loss/mean``, which is only reported, is their mean."""

    def divisor(self, batch: Batch) -> float:
        """What the sum of the losses is divided by while training; the loop divides by at least 1."""
        return 0.0 if self.sums_losses else self.count(batch)

    # what it says of examples, and how good that is

    @abstractmethod
    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """What the model says of each example."""

    def completed(self, predictions: Sequence[Prediction], corpus: Artifact) -> list[Prediction]:
        """The predictions, with what only the text of the examples tells."""
        return list(predictions)

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        """What ``guide predict`` says of an example, in JSON's types."""
        return {"prediction": prediction.prediction, "scores": list(prediction.scores)}

    @abstractmethod
    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """The metrics over all examples that have a label, by name.

        None stands for a metric that these examples do not define."""

    def signatures(self) -> dict[str, str]:
        """How each metric is computed, or its unit, by the name of the metric."""
        return {}

    def report(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """What an evaluation says besides the metrics, as JSON; empty for most tasks."""
        return {}

    def labels_of(self, gold: str) -> dict[str, bool]:
        """The labels in a true answer, and whether the model can give each; empty if answers are of another kind."""
        return {}

    @classmethod
    def is_answer(cls, gold: str) -> bool:
        """Whether a true answer is one that metrics can count; they leave out the others."""
        return True

    @classmethod
    def statistics(
        cls, gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]
    ) -> Mapping[str, Statistic]:
        """The metrics that ``guide compare`` tests, as functions of chosen examples; empty if it tests none.

        Args:
            labels: all that occur, in true answers or in predictions of either model.
        """
        return {}

    @classmethod
    def compare(cls, one: Table, other: Table) -> list[Compared]:
        from pipelines.metrics.comparison import compare_on_same

        return compare_on_same(cls.statistics, one, other, cls.is_answer)

    @classmethod
    def compare_sets(cls, one: Table, other: Table) -> list[Compared]:
        from pipelines.metrics.comparison import compare_on_others

        return compare_on_others(cls.statistics, one, other, cls.is_answer)


class YesNoTask(Task):
    """A task that answers yes or no with one logit.

    The outputs that are trained are the logits of *no*, which is always 0, and of *yes*: their softmax is the sigmoid of the one
    logit, and their cross-entropy is the binary one, so an attack compares two probabilities.
    """

    @classmethod
    def of_training(cls, setup: Setup) -> Self:
        """Raises InputError when no answer of the training examples is yes, or none is no."""
        answers = {answer for label in setup.train.labels for answer in (label or "").split()}
        if answers != {"0", "1"}:
            raise InputError(
                f"{setup.sequences.reference}: {cls.one_answer(answers)}",
                hint="look at the warnings of build-dataset and build-sequences",
            )
        return cls()

    @classmethod
    @abstractmethod
    def one_answer(cls, answers: set[str]) -> str:
        """What to say if all training examples have the same answer."""


def known(predictions: Iterable[Prediction]) -> tuple[list[str], list[str]]:
    """The true labels of the examples that have one, and the predicted ones."""
    pairs = [(p.gold, p.prediction) for p in predictions if p.gold is not None]
    return [gold for gold, _ in pairs], [predicted for _, predicted in pairs]


def highest(scores: Sequence[float], gold: int | str | None) -> int:
    """The number of the highest score.  Equal scores never count as right: of these it is one that is not the gold label.  Raises
    NumericalError if a score is not a number."""
    if any(map(math.isnan, scores)):
        raise NumericalError("a score of the model is not a number")
    tied = [number for number, score in enumerate(scores) if score == max(scores)]
    return next((number for number in tied if str(number) != str(gold)), tied[0])


def scores_of_yes(outputs: Tensor) -> list[float]:
    """The probability of yes of each output, (N, 2)."""
    scores: list[float] = outputs.detach().double().softmax(-1)[:, 1].cpu().tolist()
    return scores


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in float32 if they are in half precision; losses are never computed there."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))
