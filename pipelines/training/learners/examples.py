"""The learner of all tasks: a guided model that learns from labelled examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guidance.batch import BatchGuidance
from guidance.errors import InputError
from pipelines.training.batches import Examples, ids_and_mask, pad, pad_features
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import Guides, Learner
from pipelines.training.model_checks import check_lengths
from pipelines.training.models import build_model, has_segments
from pipelines.training.task import Batch, Prediction, Task


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
        lengths: np.ndarray = self.rows.bounds[self.ends] - self.rows.bounds[self.starts]
        return lengths

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


class ExampleLearner(Learner):
    """Trains a guided model on the examples of a task; see `pipelines.training.learners.guided.Learner`."""

    def __init__(self, setup: Setup, task: Task) -> None:
        model = build_model(setup, type(task), setup.plan.for_part("model"), **task.fields())
        splits = {
            "train": Grouped(setup.train, together=task.together, kept=task.kept(setup.train, setup.config)),
            "valid": Grouped(setup.valid, together=task.together),
        }
        check_lengths(model.config, {"train": setup.train, "valid": setup.valid}, setup.sequences.reference)
        super().__init__(model, Guides(model, setup, setup.plan, judged=("outputs",)), setup, splits)
        if self.guided.handle.is_decoder and not model.config.is_encoder_decoder:
            _prepare_causal(model, task, setup)
        self.num_valid = task.judged_together(setup.valid, self.num_valid)
        self.task, self.config, self.validated = task, setup.config, (task.name,)
        self.sizes = [len(self.splits["train"])]
        self.inputs = ModelInputs(model, setup.tokenizer.pad_token_id)
        self.scorers = {task.name: self._score} if self.num_valid else {}
        self._predicted: list[Prediction] = []

    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> Batch:
        return self.splits[split].batch(examples)

    def counts(self, batch: Batch) -> dict[str, float]:
        guides = self.guided.counts(float(len(batch.ids)), {"outputs": self.task.judged(batch)})
        counts = {self.task.name: self.task.divisor(batch), **guides, "tokens": batch.tokens}
        return counts | ({"loss/mean": self.task.count(batch)} if self.task.sums_losses else {})

    def losses(self, model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        inputs = self.inputs.of(batch)
        guidance = self.guided.handle.guide(**self.inputs.seen(inputs, batch), step=step)
        outputs = self.outputs(model, inputs, batch, self.guided.forward(guidance))
        loss = self.task.loss(outputs, targets_of(self.task, outputs, batch), batch)
        losses = {self.task.name: loss, **self.guided.losses(guidance)}
        losses |= {"loss/mean": loss.detach()} if self.task.sums_losses else {}
        losses |= self.more_losses(model, batch, inputs, outputs)
        if not self.guided.attacks:
            return losses
        attack = guidance.attack(self.seeds(self.seed, self.origins(batch)))
        attacked = self.outputs(model, inputs, batch, {"guidance": attack})
        return losses | self.guided.attack_losses(attack, (outputs,), (attacked,), self.task.form)

    def more_losses(
        self, model: nn.Module, batch: Batch, inputs: Mapping[str, Tensor], outputs: Tensor
    ) -> dict[str, Tensor]:
        """Losses of a way to train besides those of the task and of guides; here none."""
        return {}

    @staticmethod
    def origins(batch: Batch) -> list[tuple[int, int]]:
        """The epoch of each row of a batch, and the number of its example."""
        return [origin for origin, size in zip(batch.origins, batch.sizes, strict=True) for _ in range(size)]

    def outputs(
        self, model: nn.Module, inputs: Mapping[str, Tensor], batch: Batch, extra: Mapping[str, BatchGuidance]
    ) -> Tensor:
        """The outputs that are trained, from a forward pass; ``extra``: further arguments of the model."""
        return self.task.outputs(model(**inputs, **extra).logits, batch)

    def weights(self, step: int) -> dict[str, float]:
        return {self.task.name: 1.0, **self.guided.weights(step)}

    def validate(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
        inputs = self.inputs.of(batch)
        extra = self.guided.handle.at_inference(**self.inputs.seen(inputs, batch))
        outputs = self.outputs(model, inputs, batch, extra)
        self._predicted += self.task.predictions(outputs, batch)
        loss = self.task.loss(outputs, targets_of(self.task, outputs, batch), batch)
        return {self.task.name: loss}, {self.task.name: self.task.count(batch)}

    def evaluate(self, model: nn.Module, rank: int, world: int) -> dict[str, tuple[float, float]]:
        self._predicted = []
        return super().evaluate(model, rank, world)

    def _score(self, model: nn.Module) -> dict[str, float]:
        if len(self._predicted) < self.num_valid:  # other processes have validated the rest
            self.evaluate(model, 0, 1)
        return {name: value for name, value in self.task.metrics(self._predicted).items() if value is not None}


def _prepare_causal(model: Any, task: Task, setup: Setup) -> None:
    """Tell a causal language model the id of padding, since transformers classifies a text by the last token before its padding.
    Raises InputError if the task reads other tokens, which do not see the text after them."""
    if not task.reads_last:
        raise InputError(
            f"{setup.folder}: a causal language model, and {task.name} reads words whose context is still to come",
            hint="classification, regression and choice read the last token; for others start from an encoder",
        )
    model.config.pad_token_id = setup.tokenizer.pad_token_id


def targets_of(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """The target of each output, (N,), on its device."""
    kind = torch.float32 if task.form == "regression" else torch.int64
    return torch.tensor(task.targets(batch), dtype=kind).to(outputs.device)


class ModelInputs:
    """Makes the inputs of a model from batches of examples."""

    def __init__(self, model: Any, pad_id: int) -> None:
        self._model, self._pad_id = model, pad_id
        self._segments = has_segments(model.config)

    def of(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs of the model by name, each (rows, T), on its device."""
        device = next(self._model.parameters()).device
        inputs = ids_and_mask(batch.ids, self._pad_id, device)
        if self._segments:
            inputs["token_type_ids"] = pad(batch.columns["text"], 0, batch.length, device)
        return inputs

    def seen(self, inputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """What guides read of a batch: its ids, attention mask and token features."""
        features = pad_features(batch.columns, batch.length, inputs["input_ids"].device)
        return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], **features}


def batches_of(data: Grouped, size: int, limit: int = 0) -> Iterator[Batch]:
    """The examples of a split in batches, in their order.

    Args:
        limit: how many examples; 0 for all.
    """
    number = min(len(data), limit or len(data))
    for start in range(0, number, size):
        yield data.batch([(0, i) for i in range(start, min(start + size, number))])


def without_gradients(model: Any, handle: Any, inputs: ModelInputs, batch: Batch) -> Tensor:
    """The logits of a trained model, with its plan at work."""
    with torch.no_grad():
        own = inputs.of(batch)
        logits: Tensor = model(**own, **handle.at_inference(**inputs.seen(own, batch))).logits
        return logits
