"""A gate: one learned number for each head, by which its output is multiplied.

Wang et al. 2020 mention a "weighted gate layer" for role-guided heads; neither their equations nor their code have one.
Here the factor is ``2 sigmoid(w)``, and w starts at 0, so that a gated model begins as the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Gate:
    """Gated heads; it has no options."""

    def module(self, num_heads: int, width: int) -> nn.Module:
        """The parameters of one site."""
        return GateWeights(num_heads)


class GateWeights(nn.Module):
    """The gates of the heads of one site."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads))

    def factors(self) -> Tensor:
        """(h,), between 0 and 2."""
        return 2 * torch.sigmoid(self.weight)
