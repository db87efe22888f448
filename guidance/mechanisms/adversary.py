"""Adversarial self-attention: a second forward pass in which a learned mask takes away the keys a model leans on most.

Source: Wu et al. 2023, *Adversarial Self-Attention for Language Understanding*, equations 6 to 9, as their published code
does it.  In every layer two linear maps read what its attention reads, h (of layers that normalise first, as ModernBERT's and
T5's, after that), from which they learn nothing back:

    u = (h Wq + bq)(h Wk + bk)^T / sqrt(d),    m = 1[u > 0],    scores + (1 - m) (-10000).

The gradient passes the threshold as that of a sigmoid, and is reversed, so that one backward pass makes the model resist
and the adversary attack.  The constant 10000 is part of the method: the adversary's gradient is 10000 times that of a
score, and a key that is off has probability 0 and gets none, so only the penalty can bring it back; with minus infinity
there would be no gradient at all.

``random_mask`` holds the naive masks the paper compares with: the same second pass, without anything learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn

from guidance.errors import InputError, UnknownName
from guidance.options import Share, Within

OFF = 10_000.0
"""What is taken off the score of a key that an attack switches off."""


@dataclass(frozen=True)
class Attack:
    """What an attack does to one layer.

    Attributes:
        scores: what is added to the scores: (B, 1 or heads, Q, K).
        kept_B: how many units, of those between valid tokens, it leaves on; a mean over heads where each has its own.
        units_B: how many there are.
    """

    scores: Tensor
    kept_B: Tensor
    units_B: Tensor

    @classmethod
    def of(cls, keep: Tensor, allowed_B1QK: Tensor, queries_BQ: Tensor) -> Attack:
        """From the units that are left on, (B, 1 or heads, Q, K), 1 or 0; a row without any is left as it was."""
        # the shift leaves the softmax of such a row, and its gradient, as they would be after -10000 everywhere
        empty = ~((keep > 0) & allowed_B1QK).any(-1, keepdim=True)
        scores = (keep - 1) * OFF + OFF * empty
        units = allowed_B1QK & queries_BQ[:, None, :, None]
        return cls(scores, (keep * units).sum((2, 3)).mean(1), units.sum((1, 2, 3)))


Sentence = Literal["hidden", "head"]


@dataclass(frozen=True)
class Adversary:
    """The learned attack.

    Attributes:
        tau: how dear it is to leave units on; lower values attack harder.  0.3 fine-tunes, 0.1 pre-trains.
        penalty_weight: the weight of the penalty; by default the square of tau, as in the published code.
        noise: ``gumbel`` draws the threshold's noise that the paper describes and the code cancels.
        per_head: each head has its own mask, instead of one for all.
        normalise: the penalty is the share of units left on, instead of their number.
        init_bias: entries of both bias vectors at the start; above 0 the attack begins gently.
        sentence: what pre-training compares of whole examples (equation 10): ``hidden``, the last hidden state of the first
            token, read as a distribution over hidden units, or ``head``, what the model's head says of that token.
    """

    tau: Annotated[float, Within(0, 100)] = 0.3
    penalty_weight: Annotated[float, Within(0, 1e6)] | None = None
    noise: Literal["none", "gumbel"] = "none"
    per_head: bool = False
    normalise: bool = False
    init_bias: Annotated[float, Within(-100, 100)] = 0.0
    sentence: Sentence = "hidden"

    @property
    def penalty(self) -> float:
        """The weight of the penalty."""
        return self.tau**2 if self.penalty_weight is None else self.penalty_weight

    def module(self, num_heads: int, width: int) -> nn.Module:
        """The parameters of one site."""
        return AdversaryWeights(self, num_heads, width)

    def attack(
        self,
        weights: nn.Module,
        layer_input_BTd: Tensor,
        allowed_B1QK: Tensor,
        queries_BQ: Tensor,
        seeds_B: Tensor,
    ) -> Attack:
        """The attack on one layer; see `uniform_numbers` for the seeds."""
        units = weights(layer_input_BTd.detach())
        if self.noise == "gumbel":
            uniform = uniform_numbers(seeds_B, *units.shape[1:]).clamp(1e-6, 1 - 1e-6)
            units = units + torch.logit(uniform)  # the difference of two Gumbel draws
        return Attack.of(ReversedThreshold.apply(units), allowed_B1QK, queries_BQ)

    def penalties_B(self, attack: Attack) -> Tensor:
        """What each example pays for what is left on in one layer."""
        return attack.kept_B / attack.units_B.clamp(min=1) if self.normalise else attack.kept_B


class AdversaryWeights(nn.Module):
    """The two maps of one layer; they start from N(0, 0.02)."""

    def __init__(self, options: Adversary, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_maps = num_heads if options.per_head else 1
        self.head_size = max(1, width // self.num_maps)  # of 3 heads of 16 each has 5
        self.query, self.key = (nn.Linear(width, self.num_maps * self.head_size) for _ in range(2))
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.constant_(linear.bias, options.init_bias)

    def forward(self, states_BTd: Tensor) -> Tensor:
        """The units before the threshold, (B, 1 or heads, Q, K)."""
        query, key = (
            linear(states_BTd).unflatten(-1, (self.num_maps, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key)
        )
        return (query * self.head_size**-0.5) @ key.transpose(-1, -2)


class ReversedThreshold(torch.autograd.Function):
    """1 where u > 0, else 0; the gradient is that of a sigmoid, turned round."""

    @staticmethod
    def forward(ctx: Any, units: Tensor) -> Tensor:
        ctx.save_for_backward(units)
        return (units > 0).to(torch.promote_types(units.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (units,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(units.to(grads[0].dtype))
        return (-grads[0] * sigmoid * (1 - sigmoid)).to(units.dtype)


PROPORTIONS = "masking_proportion"
"""The table of what an adversary had switched off: (steps, layers)."""


@dataclass(frozen=True)
class RandomMask:
    """The naive attacks; one mask for all heads.

    Attributes:
        kind: ``bernoulli`` switches every unit off with the same probability, ``scheduled`` with the one that an
            adversary had at that step and layer (table ``masking_proportion``), ``magnitude`` those of the highest scores.
        proportion: the probability, or for ``magnitude`` the share of every row, rounded down.
        sentence: see `Adversary`.
    """

    kind: Literal["bernoulli", "scheduled", "magnitude"] = "bernoulli"
    proportion: Share = 0.1
    sentence: Sentence = "hidden"

    @property
    def tables(self) -> tuple[str, ...]:
        """What it looks up; see `guidance.plan.Guide.tables`."""
        return (PROPORTIONS,) if self.kind == "scheduled" else ()

    def attack(
        self,
        scores_BhQK: Tensor,
        allowed_B1QK: Tensor,
        queries_BQ: Tensor,
        seeds_B: Tensor,
        proportion: float,
    ) -> Attack:
        """The attack on one layer, whose scores before any mask are given; every row keeps at least one key.

        Args:
            seeds_B: see `uniform_numbers`.

        Raises:
            InputError: the proportion, from a table perhaps, is no share.
        """
        if not 0 <= proportion <= 1:
            raise InputError(f"a proportion of {proportion} of the units cannot be switched off", hint="from 0 to 1")
        if self.kind == "magnitude":
            order = scores_BhQK.detach().mean(1, keepdim=True)
        else:
            order = uniform_numbers(seeds_B, *allowed_B1QK.shape[1:])
        order = order.masked_fill(~allowed_B1QK, -torch.inf)
        if self.kind == "magnitude":
            rank = order.argsort(-1, descending=True).argsort(-1)
            # of rows of 0, 1, 2 ... keys; the sum keeps 0.29 of 100 at 29
            shares = [min(math.floor(proportion * n + 1e-9), max(n - 1, 0)) for n in range(order.shape[-1] + 1)]
            off = rank < torch.tensor(shares, device=order.device)[allowed_B1QK.sum(-1, keepdim=True)]
        else:
            # uniform numbers, so the highest of a row is as good a unit to keep as any
            off = (order < proportion) & (order < order.amax(-1, keepdim=True))
        return Attack.of((~off).float(), allowed_B1QK, queries_BQ)


def uniform_numbers(seeds_B: Tensor, heads: int, queries: int, keys: int) -> Tensor:
    """Numbers in [0, 1), float32 (B, heads, queries, keys), that depend on the seed of their example and their own place
    alone: not on the device, on how wide the batch is padded, or on which examples are beside it.

    Source: the output function of SplitMix64 (Steele et al. 2014, *Fast Splittable Pseudorandom Number Generators*).

    Args:
        seeds_B: int64, one for each example; others for every layer, see `seeds_of`.
    """
    axes = (torch.arange(size, device=seeds_B.device) for size in (heads, queries, keys))
    head_h, query_Q, key_K = (axis.view(shape) for axis, shape in zip(axes, ((-1, 1, 1), (-1, 1), (-1,)), strict=True))
    places_hQK = (head_h << 48) + (query_Q << 24) + key_K
    numbers_BhQK = _mixed(seeds_B.view(-1, 1, 1, 1) + places_hQK * _GOLDEN)
    return (numbers_BhQK.bitwise_right_shift_(40).bitwise_and_(0xFFFFFF)).float().mul_(2.0**-24)


def seeds_of(seeds_B: Tensor, stack: str, layer: int, guide: int) -> Tensor:
    """Seeds of its own for each guide in each layer, from those of the examples."""
    return _mixed(seeds_B + (guide << 20) + (layer << 1) + (stack == "decoder"))


_GOLDEN, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mixed(numbers: Tensor) -> Tensor:
    """Every bit of int64 numbers depends on all of theirs; products wrap round, shifts bring in zeros."""
    numbers = numbers.clone()
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        numbers ^= (numbers >> shift).bitwise_and_((1 << 64 - shift) - 1)
        numbers *= factor
    return numbers


Form = Literal["classification", "token", "regression"]


def divergence(
    clean: Tensor, attacked: Tensor, form: Form = "classification", selected: Tensor | None = None
) -> Tensor:
    """How far the attacked outputs are from the clean ones: a scalar, with gradients to both.

    Args:
        clean, attacked: logits, (B, classes), or (B, T, classes) for tokens; for regression (B,) or (B, 1).
        form: ``classification`` and ``token`` take the mean of half the sum of both Kullback-Leibler divergences,
            ``regression`` the mean squared difference.
        selected: bool, the examples or tokens that count: valid tokens, or masked positions; all by default.

    Raises:
        InputError: the shapes do not fit.
        UnknownName: there is no such form.
    """
    if form not in get_args(Form):
        raise UnknownName("form", form, get_args(Form))
    if clean.shape != attacked.shape:
        raise InputError(f"the clean outputs are {tuple(clean.shape)}, the attacked ones {tuple(attacked.shape)}")
    if clean.dim() != {"token": 3, "classification": 2}.get(form, clean.dim()):
        raise InputError(f"outputs of shape {tuple(clean.shape)} are not those of the form {form}")
    places = clean.shape if form == "regression" else clean.shape[:-1]
    if selected is not None and selected.shape != places:
        raise InputError(f"selected is {tuple(selected.shape)}, the outputs are {tuple(clean.shape)}")
    clean, attacked = (logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in (clean, attacked))
    if form == "regression":
        distances = (attacked - clean).square()
    else:
        left, right = (torch.log_softmax(logits, -1) for logits in (clean, attacked))
        distances = 0.5 * ((right.exp() - left.exp()) * (right - left)).sum(-1)
    if selected is None:
        return distances.mean()
    return (distances * selected).sum() / selected.sum().clamp(min=1)
