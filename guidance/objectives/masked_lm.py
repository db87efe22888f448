"""Masked language modelling with dynamic masking: every epoch chooses other tokens, by default 15 %.  Of these, 80 % become
the mask token, 10 % a random token, and 10 % stay.

Source: Devlin et al. 2019, section 3.1, task 1; Liu et al. 2019, section 4.1 (dynamic masking).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""The label of tokens that are not predicted."""


@dataclass(frozen=True)
class Masker:
    """Chooses and replaces tokens.  The choice for an example depends only on (seed, epoch, example), so it is the same in
    every batch, process and resumed run.

    Attributes:
        mask_id: the id of the mask token.
        special_ids: ids that are never chosen and never used as replacements.
        vocab_size: replacements are drawn uniformly from the other ids below it.
        probability: with which each token is chosen, independently.
    """

    mask_id: int
    special_ids: tuple[int, ...]
    vocab_size: int
    probability: float = 0.15

    @cached_property
    def ordinary(self) -> np.ndarray:
        """All ids but the special ones, ascending."""
        return np.setdiff1d(np.arange(self.vocab_size), self.special_ids)

    def __call__(self, ids: np.ndarray, *, seed: int, epoch: int, example: int) -> tuple[np.ndarray, np.ndarray]:
        """The input ids after masking and the labels of one example, (T,) each; labels are `IGNORED` where not chosen."""
        bits = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, example])
        random = np.random.Generator(bits)
        chosen = (random.random(len(ids)) < self.probability) & ~np.isin(ids, self.special_ids)
        kind = random.random(len(ids))
        replacement = self.ordinary[random.integers(len(self.ordinary), size=len(ids))]
        seen = np.where(kind < 0.8, self.mask_id, np.where(kind < 0.9, replacement, ids))
        return np.where(chosen, seen, ids), np.where(chosen, ids, IGNORED)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The negative log-likelihood of labels in nats, summed: a scalar, 0 with a graph if there are none.

    For a loss, divide it by the number of labels of the whole batch, over all processes.  It is never in half precision.

    Args:
        logits: (..., V), of all tokens, or only of chosen ones (`guidance.objectives.selection.logits_at`).
        labels: (...), `IGNORED` where there is none.
    """
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def num_chosen(labels: Sequence[np.ndarray]) -> int:
    """How many tokens have a label."""
    return int(sum((row != IGNORED).sum() for row in labels))
