"""``gate``: a learned factor between 0 and 2 for the output of each head.

Wang et al. 2020 mention a "weighted gate layer" for role-guided heads; neither their equations nor their code have one.
Here the factor is ``2 sigmoid(w)``, and w starts at 0, so a gated model begins as the plain one.

With ``input = "query"`` the factor is ``2 sigmoid(W x + b)`` of the hidden state x of each token, as the attention module
reads it.  Qiu et al. 2025, *Gated Attention for Large Language Models*, have ``sigmoid(W x)``; here W and b start at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from guidance.errors import PlanError
from guidance.mechanisms.base import HeadInputs, Mechanism


@dataclass(frozen=True)
class Gate(Mechanism):
    """Gated heads.

    Attributes:
        input: what the factor depends on: nothing (``none``), or the hidden state of the token that asks (``query``).
        elementwise: with ``query``: one factor for each channel of the output, instead of one for each head.
    """

    input: Literal["none", "query"] = "none"
    elementwise: bool = False

    summary = "multiplies heads by a learned factor between 0 and 2"
    source = "Wang et al. 2020, section 3; Qiu et al. 2025"
    takes_pattern = False
    reads_keys = False
    decays = False

    def __post_init__(self) -> None:
        if self.elementwise and self.input == "none":
            raise PlanError("elementwise = true belongs to gates that read the query", hint='input = "query"')

    @property
    def needs_layer_input(self) -> bool:  # type: ignore[override]
        return self.input == "query"

    @property
    def explanation(self) -> str:
        if self.input == "none":
            return ""
        unit = "channel" if self.elementwise else "head"
        return (
            f"a factor for each token and {unit}: 2 sigmoid(W x + b) of the token's hidden state x, W = b = 0 at first"
        )

    def site_module(self, num_heads: int, width: int, head_width: int) -> nn.Module:
        if self.input == "none":
            return GateWeights(num_heads)
        return QueryGateWeights(num_heads, head_width if self.elementwise else 1, width)

    def edit_output(self, output_BQhD: Tensor, inputs: HeadInputs) -> Tensor:
        assert inputs.parameters is not None
        return output_BQhD * inputs.parameters(inputs.layer_input_BTd).to(output_BQhD.dtype)


class GateWeights(nn.Module):
    """The gates of the heads of one site."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads))

    def forward(self, layer_input_BTd: Tensor | None) -> Tensor:
        """Factors between 0 and 2: (h, 1)."""
        return 2 * torch.sigmoid(self.weight)[:, None]


class QueryGateWeights(nn.Module):
    """The gates of the heads of one site that read hidden states."""

    def __init__(self, num_heads: int, channels: int, width: int) -> None:
        super().__init__()
        self.shape = (num_heads, channels)
        self.weight = nn.Parameter(torch.zeros(num_heads * channels, width))
        self.bias = nn.Parameter(torch.zeros(num_heads * channels))

    def forward(self, layer_input_BTd: Tensor) -> Tensor:
        """Factors between 0 and 2: (B, T, h, D), or (B, T, h, 1)."""
        return 2 * torch.sigmoid(nn.functional.linear(layer_input_BTd, self.weight, self.bias)).unflatten(
            -1, self.shape
        )
