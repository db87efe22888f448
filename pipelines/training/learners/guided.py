"""A guided model: what the learners of all objectives share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guidance.batch import BatchGuidance
from guidance.calls import guide_batch
from guidance.checkpoint import take_over
from guidance.errors import PlanError
from guidance.installation import install
from guidance.mechanisms.attacks import Form, divergence
from guidance.packing import Documents
from guidance.plan import Plan
from pipelines.training.learner import ModelFolder, Pass, Setup

VALID_EPOCH = 2**62
"""The epoch number for masking validation sequences: the same tokens every time, and not those of a training epoch."""

VALID_BATCH = 32


@dataclass(frozen=True)
class Inputs:
    """A micro-batch as tensors on a device.

    Attributes:
        model: the inputs of the model, by name.
        places_N: positions of the tokens to predict, in the flattened batch (of targets); ``labels_N``: their ids.
        columns: features of the input tokens of the model, or of its encoder, each (B, T).
        documents: where the examples are in the row that the model reads in place of the padded batch; None if it reads that.
    """

    model: Mapping[str, Tensor]
    places_N: Tensor
    labels_N: Tensor
    columns: Mapping[str, Tensor]
    documents: Documents | None = field(default=None, kw_only=True)

    @property
    def seen(self) -> dict[str, Tensor]:
        """What guides read: ids, attention mask and features."""
        return {name: self.model[name] for name in ("input_ids", "attention_mask")} | dict(self.columns)


class Guides:
    """The guides of one model: their losses, the factors of these losses, and how many keys their patterns matched.

    Attributes:
        handle: see `guidance.installation.Handle`.
        labels: the guides that have a loss.
        on_scores: the guides among them whose loss is computed where a generator mis-predicts.
        patterned: the guides that have a pattern, with a loss or without.
        total_steps: the number of steps that schedules span.
    """

    def __init__(
        self,
        model: Any,
        setup: Setup,
        plan: Plan,
        *,
        prefix: str = "",
        decoder_tokenizer: Any = None,
        judged: Sequence[str] = ("tokens", "sentence"),
    ) -> None:
        """
        Args:
            plan: what acts in this model; what it had learned in the model to start from is taken over.
            prefix: the folder of this model beside the main one.
            judged: the outputs that an attack is judged by.
        """
        handle = setup.handles.get(prefix)
        if handle is None:
            try:
                handle = install(model, plan, setup.tokenizer, decoder_tokenizer=decoder_tokenizer, tables=setup.tables)
            except PlanError as error:
                raise PlanError(f"{setup.config.plan_name}: {error.message}", hint=error.hint) from error
            if setup.folder is not None:
                take_over(handle, setup.folder / prefix)
        self.handle, plan = handle, handle.plan
        self.labels = tuple(self.handle.alphas(0, 1))
        guides = dict(zip(plan.labels, plan.guides, strict=True))
        self.on_scores = tuple(label for label in self.labels if guides[label].makes("row_losses"))
        acting = [plan.labels[number] for number in self.handle.num_guided]
        self.patterned = tuple(label for label in acting if guides[label].bound_pattern)
        self.total_steps, self._judged = 1, tuple(judged)
        self._prefix = prefix
        self._masked = [f"masked/{site.layer}" for _, site in self.handle.attacks]
        self._earlier: dict[str, float] = {}

    @property
    def attacks(self) -> bool:
        """Whether there is a second forward pass, in which adversaries or random masks attack."""
        return bool(self.handle.attacks)

    @property
    def sentence(self) -> str:
        """Which output stands for a whole example when attacks are judged; see `guidance.mechanisms.adversary.Adversary`."""
        return self.handle.sentence

    def forward(self, guidance: BatchGuidance) -> dict[str, BatchGuidance]:
        """The further argument of the model; empty if no guide acts, so that the model is the unguided one."""
        return {"guidance": guidance} if self.handle.site_plans else {}

    def read(self, inputs: Inputs, extra: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """The arguments with which the model reads a micro-batch, and where the tokens to predict are in what it reads.

        Args:
            extra: further arguments of the model; if the micro-batch is packed, its guidance is the one that travels along.
        """
        documents = inputs.documents
        if documents is None:
            return {**inputs.model, **extra}, inputs.places_N
        guidance = extra.get("guidance") or guide_batch(self.handle, inputs.seen, measuring=False)
        return {**extra, **guidance.packed(documents), "guidance": guidance}, documents.at(inputs.places_N)

    def name(self, label: str) -> str:
        """The name of the loss of a guide in the metrics."""
        return f"guidance/{self._prefix}{label}"

    def counts(
        self, examples: float, judged: Mapping[str, float], guidance: BatchGuidance | None = None
    ) -> dict[str, float]:
        """The denominators of the losses of a batch.

        Args:
            examples: how many sequences the batch has.
            judged: for each output that an attack is judged by, how many of them the batch has.
            guidance: of the batch, for losses on mis-predictions; the model need not have read it yet.
        """
        counts = {self.name(label): examples for label in self.labels}
        if guidance is not None and self.on_scores:
            denominators = guidance.denominators()
            for label in self.on_scores:
                counts[self.name(label)] = float(denominators[label])
                counts[self._share(label)] = float(guidance.mispredictions(label)[1])
        if self.attacks:
            counts |= {f"adversary/{name}": number for name, number in judged.items()}
            counts["adversary/penalty"] = examples
            counts |= dict.fromkeys(self._masked, examples)
        return counts

    def losses(self, guidance: BatchGuidance) -> dict[str, Tensor]:
        """The undivided loss of every guide, after the forward pass; also the number of mis-predictions that have weights,
        which is only reported."""
        losses = {
            self.name(label): (guidance.weights_B(label) * loss_B).sum()
            for label, loss_B in guidance.per_example().items()
        }
        return losses | {self._share(label): guidance.mispredictions(label)[0].double() for label in self.on_scores}

    def _share(self, label: str) -> str:
        return f"share/in_vocabulary/{self._prefix}{label}"

    def attack_losses(
        self,
        attack: BatchGuidance,
        clean: Sequence[Tensor],
        attacked: Sequence[Tensor],
        form: Form = "classification",
    ) -> dict[str, Tensor]:
        """The divergences that an attack causes and the penalty of the adversary, undivided; also the share of units that
        was masked in each layer, which is only reported.

        Args:
            clean, attacked: for each output that the attack is judged by, its logits in that pass, (N, classes).
            form: how to read them; see `guidance.mechanisms.attacks.divergence`.
        """
        moved = {
            f"adversary/{name}": divergence(before, after, form) * len(before) if len(before) else after.sum() * 0
            for name, before, after in zip(self._judged, clean, attacked, strict=True)
        }
        return {
            **moved,
            "adversary/penalty": attack.penalties_B().sum(),
            **{f"masked/{site.layer}": share_B.sum() for site, share_B in attack.masked_shares_B().items()},
        }

    def weights(self, step: int) -> dict[str, float]:
        """The factor of every loss of a guide or an attack after ``step`` finished updates."""
        weights = {self.name(label): alpha for label, alpha in self.handle.alphas(step, self.total_steps).items()}
        if self.attacks:
            alpha = self.handle.attack_alpha(step, self.total_steps)
            weights |= {**{f"adversary/{name}": alpha for name in self._judged}, "adversary/penalty": 1.0}
        return weights

    def at(self, step: int) -> None:
        """Tell guides that fade how many updates are finished."""
        self.handle.advance(step, self.total_steps)

    def tallies(self) -> dict[str, float]:
        """How many keys each guide's pattern has matched in this process; the first process adds those of earlier runs."""
        now = self.handle.matches()
        return {
            self._prefix + label: float(now.get(label, 0) + self._earlier.get(self._prefix + label, 0))
            for label in self.patterned
        }

    def restore(self, tallies: Mapping[str, float]) -> None:
        """Continue counting from the tallies of a checkpoint."""
        self._earlier = dict(tallies)


class Learner(Pass, ABC):
    """What the training loop trains: a guided model with its examples and losses, which is a pass itself.

    Attributes:
        model: the module that is trained; the passes call its forward.
        splits: the examples of ``train`` and ``valid``; ``lengths``: tokens of each training example.
        sizes: training examples of each sequences artifact; None if they are the rows of its table.
        num_valid: how many validation examples are used.
        validated: the names of the losses of `evaluate`; the first decides which step is best.
        passes: run one after the other, each over all micro-batches of a step; gradients flow through all of them.
        scorers: by task name, functions that score the model at every validation, in evaluation mode and without gradients.
            The metrics, by name and the same in every process, become the columns ``eval/<task>/<metric>``.
        floor: the first validation loss that word frequencies alone give, in nats; None where they give none.
    """

    validated: tuple[str, ...]
    sizes: Sequence[int] | None = None
    scorers: Mapping[str, Callable[[nn.Module], Mapping[str, float]]] = MappingProxyType({})

    def __init__(self, model: Any, guided: Guides, setup: Setup, splits: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            splits: the examples, ``train`` and ``valid``; by default the sequences as they are.
        """
        self.model, self.guided, self.seed = model, guided, setup.config.seed
        self.splits = splits or {"train": setup.train, "valid": setup.valid}
        self.lengths: np.ndarray = self.splits["train"].lengths
        number = len(self.splits["valid"])
        self.num_valid = min(number, setup.config.valid_sequences or number)
        self.passes: Sequence[Pass] = (self,)
        self.all_guides: tuple[Guides, ...] = (guided,)

    @property
    def floor(self) -> float | None:
        return None

    def begin(self, total_steps: int) -> None:
        """Called once, with the number of steps of the run."""
        for guides in self.all_guides:
            guides.total_steps = total_steps

    def at(self, step: int) -> None:
        """Called when ``step`` updates are finished: before the first one, after each, and when a run goes on."""
        for guides in self.all_guides:
            guides.at(step)

    @abstractmethod
    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> Any:
        """Make a micro-batch from (epoch, example) pairs, with all its random choices, on the CPU."""

    @abstractmethod
    def weights(self, step: int) -> dict[str, float]:
        """The factor of each loss in the total after ``step`` finished updates; the task's own loss comes first."""

    @abstractmethod
    def validate(self, model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Sums and counts of the losses of a validation batch."""

    def evaluate(self, model: nn.Module, rank: int, world: int) -> dict[str, tuple[float, float]]:
        """Sum and count of each validation loss over this process's share."""
        if not self.num_valid:
            return {}
        totals = dict.fromkeys(self.validated, (0.0, 0.0))
        mine = range(rank, self.num_valid, world)
        for start in range(0, len(mine), VALID_BATCH):
            batch = self.prepare([(VALID_EPOCH, i) for i in mine[start : start + VALID_BATCH]], "valid")
            sums, counts = self.validate(model, batch)
            totals = {name: (a + float(sums[name]), b + counts[name]) for name, (a, b) in totals.items()}
        return totals

    @staticmethod
    def seeds(seed: int, origins: Sequence[tuple[int, int]]) -> Tensor:
        """The random seed of each (epoch, example) for attacks, int64 (B,)."""
        # the second word of the counter separates these numbers from those that choose masked tokens and texts
        sources = (np.random.Philox(key=[seed, epoch], counter=[0, 2, 0, i]) for epoch, i in origins)
        return torch.tensor([int(source.random_raw()) >> 1 for source in sources], dtype=torch.int64)

    def tallies(self) -> dict[str, float]:
        """What this process has counted, by name; the same names in every process.  The loop adds them up."""
        return {name: number for guides in self.all_guides for name, number in guides.tallies().items()}

    def restore(self, tallies: Mapping[str, float]) -> None:
        """Continue counting from the tallies of a checkpoint."""
        for guides in self.all_guides:
            guides.restore(tallies)

    def folders(self) -> tuple[ModelFolder, ...]:
        """The models that a finished run writes; the first is the main model."""
        return (ModelFolder("", "", self.model, self.guided.handle.plan),)
