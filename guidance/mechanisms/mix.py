"""``mix``: tokens take in what the keys of their pattern hold, by weights that are learned for each channel, or all of it.

For the matrix A of the pattern, whose rows are divided by their sums, and a tensor x of the layer,

    x <- x + w * (A x),

with one weight in w for each channel.  Rows without a key add nothing, and all weights are zero at first, so that the model begins
as the plain one.  Attention itself stays as it is.  Rows of a plan that mix in one place add up: ``next``, ``self`` and ``previous``
together are a depthwise convolution over three tokens, without a bias.

Convolutions of keys, values or the residual stream: Jiang et al. 2020 (ConvBERT), So et al. 2021 (Primer), Allen-Zhu 2025 (Canon
layers).  That A may be any pattern is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        learn: the weights are learned and zero at first; otherwise they are 1, so that the guide acts without training.
    """

    of: tuple[Place, ...] = ("stream",)
    learn: bool = True

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
        weights = "w = 0 at first, one for each channel" if self.learn else "w = 1"
        return f"x + w (A x) for the {' and the '.join(self.of)}; {weights}"

    @property
    def learns(self) -> bool:
        return self.learn

    def site_module(self, num_heads: int, width: int, head_width: int) -> nn.Module | None:
        if not self.learn:
            return None
        return MixWeights({place: (num_heads, head_width) if place in OF_HEADS else (width,) for place in self.of})

    def prepare(self, inputs: PatternInputs) -> Matrix:
        predicate, allowed_BQK = inputs.predicate, inputs.scope.allowed_BQK
        assert predicate is not None
        if isinstance(predicate, Shift):
            sees_BT = predicate.restricted(allowed_BQK).counts() > 0
            if inputs.scope.first_query:  # earlier tokens stand before the rows
                return Shifted(predicate.offset, sees_BT)
            return Shifted.of_queries(predicate.offset, sees_BT)
        if isinstance(predicate, Columns) and inputs.scope.hides_padding_only:
            keys_BK = (predicate.keys_BK & predicate.valid_BT).float()
            return Averaged(keys_BK / keys_BK.sum(-1, keepdim=True).clamp(min=1), predicate.rows_BQ, predicate.valid_BT)
        weights_BQK = predicate.dense().float() * allowed_BQK
        tiny = torch.finfo(weights_BQK.dtype).tiny
        return Multiplied(weights_BQK / weights_BQK.sum(-1, keepdim=True).clamp(min=tiny), predicate.valid_BT)

    def mix(self, place: str, inputs: HeadInputs) -> Tensor:
        if not self.learn:
            shape = (len(inputs.heads), 1) if place in OF_HEADS else (1,)
            return torch.ones(shape, device=inputs.scope.allowed_BQK.device)
        assert isinstance(inputs.parameters, MixWeights)
        weights: Tensor = inputs.parameters.of[place]
        return weights


class MixWeights(nn.Module):
    """The weights of one site, by place: one for each channel."""

    def __init__(self, shapes: dict[Any, tuple[int, ...]]) -> None:
        super().__init__()
        self.of = nn.ParameterDict({place: nn.Parameter(torch.zeros(shape)) for place, shape in shapes.items()})


class Matrix(Protocol):
    """The matrix A of a pattern on one batch, in one scope."""

    def of(self, states_BTx: Tensor) -> Tensor:
        """A times the states, (B, T, …)."""


@dataclass(frozen=True)
class Shifted:
    """Each row has the token ``offset`` places to the right.

    Attributes:
        sees_BT: the rows that have it; None for all for which the sequence is long enough.
    """

    offset: int
    sees_BT: Tensor | None

    @classmethod
    def of_queries(cls, offset: int, sees_BT: Tensor) -> Shifted:
        """The matrix in which some queries see their key."""
        # a GPU would have to be waited for, and compiled code cannot ask
        if sees_BT.device.type == "cpu" and not torch.compiler.is_compiling():
            batch, length = sees_BT.shape
            if int(sees_BT.sum()) == batch * max(0, length - abs(offset)):
                return cls(offset, None)
        return cls(offset, sees_BT)

    def of(self, states_BTx: Tensor) -> Tensor:
        length, sees_BT = states_BTx.shape[1], self.sees_BT
        if sees_BT is None:
            key_T = torch.arange(length, device=states_BTx.device) + self.offset
            sees_BT = ((key_T >= 0) & (key_T < length))[None]
        return _kept(sees_BT, torch.roll(states_BTx, -self.offset, dims=1))

    def after(self, count: int) -> Shifted:
        """The same matrix with ``count`` more tokens before its rows, which mix in nothing themselves."""
        assert self.sees_BT is not None
        return Shifted(self.offset, nn.functional.pad(self.sees_BT, (count, 0)))

    def rows_and_keys(self, length: int) -> tuple[slice, slice]:
        """The rows whose token is in a sequence of that length, and these tokens."""
        first = max(0, -self.offset)
        end = max(first, min(length, length - self.offset))
        return slice(first, end), slice(first + self.offset, end + self.offset)

    def seen(self, rows: slice, states_BRx: Tensor) -> Tensor:
        """States of some rows, zero where a row does not see its token."""
        return states_BRx if self.sees_BT is None else _kept(self.sees_BT[:, rows], states_BRx)


class _Shifts(torch.autograd.Function):
    """x + Σ w ⊙ (A x) for shifted matrices A: nothing of the size of x is kept for the backward pass but x."""

    @staticmethod
    def forward(ctx: Any, states_BTx: Tensor, matrices: Sequence[Shifted], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(states_BTx, *weights)
        ctx.matrices, result = matrices, states_BTx.clone()
        for matrix, own in zip(matrices, weights, strict=True):
            rows, keys = matrix.rows_and_keys(states_BTx.shape[1])
            result[:, rows].addcmul_(matrix.seen(rows, states_BTx[:, keys]), own)
        return result

    @staticmethod
    def backward(ctx: Any, grad_BTx: Tensor) -> tuple[Tensor | None, ...]:
        states_BTx, *weights = ctx.saved_tensors
        of_states, of_weights = grad_BTx.clone(), []
        for matrix, own in zip(ctx.matrices, weights, strict=True):
            rows, keys = matrix.rows_and_keys(states_BTx.shape[1])
            of_states[:, keys].addcmul_(matrix.seen(rows, grad_BTx[:, rows]), own)
            of_weights.append(matrix.seen(rows, grad_BTx[:, rows] * states_BTx[:, keys]).sum((0, 1)))
        return of_states, None, *of_weights


def with_shifts(states_BTx: Tensor, matrices: Sequence[Shifted], weights: Sequence[Tensor]) -> Tensor:
    """x + Σ w ⊙ (A x) for shifted matrices, each with its weights."""
    if torch.compiler.is_compiling():  # which joins the steps by itself
        return sum((own * matrix.of(states_BTx) for matrix, own in zip(matrices, weights, strict=True)), states_BTx)
    return _Shifts.apply(states_BTx, matrices, *weights)


@dataclass(frozen=True)
class Averaged:
    """All rows have the same weights."""

    weights_BT: Tensor
    rows_BT: Tensor
    valid_BT: Tensor

    def of(self, states_BTx: Tensor) -> Tensor:
        states_BTx = _kept(self.valid_BT, states_BTx)
        mean_B1x = torch.einsum("bt,bt...->b...", self.weights_BT.to(states_BTx.dtype), states_BTx)[:, None]
        return _kept(self.rows_BT, mean_B1x)


@dataclass(frozen=True)
class Multiplied:
    """Any matrix, (B, Q, K).  Where the states are fewer than K, the other keys are empty places of a cache."""

    weights_BQK: Tensor
    valid_BK: Tensor

    def of(self, states_BKx: Tensor) -> Tensor:
        keys = states_BKx.shape[1]
        states_BKx = _kept(self.valid_BK[:, :keys], states_BKx)
        mixed_BQd = self.weights_BQK[..., :keys].to(states_BKx.dtype) @ states_BKx.flatten(2)
        return mixed_BQd.unflatten(-1, states_BKx.shape[2:])


def _kept(tokens_BT: Tensor, states_BTx: Tensor) -> Tensor:
    """States with zeros at all other tokens.  At padding some kernels leave NaN, which a weight of 0 would not stop."""
    return torch.where(tokens_BT.view(*tokens_BT.shape, *(1,) * (states_BTx.dim() - 2)), states_BTx, 0.0)
