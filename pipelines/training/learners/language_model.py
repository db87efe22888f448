"""What the learners of masked and of causal language models share."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from guidance.batch import BatchGuidance
from guidance.calls import guide_batch
from guidance.errors import InputError, UnsupportedModel
from guidance.installation import install
from guidance.models.canary import evaluating
from guidance.objectives.masked_lm import cross_entropy
from guidance.objectives.selection import logits_at
from guidance.packing import Documents
from guidance.plan import Plan
from guidance.statistics.ngrams import unigram_nats
from pipelines.training.batches import ids_and_mask
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import Guides, Inputs, Learner
from pipelines.training.learners.masked_batches import MaskedBatch

_ROUNDING = 1e-3
"""The largest difference of outputs, relative to the largest output, that counts as rounding."""


def check_packing(setup: Setup, model: Any) -> None:
    """Raises InputError if ``--packing documents`` was asked for and cannot be followed: a sequence holds several documents, or
    the model gives packed documents other outputs than each alone.

    Reads two short documents, in evaluation mode.  Call it before a plan is installed.
    """
    if setup.config.packing == "none":
        return
    for data in setup.corpora or (setup.sequences,):
        if data.manifest["config"].get("packing", "full-sentences") == "full-sentences":
            raise InputError(
                f"--packing documents: a sequence of {data.reference} may hold several documents, which would see each other",
                hint="guide build-sequences … --packing document",
            )
    if setup.config.compile:
        raise InputError("--packing documents does not work with --compile: every batch has other lengths")
    name = type(model).__name__
    known = (token for token in range(model.config.vocab_size) if token != model.config.pad_token_id)
    ids = torch.tensor(list(itertools.islice(itertools.cycle(known), 10)), device=next(model.parameters()).device)
    texts = [ids[:4], ids[4:]]
    handle = install(model, Plan(()))
    try:
        with evaluating(model), torch.no_grad():
            alone = torch.cat([model(input_ids=text[None]).logits[0] for text in texts]).float()
            guidance = guide_batch(handle, ids_and_mask([text.cpu().numpy() for text in texts], 0, ids.device))
            together = model(**guidance.packed(), guidance=guidance).logits[0].float()
    except UnsupportedModel as error:
        raise InputError(f"--packing documents: {error.message}", hint="leave --packing out") from error
    finally:
        handle.remove()
    if bool((together - alone).abs().max() > _ROUNDING * alone.abs().max()):
        raise InputError(
            f"--packing documents: {name} reads documents in one row otherwise than alone", hint="leave --packing out"
        )


class LanguageModel(Learner):
    """A learner whose model predicts words of sequences."""

    TASKS: ClassVar[tuple[str, ...]]
    """The names of the losses of `task_losses`.  The first is that of the objective, and decides which step is best."""

    JUDGED: ClassVar[tuple[str, ...]] = ("tokens", "sentence")
    """The outputs by which an attack is judged: the predicted words, and the output that stands for a whole sequence."""

    def __init__(self, setup: Setup, model: Any, words: np.ndarray) -> None:
        """
        Args:
            words: the ids that are predicted, ascending.
        """
        super().__init__(model, Guides(model, setup, setup.plan, judged=self.JUDGED), setup)
        self.packs = getattr(setup.config, "packing", "none") == "documents"
        self.pad_id, self.validated, self.words = setup.tokenizer.pad_token_id, self.TASKS, words

    @cached_property
    def floor(self) -> float | None:
        """The loss that word frequencies alone give, on the tokens that are predicted in validation."""
        return unigram_nats(self.splits["train"].ids, self.validated_ids(), self.words)

    def validated_ids(self) -> np.ndarray:
        """The ids that are predicted in validation.  Special tokens may be among them; `floor` leaves them out."""
        valid = self.splits["valid"]
        ids: np.ndarray = valid.ids[: int(valid.lengths[: self.num_valid].sum())]
        return ids

    def counts(self, batch: MaskedBatch) -> dict[str, float]:
        guidance = self.guide(self.tensors(batch)) if self.guided.on_scores else None
        numbers = {"tokens": self.num_predicted(batch), "sentence": batch.examples}
        judged = {output: numbers[output] for output in self.JUDGED}
        guides = self.guided.counts(batch.examples, judged, guidance)
        return {**self.task_counts(batch), **guides, "tokens": batch.tokens}

    def losses(self, model: nn.Module, batch: MaskedBatch, step: int) -> dict[str, Tensor]:
        inputs = self.tensors(batch)
        guidance = self.guide(inputs, step)
        if not self.guided.attacks:
            output = self.call(model, inputs, **self.guided.forward(guidance))
            return {**self.task_losses(output, inputs), **self.guided.losses(guidance)}
        output, *clean = self.distributions(model, inputs, guidance=guidance)
        losses = {**self.task_losses(output, inputs), **self.guided.losses(guidance)}
        attack = guidance.attack(self.seeds(self.seed, batch.origins))
        _, *attacked = self.distributions(model, inputs, guidance=attack)
        return losses | self.guided.attack_losses(attack, clean, attacked)

    def distributions(
        self, model: nn.Module, inputs: Inputs, guidance: BatchGuidance
    ) -> tuple[Any, *tuple[Tensor, ...]]:
        """A forward pass, and the logits of each of the `JUDGED` outputs, first those of the predicted tokens, (N, classes)."""
        output = self.call(model, inputs, guidance=guidance)
        return output, output.logits

    def weights(self, step: int) -> dict[str, float]:
        return {self.TASKS[0]: 1.0, **self.guided.weights(step)}

    def validate(self, model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        inputs = self.tensors(batch)
        extra = self.guided.handle.at_inference(**inputs.seen)
        return self.task_losses(self.call(model, inputs, **extra), inputs), self.task_counts(batch)

    def call(self, model: nn.Module, inputs: Inputs, **extra: Any) -> Any:
        """A forward pass whose ``logits`` are those of the predicted tokens, (N, classes)."""
        read, places_N = self.guided.read(inputs, extra)
        return logits_at(model, places_N, **read)

    def num_predicted(self, batch: MaskedBatch) -> float:
        """How many tokens the model predicts."""
        return batch.chosen

    def task_counts(self, batch: MaskedBatch) -> dict[str, float]:
        """The denominators of `task_losses`."""
        return {self.TASKS[0]: batch.chosen}

    def task_losses(self, output: Any, inputs: Inputs) -> dict[str, Tensor]:
        """The undivided losses of a pass, without those of guides."""
        return {self.TASKS[0]: cross_entropy(output.logits, inputs.labels_N)}

    def tensors(self, batch: MaskedBatch) -> Inputs:
        """The batch on the device of the model."""
        device = next(self.model.parameters()).device
        inputs = batch.tensors(self.pad_id, device)
        return replace(inputs, documents=Documents.of(batch.lengths, device)) if self.packs else inputs

    def guide(self, inputs: Inputs, step: int = 0) -> BatchGuidance:
        """The guidance of a batch, made of its ids, attention mask and features."""
        return self.guided.handle.guide(**inputs.seen, step=step)
