"""What an attack hands to the attention path."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

OFF = 10_000.0
"""What is subtracted from the score of a key that an attack switches off."""


@dataclass(frozen=True)
class Attack:
    """What an attack does to one layer.  A unit is one (query, key).

    Attributes:
        scores: what is added to the scores: (B, 1 or heads, Q, K).
        kept_B: the number of units between valid tokens that it leaves on; a mean over heads that have masks of their own.
        units_B: the number of units between valid tokens.
    """

    scores: Tensor
    kept_B: Tensor
    units_B: Tensor

    @classmethod
    def of(cls, keep: Tensor, allowed_B1QK: Tensor, queries_BQ: Tensor) -> Attack:
        """The attack that leaves some units on, (B, 1 or heads, Q, K), 1 or 0.  A row without any is not attacked."""
        # the shift gives such a row the softmax, and the gradient, that it has with -10000 everywhere
        empty = ~((keep > 0) & allowed_B1QK).any(-1, keepdim=True)
        scores = (keep - 1) * OFF + OFF * empty
        units = allowed_B1QK & queries_BQ[:, None, :, None]
        return cls(scores, (keep * units).sum((2, 3)).mean(1), units.sum((1, 2, 3)))

    @property
    def keep(self) -> Tensor:
        """The units that it leaves on, bool (B, 1 or heads, Q, K); rows that are not attacked are True throughout."""
        return self.scores.detach() > -OFF / 2
