"""Micro-batches of masked examples: inputs, labels, and what a generator has filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from guidance.objectives.masked_lm import IGNORED, num_chosen
from guidance.objectives.selection import places_of, put_at
from pipelines.training.batches import ids_and_mask, pad, pad_features
from pipelines.training.learners.guided import Inputs


@dataclass(frozen=True)
class MaskedBatch:
    """One micro-batch of rows that are not yet padded.

    Attributes:
        seen: the input ids after masking; ``labels``: the original ids where the model predicts.
        columns: features of the tokens.
        origins: the epoch and the number of each example.
    """

    seen: list[np.ndarray]
    labels: list[np.ndarray]
    columns: Mapping[str, list[np.ndarray]] = field(default_factory=dict)
    origins: Sequence[tuple[int, int]] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return list(map(len, self.seen))

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @cached_property
    def examples(self) -> float:
        """How many rows have tokens."""
        return float(sum(len(row) > 0 for row in self.seen))

    @cached_property
    def tokens(self) -> float:
        """How many tokens there are."""
        return float(sum(map(len, self.seen)))

    @cached_property
    def chosen(self) -> float:
        """How many tokens are to be predicted."""
        return float(num_chosen(self.labels))

    def tensors(self, pad_id: int, device: torch.device) -> Inputs:
        """The rows, padded, on a device; the features also have ``original``, the ids before masking."""
        labels_BT = pad(self.labels, IGNORED, self.length)
        chosen_N = places_of(labels_BT != IGNORED)
        places_N, labels_N = (part.to(device, non_blocking=True) for part in (chosen_N, labels_BT.flatten()[chosen_N]))
        inputs = ids_and_mask(self.seen, pad_id, device)
        original_BT = put_at(inputs["input_ids"], places_N, labels_N)
        return Inputs(
            inputs,
            places_N,
            labels_N,
            {**pad_features(self.columns, self.length, device), "original": original_BT},
        )


@dataclass(frozen=True)
class FilledBatch(MaskedBatch):
    """One micro-batch whose masked tokens a generator fills in.

    Attributes:
        uniform_N: the uniform number in [0, 1) with which each masked token is drawn.
        drawn: empty until `fill`; then one tensor, the tokens that were drawn, (N,).
    """

    uniform_N: Tensor = field(default_factory=lambda: torch.zeros(0))
    drawn: list[Tensor] = field(default_factory=list)

    def fill(self, drawn_N: Tensor) -> None:
        """Store the tokens that a generator drew, (N,)."""
        self.drawn[:] = [drawn_N]

    @property
    def drawn_N(self) -> Tensor:
        """The tokens that a generator drew, (N,)."""
        return self.drawn[0]
