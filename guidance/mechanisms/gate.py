"""``gate``: one learned number for each head, by which its output is multiplied.

Wang et al. 2020 mention a "weighted gate layer" for role-guided heads; neither their equations nor their code have one.
Here the factor is ``2 sigmoid(w)``, and w starts at 0, so a gated model begins as the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from guidance.mechanisms.base import HeadInputs, Mechanism


@dataclass(frozen=True)
class Gate(Mechanism):
    """Gated heads; it has no options."""

    summary = "multiplies heads by a learned factor between 0 and 2"
    source = "Wang et al. 2020, section 3"
    takes_pattern = False
    reads_keys = False
    decays = False

    def module(self, num_heads: int, width: int) -> nn.Module:
        return GateWeights(num_heads)

    def edit_output(self, output_BQhD: Tensor, inputs: HeadInputs) -> Tensor:
        assert isinstance(inputs.parameters, GateWeights)
        return output_BQhD * inputs.parameters.factors().to(output_BQhD.dtype)[:, None]


class GateWeights(nn.Module):
    """The gates of the heads of one site."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads))

    def factors(self) -> Tensor:
        """(h,), between 0 and 2."""
        return 2 * torch.sigmoid(self.weight)
