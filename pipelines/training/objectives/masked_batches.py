"""Micro-batches of masked examples: what the model sees, what it is asked, and what a generator has filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from guidance.objectives.masked_lm import num_chosen


@dataclass(frozen=True)
class MaskedBatch:
    """One micro-batch; rows not yet padded.

    Attributes:
        seen: what the model sees, and ``labels``, what it is asked.
        columns: features of the tokens.
        origins: epoch and number of each example.
    """

    seen: list[np.ndarray]
    labels: list[np.ndarray]
    columns: Mapping[str, list[np.ndarray]] = field(default_factory=dict)
    origins: Sequence[tuple[int, int]] = ()

    @property
    def length(self) -> int:
        """The longest row, in tokens."""
        return max(map(len, self.seen))

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


@dataclass(frozen=True)
class FilledBatch(MaskedBatch):
    """One micro-batch whose masked tokens a generator fills in.

    Attributes:
        uniform_N: a number in [0, 1) for each masked token, with which it is drawn.
        drawn: what has been drawn, (N,), once a generator has been there.
    """

    uniform_N: Tensor = field(default_factory=lambda: torch.zeros(0))
    drawn: list[Tensor] = field(default_factory=list)

    def fill(self, drawn_N: Tensor) -> None:
        """Keep what a generator has drawn."""
        self.drawn[:] = [drawn_N]

    @property
    def drawn_N(self) -> Tensor:
        """What a generator has drawn."""
        return self.drawn[0]
