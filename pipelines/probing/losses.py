"""The loss of a trained model on held-out data, batch by batch, and the importance of its heads for that loss.

The loss is that of the model's task, or of a language model that of the words that it predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from guidance.checkpoint import find_plan
from guidance.errors import InputError
from guidance.objectives.causal_lm import words_of
from guidance.objectives.masked_lm import cross_entropy
from guidance.objectives.selection import logits_at
from guidance.plan import Plan
from guidance.probes.importance import Importance, check_finite, switched_off
from guidance.sites import Site
from pipelines.probing.probe import SequencesConfig
from pipelines.progress import Progress
from pipelines.training.batches import Examples
from pipelines.training.evaluations import measured_by
from pipelines.training.learner import folder_of
from pipelines.training.learners.causal_lm import CausalBatch
from pipelines.training.learners.examples import Grouped, ModelInputs, batches_of, targets_of
from pipelines.training.learners.guided import VALID_EPOCH, Inputs
from pipelines.training.learners.masked_batches import MaskedBatch
from pipelines.training.model_checks import check_lengths, check_model
from pipelines.training.models import mask_probability_of, masker_of, read_tokenizer
from pipelines.training.opening import open_watched, two_stacks
from pipelines.training.plan_inputs import check_needs, features, read_tables
from pipelines.training.task import Task


@dataclass(frozen=True)
class Loss:
    """The loss of one batch.

    Attributes:
        total: the sum over what is judged, with a gradient if gradients are on.
        count: how much is judged: examples with a label, sentences, masked tokens.
        examples: of the batch, whether they are judged or not.
    """

    total: Tensor
    count: float
    examples: int


@dataclass(frozen=True)
class TaskBatch:
    """A batch of labelled examples.

    Attributes:
        numbers: counted over the batches.
        inputs: of the model, by name; ``seen``: what its plan reads.
    """

    examples: Any
    numbers: range
    inputs: Mapping[str, Tensor]
    seen: Mapping[str, Tensor]

    @property
    def valid_BT(self) -> Tensor:
        """Which tokens are no padding, bool."""
        return self.inputs["attention_mask"].bool()


class HeldOut:
    """A trained model with the batches of a split; each call of `losses` reads them again.

    Attributes:
        task: the name of the model's task; ``masked-lm`` or ``causal-lm`` if it is a language model.
        number: the examples that are read.
    """

    def __init__(self, inputs: Mapping[str, Any], config: SequencesConfig, seed: int = 0) -> None:
        """Opens a model and sequences, with masks and scores if they are needed.  Raises InputError if the model has neither a head
        for a task nor predicts words, or does not fit the sequences, and PlanError if its plan needs a feature that is not
        there.

        Args:
            seed: of the words that are masked.
        """
        self.config, self._seed = config, seed
        self._data, folder = inputs["sequences"], folder_of(inputs["model"])
        row = measured_by(folder, self._data)
        task = row if issubclass(row, Task) else None
        if row.measured_as == "translation":
            raise two_stacks(folder)
        if task is None and row.measured_as not in ("masked-lm", "masked-lm-nsp", "causal-lm"):
            raise InputError(
                f"{folder}: has no head for a task, and predicts no words",
                hint="guide finetune DATASET --init MODEL",
            )
        is_causal = row.measured_as == "causal-lm"
        is_masked = task is None and not is_causal
        self.task = task.name if task else "causal-lm" if is_causal else "masked-lm"
        plan = find_plan(folder) or Plan()
        check_needs(plan, str(folder), inputs, training=False)
        self.model, self.handle = open_watched(folder, read_tables(inputs), config.device, row.opened_as())
        self.tokenizer = read_tokenizer(self._data, masked=is_masked, padded=is_masked)
        check_model(self.model, folder, self.tokenizer)
        self.model.requires_grad_(True).eval()
        self._features = features(plan, training=False)
        known: Any = {"features": self._features, "masks": inputs.get("masks"), "own": task.columns if task else ()}
        self._rows = Examples.read(self._data, config.split, len(self.tokenizer), **known)
        check_lengths(self.model.config, {config.split: self._rows}, self._data.reference)
        self._head = task.of_model(self.model.config) if task else None
        self._examples = Grouped(self._rows, together=self._head.together) if self._head else None
        number = len(self._examples) if self._examples is not None else len(self._rows)
        self.number = min(number, config.limit or number)
        self._masker = masker_of(self.tokenizer, mask_probability_of(inputs["model"])) if is_masked else None
        self._words: Any = words_of(self.tokenizer) if is_causal else None

    def losses(self) -> Iterator[Loss]:
        """The loss of each batch, with the plan of the model at work."""
        return self._of_task() if self._head else self._of_words()

    def mean(self, advance: Callable[[int], object] = lambda _: None) -> float:
        """The mean loss over the split, without gradients; `advance` is called with the number of examples of each batch.  Raises
        InputError if nothing is judged."""
        total = count = 0.0
        with torch.no_grad():
            for loss in self.losses():
                total, count = total + float(loss.total), count + loss.count
                advance(loss.examples)
        self.check_judged(count)
        return total / count

    def check_judged(self, count: float) -> None:
        """Raises InputError when no example or token was judged."""
        if not count:
            split = self.config.split
            raise InputError(f"no example of {split!r} has a label that the model knows, or a word that is predicted")

    def task_batches(self) -> Iterator[TaskBatch]:
        """The labelled batches of a fine-tuned model.  Raises InputError if the model has no task."""
        if self._examples is None:
            raise InputError("the model has no head for a task", hint="guide finetune DATASET --init MODEL")
        inputs, start = ModelInputs(self.model, self.tokenizer.pad_token_id), 0
        for batch in batches_of(self._examples, self.config.batch_size, self.config.limit):
            given = inputs.of(batch)
            numbers = range(start, start + len(given["input_ids"]))
            yield TaskBatch(batch, numbers, given, inputs.seen(given, batch))
            start = numbers.stop

    def outputs(self, batch: TaskBatch) -> Tensor:
        """The outputs of the model for a batch, with its plan at work."""
        assert self._head is not None
        extra = self.handle.at_inference(**batch.seen)
        return self._head.outputs(self.model(**batch.inputs, **extra).logits, batch.examples)

    def loss_of(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        """The sum of the losses of outputs."""
        assert self._head is not None
        return self._head.loss(outputs, targets_of(self._head, outputs, batch.examples), batch.examples)

    @property
    def is_regression(self) -> bool:
        """Whether the outputs are values, not classes."""
        return self._head is not None and self._head.form == "regression"

    def _of_task(self) -> Iterator[Loss]:
        assert self._head is not None
        for batch in self.task_batches():
            count = float(self._head.count(batch.examples))
            size = len(batch.examples.sizes)
            total = self.loss_of(self.outputs(batch), batch) if count else torch.zeros(())
            yield Loss(total, count, size)

    def _of_words(self) -> Iterator[Loss]:
        cache = {} if self._masker else {"use_cache": False}
        for start in range(0, self.number, self.config.batch_size):
            chosen = range(start, min(start + self.config.batch_size, self.number))
            inputs = self._words_of(chosen)
            if not len(inputs.places_N):
                yield Loss(torch.zeros(()), 0.0, len(chosen))
                continue
            extra = self.handle.at_inference(**inputs.seen)
            logits_NV = logits_at(self.model, inputs.places_N, **inputs.model, **cache, **extra).logits
            yield Loss(cross_entropy(logits_NV, inputs.labels_N), float(len(inputs.places_N)), len(chosen))

    def _words_of(self, chosen: range) -> Inputs:
        """Some sequences as the model reads them, with the words that it predicts: the masked ones, or in a causal model all."""
        rows, pad_id = self._rows, self.tokenizer.pad_token_id
        columns = {name: [rows.column(name, n) for n in chosen] for name in self._features}
        if self._masker is None:
            ids, separator = [rows[n] for n in chosen], self.tokenizer.sep_token_id
            return CausalBatch.of(ids, separator, self._words, columns=columns).tensors_for(self.model, pad_id)
        masked = [self._masker(rows[n], seed=self._seed, epoch=VALID_EPOCH, example=n) for n in chosen]
        seen, labels = map(list, zip(*masked, strict=True))
        return MaskedBatch(seen, labels, columns).tensors(pad_id, next(self.model.parameters()).device)


def importance_of(
    held_out: HeldOut,
    progress: Progress,
    form: Literal["elementwise", "joint"] = "elementwise",
    accumulate: Literal["gradients", "scores"] = "gradients",
) -> dict[Site, Tensor]:
    """The Taylor importance of each head, by site, (H,).

    Args:
        form, accumulate: see `pipelines.stages.probe_importance.Config`.

    Raises:
        InputError: nothing is judged.
        NumericalError: the importance of a head is not finite.
    """
    model, judged = held_out.model, 0.0
    model.zero_grad()
    counted = Importance(model, held_out.handle.sites, form)
    scores: dict[Site, Tensor] = {}
    with progress.task("importance", total=held_out.number, unit="examples") as bar:
        for loss in held_out.losses():
            bar.advance(loss.examples)
            if not loss.count:
                continue
            judged += loss.count
            (loss.total / loss.count).backward()
            if accumulate == "scores":
                scores = {site: scores.get(site, 0) + own for site, own in counted.scores().items()}
                model.zero_grad()
    held_out.check_judged(judged)
    scores = scores if accumulate == "scores" else counted.scores()
    check_finite(scores)
    return scores


def rises_of(held_out: HeldOut, progress: Progress) -> tuple[dict[Site, Tensor], float]:
    """How much the mean loss rises without each head, by site, (H,), and the loss of the whole model."""
    sites = held_out.handle.sites
    passes = 1 + sum(own[0].num_heads for own in sites.values())
    rises: dict[Site, Tensor] = {}
    with progress.task("importance", total=passes * held_out.number, unit="examples") as bar:
        whole = held_out.mean(bar.advance)
        for module, own in sites.items():
            losses = []
            for head in range(own[0].num_heads):
                with switched_off(held_out.model, sites, [(module, head)]):
                    losses.append(held_out.mean(bar.advance))
            rises |= dict.fromkeys(own, torch.tensor(losses, dtype=torch.float64) - whole)
    check_finite(rises)
    return rises, whole
