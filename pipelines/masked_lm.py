"""The objective of ``pretrain --objective mlm``: masked language modelling with the guides of a plan beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from guidance.errors import GuidanceHadNoEffect
from guidance.forward import Guidance
from guidance.installation import install
from guidance.mechanisms.adversary import divergence
from guidance.objectives.masked_lm import IGNORED, Masker, masked_lm_loss, num_chosen
from guidance.plan import Plan
from guidance.statistics.roles import NOTHING
from pipelines.batches import Examples, pad

VALID_EPOCH = 2**62
"""The epoch under which validation sequences are masked: always the same tokens, never those of an epoch."""

VALID_BATCH = 32


@dataclass(frozen=True)
class MaskedBatch:
    """One micro-batch: what the model sees, what it is asked, and the features of its tokens; rows not yet padded."""

    seen: list[np.ndarray]
    labels: list[np.ndarray]
    columns: Mapping[str, list[np.ndarray]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return max(len(row) for row in self.seen)


class MaskedLM:
    """See `pipelines.training.Objective`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        train: Examples,
        valid: Examples,
        plan: Plan,
        *,
        seed: int,
        probability: float,
        valid_limit: int,
        tables: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.train_split, self.valid_split, self.seed = model, train, valid, seed
        self.pad_id = tokenizer.pad_token_id
        self.masker = Masker(tokenizer.mask_token_id, tuple(tokenizer.all_special_ids), len(tokenizer), probability)
        self.num_valid = min(len(valid), valid_limit) if valid_limit else len(valid)
        self.num_examples = len(train)
        self.total_steps = 1
        self.handle = install(model, plan, tokenizer, tables=tables)
        self._earlier: dict[str, float] = {}

    def prepare(self, examples: Sequence[tuple[int, int]]) -> MaskedBatch:
        return self._masked(self.train_split, examples)

    def _masked(self, split: Examples, examples: Sequence[tuple[int, int]]) -> MaskedBatch:
        pairs = [self.masker(split[i], seed=self.seed, epoch=epoch, example=i) for epoch, i in examples]
        columns = {name: [split.column(name, i) for _, i in examples] for name in split.columns}
        return MaskedBatch([seen for seen, _ in pairs], [labels for _, labels in pairs], columns)

    def counts(self, batch: MaskedBatch) -> dict[str, float]:
        examples, chosen = float(sum(len(row) > 0 for row in batch.seen)), float(num_chosen(batch.labels))
        attacks = {"adversary/tokens": chosen, "adversary/sentence": examples, "adversary/penalty": examples}
        return {
            "mlm": chosen,
            **dict.fromkeys(self._guides(), examples),
            **(attacks if self.handle.attacks else {}),
            "tokens": float(sum(len(row) for row in batch.seen)),
        }

    def losses(self, model: nn.Module, batch: MaskedBatch) -> dict[str, Tensor]:
        inputs, labels_BT, guidance = self._tensors(batch)
        attacked = bool(self.handle.attacks)
        extra: dict[str, Any] = {"guidance": guidance} if self.handle.work else {}
        clean = model(**inputs, **extra, output_hidden_states=attacked)
        losses = {"mlm": masked_lm_loss(clean.logits, labels_BT)}
        for label, loss_B in guidance.per_example().items():
            losses[f"guidance/{label}"] = (guidance.weights_B(label) * loss_B).sum()
        if attacked:
            attack = guidance.attack()
            other = model(**inputs, guidance=attack, output_hidden_states=True)
            losses |= attack_losses(clean, other, labels_BT) | {"adversary/penalty": attack.penalties_B().sum()}
        return losses

    def weights(self, step: int) -> dict[str, float]:
        alphas = self.handle.alphas(step, self.total_steps)
        weights = {"mlm": 1.0, **{f"guidance/{label}": alpha for label, alpha in alphas.items()}}
        if self.handle.attacks:
            alpha = self.handle.attack_alpha(step, self.total_steps)
            weights |= {"adversary/tokens": alpha, "adversary/sentence": alpha, "adversary/penalty": 1.0}
        return weights

    def evaluate(self, model: nn.Module, rank: int, world: int) -> dict[str, tuple[float, float]]:
        if not self.num_valid:
            return {}
        total, count = 0.0, 0.0
        mine = range(rank, self.num_valid, world)
        for start in range(0, len(mine), VALID_BATCH):
            batch = self._masked(self.valid_split, [(VALID_EPOCH, i) for i in mine[start : start + VALID_BATCH]])
            inputs, labels_BT, guidance = self._tensors(batch)
            extra: dict[str, Any] = {"guidance": guidance} if self.handle.plan.shapes_outputs else {}
            total += masked_lm_loss(model(**inputs, **extra).logits, labels_BT).item()
            count += num_chosen(batch.labels)
        return {"mlm": (total, count)}

    def tallies(self) -> dict[str, float]:
        """How many keys each guide's pattern has named in this process; earlier runs count for the first one."""
        now = self.handle.matches()
        return {
            label: float(now.get(label, 0) + self._earlier.get(label, 0))
            for label in self.handle.alphas(0, self.total_steps)
        }

    def restore(self, tallies: Mapping[str, float]) -> None:
        self._earlier = dict(tallies)

    def _guides(self) -> list[str]:
        return [f"guidance/{label}" for label in self.handle.alphas(0, self.total_steps)]

    def _tensors(self, batch: MaskedBatch) -> tuple[dict[str, Tensor], Tensor, Guidance]:
        """What the model reads, the labels, and the guidance."""
        device = next(self.model.parameters()).device
        ids_BT = pad(batch.seen, self.pad_id, batch.length, device)
        mask_BT = pad([np.ones(len(row), np.int64) for row in batch.seen], 0, batch.length, device)
        columns: dict[str, Any] = {
            name: pad(rows, NOTHING[name][0], batch.length, device) for name, rows in batch.columns.items() if rows
        }
        labels_BT = pad(batch.labels, IGNORED, batch.length, device)
        return (
            {"input_ids": ids_BT, "attention_mask": mask_BT},
            labels_BT,
            self.handle.guide(ids_BT, mask_BT, **columns),
        )


def attack_losses(clean: Any, attacked: Any, labels_BT: Tensor) -> dict[str, Tensor]:
    """How far an attack moves the model: summed over the tokens that are predicted, and over the first states of the
    examples, read as distributions over hidden units (Wu et al. 2023, equation 10)."""
    chosen_BT = labels_BT != IGNORED
    tokens = divergence(clean.logits[chosen_BT], attacked.logits[chosen_BT])
    first, other = (output.hidden_states[-1][:, 0] for output in (clean, attacked))
    sentence = divergence(first, other)
    return {
        "adversary/tokens": tokens * chosen_BT.sum() if chosen_BT.any() else attacked.logits.sum() * 0,
        "adversary/sentence": sentence * len(first),
    }


def check_matches(tallies: Mapping[str, float]) -> None:
    """Raises GuidanceHadNoEffect when the pattern of a guide matched nothing from the first step to the last."""
    for label, found in tallies.items():
        if not found:
            raise GuidanceHadNoEffect(
                f"the pattern of guide {label!r} matched no token in the whole run",
                hint="look at the text and the tokenizer, or leave the guide out of the plan",
            )
