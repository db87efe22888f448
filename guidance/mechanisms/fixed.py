"""Heads whose attention is written down instead of computed: no queries, no keys, no softmax.

``fix`` puts a pattern in the place of a head's attention (Li et al. 2022, equation 6, as their published code means it:
all weight on the pattern's keys); ``gaussian`` a bell curve around a neighbour (You et al. 2020, hard-coded Gaussian
attention); ``off`` nothing at all, which is what ``head_mask`` was for.  Values and the output projection stay learned.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from guidance.errors import PlanError
from guidance.options import Within
from guidance.patterns.catalogue import Columns, Predicate, Shift


@dataclass(frozen=True)
class Room:
    """What the queries of one call may see at all.

    Attributes:
        allowed_BQK: bool: padding, causality and sliding window.
        is_causal: later keys are among what is forbidden.
        is_plain: nothing but padding is forbidden.
    """

    allowed_BQK: Tensor
    is_causal: bool
    is_plain: bool


class Replacement(ABC):
    """A mechanism that takes the place of a head's attention."""

    uses_values = True

    @abstractmethod
    def attention(self, predicate: Predicate | None, room: Room, num_heads: int) -> Tensor:
        """The weights written out: float32 (B, heads or 1, Q, K)."""

    def output(self, predicate: Predicate | None, room: Room, value_BhKD: Tensor, dropout: float) -> Tensor:
        """The output of the heads, (B, heads, Q, D); dropout takes single entries of the weights."""
        weights = self.attention(predicate, room, value_BhKD.shape[1])
        if dropout:
            weights = nn.functional.dropout(weights.expand(-1, value_BhKD.shape[1], -1, -1), dropout)
        return weights.to(value_BhKD.dtype) @ value_BhKD


@dataclass(frozen=True)
class Fix(Replacement):
    """All weight on the keys of the pattern, shared evenly, or as a weighted pattern says.

    Attributes:
        boundary: what a query without such a key gets: all that it may see, evenly (``uniform``), itself (``self``), or
            all positions evenly, padding included (``all``), as the published code does.
    """

    boundary: Literal["uniform", "self", "all"] = "uniform"

    def attention(self, predicate: Predicate | None, room: Room, num_heads: int) -> Tensor:
        assert predicate is not None
        wanted = predicate.dense().float() * room.allowed_BQK
        rows = torch.where(wanted.any(-1, keepdim=True), wanted, self._boundary_rows(room))
        return (rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny))[:, None]

    def _boundary_rows(self, room: Room) -> Tensor:
        if self.boundary == "uniform":
            return room.allowed_BQK.float()
        everything = torch.ones_like(room.allowed_BQK, dtype=torch.float32)
        if self.boundary == "self":
            return everything.tril().triu()
        return everything.tril() if room.is_causal else everything

    def output(self, predicate: Predicate | None, room: Room, value_BhKD: Tensor, dropout: float) -> Tensor:
        """As above; of neighbours and of keys that all queries share the rows are read off, and dropout takes whole rows."""
        if not (room.is_plain and isinstance(predicate, Shift | Columns)):
            return super().output(predicate, room, value_BhKD, dropout)
        if isinstance(predicate, Shift):
            wanted = torch.roll(value_BhKD, -predicate.offset, dims=2)
        else:
            wanted = _mean(value_BhKD, predicate.keys_BK & predicate.valid_BT)
        if self.boundary == "self":
            other = value_BhKD
        else:
            everywhere = torch.ones_like(predicate.valid_BT)
            other = _mean(value_BhKD, everywhere if self.boundary == "all" else predicate.valid_BT)
        counts_BQ = predicate.counts()
        output = torch.where(counts_BQ[:, None, :, None] > 0, wanted, other)
        if dropout:
            row_shape = (*output.shape[:3], 1)
            output = output * nn.functional.dropout(output.new_ones(row_shape), dropout)
        return output


def _mean(value_BhKD: Tensor, keys_BK: Tensor) -> Tensor:
    """The mean of the values at some keys: (B, h, 1, D)."""
    weights_BK = keys_BK / keys_BK.sum(-1, keepdim=True).clamp(min=1)
    return weights_BK[:, None, None].to(value_BhKD.dtype) @ value_BhKD


@dataclass(frozen=True)
class Gaussian(Replacement):
    """A bell curve over positions, centred a step to the side; its weights are densities and are not normalised.

    Attributes:
        sigma: its width, in tokens.
        offsets: the centres of successive heads relative to the query, in tokens; they repeat.  By default -1 and 1,
            in decoders -1 and 0.
    """

    sigma: Annotated[float, Within(1e-3, 1e3)] = 1.0
    offsets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.offsets is not None and not self.offsets:
            raise PlanError("offsets is empty")

    def attention(self, predicate: Predicate | None, room: Room, num_heads: int) -> Tensor:
        offsets = self.offsets or ((-1, 0) if room.is_causal else (-1, 1))
        centres_h = torch.tensor(offsets, device=room.allowed_BQK.device).repeat(num_heads)[:num_heads]
        positions = torch.arange(room.allowed_BQK.shape[-1], device=room.allowed_BQK.device)
        distance_hQK = (positions[None, :] - positions[:, None])[None] - centres_h[:, None, None]
        density = torch.exp(-(distance_hQK / self.sigma).square() / 2) / (self.sigma * math.sqrt(2 * math.pi))
        return density[None] * room.allowed_BQK[:, None]


@dataclass(frozen=True)
class Off(Replacement):
    """The head says nothing."""

    uses_values = False

    def attention(self, predicate: Predicate | None, room: Room, num_heads: int) -> Tensor:
        return torch.zeros_like(room.allowed_BQK, dtype=torch.float32)[:, None]

    def output(self, predicate: Predicate | None, room: Room, value_BhKD: Tensor, dropout: float) -> Tensor:
        return value_BhKD.new_zeros((*value_BhKD.shape[:2], room.allowed_BQK.shape[1], value_BhKD.shape[3]))
