"""Heads whose attention is given instead of computed: no queries, no keys, no softmax.

``fix`` puts a pattern in the place of a head's attention (Li et al. 2022, equation 6, as their published code means it:
all weight on the pattern's keys).  ``gaussian`` puts a bell curve around a neighbour there (You et al. 2020, hard-coded
Gaussian attention), and ``off`` nothing at all, as ``head_mask`` did.  Values and the output projection stay learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from guidance.errors import InputError, PlanError
from guidance.mechanisms.base import HeadInputs, Mechanism, PatternInputs
from guidance.options import Within
from guidance.patterns.predicates import AttentionScope, Columns, Shift


class Replacement(Mechanism):
    """A mechanism that replaces a head's attention by weights that it knows."""

    def replace(self, value_BhKD: Tensor, inputs: HeadInputs, dropout: float) -> Tensor:
        """The output of the heads, (B, h, Q, D).  Dropout zeroes single entries of the weights."""
        weights = self.replaced_attention(inputs)
        if dropout:
            weights = nn.functional.dropout(weights.expand(-1, value_BhKD.shape[1], -1, -1), dropout)
        return weights.to(value_BhKD.dtype) @ value_BhKD


@dataclass(frozen=True)
class Fix(Replacement):
    """All weight on the keys of the pattern, shared evenly, or as a weighted pattern says.

    Attributes:
        boundary: what a query without such a key looks at: all that it may see, evenly (``uniform``), itself (``self``),
            or all positions evenly, padding included (``all``), as the published code does.
    """

    boundary: Literal["uniform", "self", "all"] = "uniform"

    summary = "puts the pattern in the place of the head's attention"
    source = "Li et al. 2022, eq. 6"

    @property
    def one_sequence_because(self) -> str:
        return 'boundary = "self"' if self.boundary == "self" else ""

    def prepare(self, inputs: PatternInputs) -> Tensor | None:
        """The weights of the keys, (B, Q, K); None where they are not needed to replace attention."""
        return None if _is_read_off(inputs) else self._weights(inputs)

    def replaced_attention(self, inputs: HeadInputs) -> Tensor:
        weights_BQK: Tensor = self._weights(inputs.pattern) if inputs.prepared is None else inputs.prepared
        return weights_BQK[:, None]

    def _weights(self, inputs: PatternInputs) -> Tensor:
        predicate, scope = inputs.predicate, inputs.scope
        assert predicate is not None
        wanted = predicate.dense().float() * scope.allowed_BQK
        rows = torch.where(wanted.any(-1, keepdim=True), wanted, self._boundary_rows(scope))
        return rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)

    def _boundary_rows(self, scope: AttentionScope) -> Tensor:
        if self.boundary == "uniform":
            return scope.allowed_BQK.float()
        everything = torch.ones_like(scope.allowed_BQK, dtype=torch.float32)
        if self.boundary == "self":
            return everything.tril(scope.diagonal).triu(scope.diagonal)
        if scope.first_key:
            raise InputError(
                'fix with boundary = "all" reads all earlier tokens, and the cache of this layer keeps its window alone',
                hint="past_key_values=transformers.DynamicCache() keeps them all, or generate(use_cache=False)",
            )
        return everything.tril(scope.diagonal) if scope.is_causal else everything

    def replace(self, value_BhKD: Tensor, inputs: HeadInputs, dropout: float) -> Tensor:
        """The output of the heads.  A `Shift` or `Columns` is read off the values, and dropout then zeroes whole rows."""
        predicate = inputs.pattern.predicate
        if not _is_read_off(inputs.pattern):
            return super().replace(value_BhKD, inputs, dropout)
        assert isinstance(predicate, Shift | Columns)
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


def _is_read_off(inputs: PatternInputs) -> bool:
    """Whether what the pattern's keys hold is read off the values, without a matrix."""
    return inputs.scope.hides_padding_only and isinstance(inputs.predicate, Shift | Columns)


def _mean(value_BhKD: Tensor, keys_BK: Tensor) -> Tensor:
    """The mean of the values at some keys: (B, h, 1, D)."""
    weights_BK = keys_BK / keys_BK.sum(-1, keepdim=True).clamp(min=1)
    return weights_BK[:, None, None].to(value_BhKD.dtype) @ value_BhKD


@dataclass(frozen=True)
class Gaussian(Replacement):
    """A bell curve over positions, centred a step to the side; its weights are densities and are not normalised.

    Attributes:
        sigma: its width, in tokens.
        offsets: the centres of successive heads relative to the query, in tokens; they repeat.  By default -1 and 1, and
            -1 and 0 in decoders.
    """

    sigma: Annotated[float, Within(1e-3, 1e3)] = 1.0
    offsets: tuple[int, ...] | None = None

    summary = "puts a bell curve over neighbours in the place of the head's attention"
    source = "You et al. 2020, hard-coded Gaussian attention"
    takes_pattern = False

    def __post_init__(self) -> None:
        if self.offsets is not None and not self.offsets:
            raise PlanError("offsets is empty")

    @property
    def one_sequence_because(self) -> str:
        return "gaussian"

    def prepare(self, inputs: PatternInputs) -> Tensor:
        """The curve around each centre, (B, centres, Q, K)."""
        scope = inputs.scope
        allowed_BQK, offsets = scope.allowed_BQK, self.offsets or ((-1, 0) if scope.is_causal else (-1, 1))
        centre_o = torch.tensor(offsets, device=allowed_BQK.device)
        query_Q, key_K = (torch.arange(size, device=allowed_BQK.device) for size in allowed_BQK.shape[1:])
        distance_oQK = (key_K - query_Q[:, None] - scope.diagonal) - centre_o[:, None, None]
        density = torch.exp(-(distance_oQK / self.sigma).square() / 2) / (self.sigma * math.sqrt(2 * math.pi))
        return density[None] * allowed_BQK[:, None]

    def replaced_attention(self, inputs: HeadInputs) -> Tensor:
        curves_BoQK: Tensor = inputs.prepared
        centres = torch.arange(len(inputs.heads), device=curves_BoQK.device) % curves_BoQK.shape[1]
        return curves_BoQK[:, centres]


@dataclass(frozen=True)
class Off(Replacement):
    """The head's output is zero; it has no options."""

    summary = "switches heads off, as head_mask did"
    source = "Michel et al. 2019"
    takes_pattern = False
    reads_keys = False

    def replaced_attention(self, inputs: HeadInputs) -> Tensor:
        return torch.zeros_like(inputs.scope.allowed_BQK, dtype=torch.float32)[:, None]

    def replace(self, value_BhKD: Tensor, inputs: HeadInputs, dropout: float) -> Tensor:
        queries = inputs.scope.allowed_BQK.shape[1]
        return value_BhKD.new_zeros((*value_BhKD.shape[:2], queries, value_BhKD.shape[3]))
