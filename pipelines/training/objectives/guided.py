"""A model with the guides of a plan in it, as every objective uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from guidance.batch import BatchGuidance
from guidance.checkpoint import EXTRA_FILE, take_over
from guidance.errors import PlanError
from guidance.installation import install
from guidance.mechanisms.attacks import AttackMechanism, divergence
from guidance.plan import Guide, Plan
from pipelines.engine.progress import log
from pipelines.training.objectives import Given, ModelFolder

VALID_EPOCH = 2**62
"""The epoch under which validation sequences are masked: always the same tokens, never those of an epoch."""

VALID_BATCH = 32


@dataclass(frozen=True)
class Inputs:
    """A micro-batch as tensors on a device.

    Attributes:
        model: what the model reads.
        places_N: where tokens are predicted, in the flattened batch (of targets), and ``labels_N``, what they are.
        columns: features of the tokens that the model, or its encoder, reads, each (B, T).
    """

    model: Mapping[str, Tensor]
    places_N: Tensor
    labels_N: Tensor
    columns: Mapping[str, Tensor]


class Guided:
    """The guides of one model: their losses, the factors of these, and what their patterns have matched.

    Attributes:
        handle: see `guidance.installation.Handle`.
        labels: the guides that have a loss.
        on_scores: those of them whose loss is about mis-predictions.
        total_steps: over how many steps schedules run.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        tokenizer: Any,
        tables: Mapping[str, Any] | None = None,
        *,
        prefix: str = "",
        decoder_tokenizer: Any = None,
        folder: Path | None = None,
    ) -> None:
        """
        Args:
            folder: where the model comes from: what its plan had learned there goes on.
        """
        self.handle = install(model, plan, tokenizer, decoder_tokenizer=decoder_tokenizer, tables=tables)
        if folder is not None and not take_over(self.handle, folder):
            log.warning(
                "%s: what the plan of this model had learned is left behind: the plan adds other modules now",
                folder / EXTRA_FILE,
            )
        self.labels = tuple(self.handle.alphas(0, 1))
        guides = dict(zip(plan.labels, plan.guides, strict=True))
        self.on_scores = tuple(label for label in self.labels if guides[label].makes("row_losses"))
        self.total_steps = 1
        self._prefix = prefix
        self._masked = [f"masked/{site.layer}" for _, site in self.handle.attacks]
        self._earlier: dict[str, float] = {}

    @property
    def attacks(self) -> bool:
        """True when a second forward pass is made, in which adversaries or random masks attack."""
        return bool(self.handle.attacks)

    @property
    def sentence(self) -> str:
        """What attacks are judged by in whole examples; see `guidance.mechanisms.adversary.Adversary`."""
        mechanism = self.handle.plan.guides[self.handle.attacks[0][0]].bound_mechanism
        assert isinstance(mechanism, AttackMechanism)
        return mechanism.sentence

    def forward(self, guidance: BatchGuidance) -> dict[str, BatchGuidance]:
        """The further argument of the model: none where no guide is at work, which leaves the model untouched."""
        return {"guidance": guidance} if self.handle.site_plans else {}

    def name(self, label: str) -> str:
        """How the metrics call the loss of a guide."""
        return f"guidance/{self._prefix}{label}"

    def counts(self, examples: float, predicted: float, guidance: BatchGuidance | None = None) -> dict[str, float]:
        """The denominators of the losses, of so many examples with so many tokens to predict.

        Args:
            guidance: of the batch, where a loss is about mis-predictions; it need not have been through the model.
        """
        found = {self.name(label): examples for label in self.labels}
        if guidance is not None and self.on_scores:
            denominators = guidance.denominators()
            for label in self.on_scores:
                found[self.name(label)] = float(denominators[label])
                found[self._share(label)] = float(guidance.mispredictions(label)[1])
        if self.attacks:
            found |= {"adversary/tokens": predicted, "adversary/sentence": examples, "adversary/penalty": examples}
            found |= dict.fromkeys(self._masked, examples)
        return found

    def losses(self, guidance: BatchGuidance) -> dict[str, Tensor]:
        """The undivided loss of every guide, after the forward pass; beside them what is only reported, the
        mis-predictions that have weights."""
        losses = {
            self.name(label): (guidance.weights_B(label) * loss_B).sum()
            for label, loss_B in guidance.per_example().items()
        }
        return losses | {self._share(label): guidance.mispredictions(label)[0].double() for label in self.on_scores}

    def _share(self, label: str) -> str:
        return f"share/in_vocabulary/{self._prefix}{label}"

    def attack_losses(
        self, attack: BatchGuidance, clean: Sequence[Tensor], attacked: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """How far an attack moves the model, and what the adversary pays, all undivided; beside them what is only
        reported, the share of units that was masked in each layer.

        Args:
            clean, attacked: logits of the tokens that are predicted, (N, classes), and what stands for each example,
                (B, D), read as distributions (Wu et al. 2023, equation 10), of both passes; see `sentence`.
        """
        tokens, first = zip(clean, attacked, strict=True)
        moved = divergence(*tokens) * len(tokens[0]) if len(tokens[0]) else tokens[1].sum() * 0
        return {
            "adversary/tokens": moved,
            "adversary/sentence": divergence(*first) * len(first[0]),
            "adversary/penalty": attack.penalties_B().sum(),
            **{f"masked/{site.layer}": share_B.sum() for site, share_B in attack.masked_shares_B().items()},
        }

    def weights(self, step: int) -> dict[str, float]:
        """The factor of every loss of a guide or an attack after ``step`` finished updates."""
        weights = {self.name(label): alpha for label, alpha in self.handle.alphas(step, self.total_steps).items()}
        if self.attacks:
            alpha = self.handle.attack_alpha(step, self.total_steps)
            weights |= {"adversary/tokens": alpha, "adversary/sentence": alpha, "adversary/penalty": 1.0}
        return weights

    def tallies(self) -> dict[str, float]:
        """How many keys each guide's pattern has named in this process; earlier runs count for the first one."""
        now = self.handle.matches()
        return {
            self._prefix + label: float(now.get(label, 0) + self._earlier.get(self._prefix + label, 0))
            for label in self.labels
        }

    def restore(self, tallies: Mapping[str, float]) -> None:
        """Go on counting from here."""
        self._earlier = dict(tallies)


class GuidedObjective(ABC):
    """What objectives share that train one guided model; see `pipelines.training.loop.Objective`.

    Attributes:
        num_valid: how many validation examples are looked at.
    """

    def __init__(self, model: Any, guided: Guided, given: Given) -> None:
        self.model, self.guided = model, guided
        limit = given.config.valid_sequences
        self.num_valid = min(len(given.valid), limit) if limit else len(given.valid)
        self.passes: tuple[Any, ...] = (self,)

    def begin(self, total_steps: int) -> None:
        self.guided.total_steps = total_steps

    @abstractmethod
    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> Any:
        """See `pipelines.training.loop.Objective`; also of the validation split."""

    @property
    @abstractmethod
    def validated(self) -> tuple[str, ...]:
        """The losses of `evaluate`, the first of which decides which step is best."""

    @abstractmethod
    def validate(self, model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Sums and counts of the losses of a validation batch."""

    def evaluate(self, model: nn.Module, rank: int, world: int) -> dict[str, tuple[float, float]]:
        if not self.num_valid:
            return {}
        found = dict.fromkeys(self.validated, (0.0, 0.0))
        mine = range(rank, self.num_valid, world)
        for start in range(0, len(mine), VALID_BATCH):
            batch = self.prepare([(VALID_EPOCH, i) for i in mine[start : start + VALID_BATCH]], "valid")
            sums, counts = self.validate(model, batch)
            found = {name: (a + float(sums[name]), b + counts[name]) for name, (a, b) in found.items()}
        return found

    def tallies(self) -> dict[str, float]:
        return self.guided.tallies()

    def restore(self, tallies: Mapping[str, float]) -> None:
        self.guided.restore(tallies)

    def folders(self) -> tuple[ModelFolder, ...]:
        return (ModelFolder("", "", self.model, self.guided.handle.plan),)


def refuse_guides(plan: Plan, source: str, refusal: Callable[[Guide], str]) -> None:
    """Raises PlanError for the first guide that cannot work in an objective.

    Args:
        refusal: why a guide cannot; empty where it can.
    """
    for number, guide in enumerate(plan.guides, 1):
        if reason := refusal(guide):
            raise PlanError(f"{source}, guide {number} ({guide.label}): {reason}")
