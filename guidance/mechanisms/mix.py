"""``mix``: tokens take in what the keys of their pattern hold, by weights that are learned for each channel.

For the matrix A of the pattern, whose rows are divided by their sums, and a tensor x of the layer,

    x <- x + w * (A x),

with one weight in w for each channel.  Rows without a key add nothing, and all weights are zero at first, so that the model begins
as the plain one.  Attention itself stays as it is.  Rows of a plan that mix in one place add up: ``next``, ``self`` and ``previous``
together are a depthwise convolution over three tokens, without a bias.

Convolutions of keys, values or the residual stream: Jiang et al. 2020 (ConvBERT), So et al. 2021 (Primer), Allen-Zhu 2025 (Canon
layers).  That A may be any pattern is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from guidance.errors import PlanError
from guidance.mechanisms.base import HeadInputs, Mechanism, PatternInputs
from guidance.patterns.predicates import Columns, Shift

Place = Literal["query", "key", "value", "output", "input", "stream"]

OF_HEADS = ("query", "key", "value", "output")
"""The places that belong to heads; the others belong to whole layers."""


@dataclass(frozen=True)
class Mix(Mechanism):
    """Learned mixing along a pattern.

    Attributes:
        of: what is mixed, each with weights of its own: ``query``, ``key`` (before rotary positions) or ``value`` of the row's heads,
            their ``output`` before the output projection, the ``input`` that the projections of queries, keys and values read,
            or the ``stream``, the hidden states that enter the layer, residual connection and all.
    """

    of: tuple[Place, ...] = ("stream",)

    summary = "adds to each token what the keys of its pattern hold, by learned weights"
    source = "convolutions of Jiang et al. 2020, So et al. 2021 and Allen-Zhu 2025, along any pattern"
    per_call = True
    decays = False

    def __post_init__(self) -> None:
        if not self.of or len(set(self.of)) < len(self.of):
            raise PlanError("of is empty, or names a place twice", hint='for example of = ["stream"]')

    @property
    def places(self) -> tuple[str, ...]:
        return self.of

    @property
    def needs_scores(self) -> bool:
        return bool({"query", "key"} & set(self.of))

    @property
    def of_whole_layers(self) -> str:
        return next((f'of = ["{place}"]' for place in self.of if place not in OF_HEADS), "")

    @property
    def explanation(self) -> str:
        return f"x + w (A x) for the {' and the '.join(self.of)}; w = 0 at first, one for each channel"

    def site_module(self, num_heads: int, width: int, head_width: int) -> nn.Module:
        return MixWeights({place: (num_heads, head_width) if place in OF_HEADS else (width,) for place in self.of})

    def prepare(self, inputs: PatternInputs) -> Taking:
        predicate, allowed_BQK = inputs.predicate, inputs.scope.allowed_BQK
        assert predicate is not None
        if isinstance(predicate, Shift):
            return Shifted(predicate.offset, predicate.restricted(allowed_BQK).counts() > 0)
        if isinstance(predicate, Columns) and inputs.scope.hides_padding_only:
            keys_BK = (predicate.keys_BK & predicate.valid_BT).float()
            return Averaged(keys_BK / keys_BK.sum(-1, keepdim=True).clamp(min=1), predicate.rows_BQ, predicate.valid_BT)
        weights_BQK = predicate.dense().float() * allowed_BQK
        tiny = torch.finfo(weights_BQK.dtype).tiny
        return Multiplied(weights_BQK / weights_BQK.sum(-1, keepdim=True).clamp(min=tiny), predicate.valid_BT)

    def mix(self, states_BTx: Tensor, place: str, inputs: HeadInputs) -> Tensor:
        assert isinstance(inputs.parameters, MixWeights)
        return inputs.parameters.of[place].to(states_BTx.dtype) * inputs.prepared.of(states_BTx)


class MixWeights(nn.Module):
    """The weights of one site, by place: one for each channel."""

    def __init__(self, shapes: dict[Any, tuple[int, ...]]) -> None:
        super().__init__()
        self.of = nn.ParameterDict({place: nn.Parameter(torch.zeros(shape)) for place, shape in shapes.items()})


class Taking(Protocol):
    """The matrix A of a pattern on one batch, in one scope."""

    def of(self, states_BTx: Tensor) -> Tensor:
        """A times the states, (B, T, …)."""


@dataclass(frozen=True)
class Shifted:
    """Each row has the token ``offset`` places to the right, where ``sees_BT`` says that there is one."""

    offset: int
    sees_BT: Tensor

    def of(self, states_BTx: Tensor) -> Tensor:
        moved = torch.roll(states_BTx, -self.offset, dims=1)
        return torch.where(_beside(self.sees_BT, moved), moved, 0.0)


@dataclass(frozen=True)
class Averaged:
    """All rows have the same weights."""

    weights_BT: Tensor
    rows_BT: Tensor
    valid_BT: Tensor

    def of(self, states_BTx: Tensor) -> Tensor:
        states_BTx = _without_padding(states_BTx, self.valid_BT)
        mean_B1x = torch.einsum("bt,bt...->b...", self.weights_BT.to(states_BTx.dtype), states_BTx)[:, None]
        return torch.where(_beside(self.rows_BT, states_BTx), mean_B1x, 0.0)


@dataclass(frozen=True)
class Multiplied:
    """Any matrix, (B, T, T)."""

    weights_BTT: Tensor
    valid_BT: Tensor

    def of(self, states_BTx: Tensor) -> Tensor:
        states_BTx = _without_padding(states_BTx, self.valid_BT)
        return (self.weights_BTT.to(states_BTx.dtype) @ states_BTx.flatten(2)).view_as(states_BTx)


def _without_padding(states_BTx: Tensor, valid_BT: Tensor) -> Tensor:
    """Zeros at padding, where some kernels leave NaN, which a weight of 0 would not stop."""
    return torch.where(_beside(valid_BT, states_BTx), states_BTx, 0.0)


def _beside(values_BT: Tensor, states_BTx: Tensor) -> Tensor:
    return values_BT.view(*values_BT.shape, *(1,) * (states_BTx.dim() - 2))
