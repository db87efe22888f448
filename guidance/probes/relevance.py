"""How much of its attention a head spends on a pattern.

Source: Li et al. 2022, equation 1 and section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Literal

import torch
from torch import Tensor

from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import Tokens
from guidance.patterns.pattern import Pattern
from guidance.sites import Site

DEVIATIONS = 3.0
"""How many standard deviations a head must be above the mean of all heads to stand out."""

Half = Literal["first", "second"]


def keys_of(pattern: Pattern, tokens: Tokens) -> Tensor:
    """The keys of a pattern whose attention counts, (B, Q, K), float32.

    These are the keys that it names, but for ``matching_token`` with its default options.  There a token that occurs once may
    look at all keys as far as a mask is concerned, and has none here: relevance asks for x_i = x_j of tokens that occur several
    times.  A token counts as equal to itself, since equation 1 sums over all pairs.
    """
    if pattern.name != "matching_token" or pattern.options:
        return pattern.on(tokens).dense().float()
    equal_BTT = read_pattern({"name": "matching_token", "unique": "self"}).on(tokens).dense()
    return (equal_BTT & (equal_BTT.sum(-1, keepdim=True) > 1)).float()


def among(attention_BHQK: Tensor, kept_BT: Tensor, *, diagonal: bool = True) -> Tensor:
    """Attention among some tokens alone: rows are divided by what they have left, and rows of other tokens are 0.

    Args:
        kept_BT: bool, for example which tokens are not special; diagonal: False also leaves out a token's attention to itself.
    """
    kept_BQK = kept_BT[:, :, None] & kept_BT[:, None, :]
    if not diagonal:
        kept_BQK = kept_BQK & ~torch.eye(kept_BT.shape[1], dtype=torch.bool, device=kept_BT.device)
    left = attention_BHQK.float() * kept_BQK[:, None]
    return left / left.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def masses(attention_BHQK: Tensor, patterns_BPQK: Tensor, valid_BT: Tensor) -> Tensor:
    """The mean attention of the tokens of each example that falls on the keys of each pattern, (B, H, P), from 0 to 1.

    Args:
        attention_BHQK: probabilities.
        patterns_BPQK: the keys of each pattern, 0 or 1, or weights between.
        valid_BT: the tokens that count as queries; special tokens do, in the paper.
    """
    attention_BQHK = attention_BHQK.float().transpose(1, 2)
    rows_BQHP = attention_BQHK @ patterns_BPQK.permute(0, 2, 3, 1)
    counted = valid_BT.float()[:, :, None, None]
    return (rows_BQHP * counted).sum(1) / valid_BT.sum(-1).clamp(min=1)[:, None, None]


def visible(valid_BT: Tensor, *, is_causal: bool) -> Tensor:
    """The keys that a query can see, bool (B, Q, K): all valid ones, or in a causal model itself and all earlier ones."""
    visible_BQK = valid_BT[:, :, None] & valid_BT[:, None, :]
    return visible_BQK.tril() if is_causal else visible_BQK


def even_attention(valid_BT: Tensor, *, is_causal: bool) -> Tensor:
    """The attention of a head that looks at all keys alike that it can see, (B, 1, Q, K)."""
    visible_BQK = visible(valid_BT, is_causal=is_causal)
    return (visible_BQK.float() / visible_BQK.sum(-1, keepdim=True).clamp(min=1))[:, None]


def highest_entropy(valid_BT: Tensor, *, is_causal: bool) -> Tensor:
    """The mean entropy of the rows of such a head, in nats, (B,); of texts of one token that of two keys, since it divides others."""
    entropy_BQ = visible(valid_BT, is_causal=is_causal).sum(-1).clamp(min=1).double().log()
    return (entropy_BQ.sum(-1) / valid_BT.sum(-1).clamp(min=1)).float().where(valid_BT.sum(-1) > 1, math.log(2))


def uniform(patterns_BPQK: Tensor, valid_BT: Tensor, *, is_causal: bool) -> Tensor:
    """The `masses` of a head that looks at all keys alike that it can see, (B, P)."""
    return masses(even_attention(valid_BT, is_causal=is_causal), patterns_BPQK, valid_BT)[:, 0]


class Relevance:
    """The global relevance of patterns for every head: the mean of `masses` over examples, collected batch by batch.

    Each half of the examples, every other one, has a mean of its own: to choose on one and confirm on the other.  Sequences of one
    example, which may overlap, are in the same half.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.examples = {"first": 0, "second": 0}
        self._sums: dict[tuple[Site, str], Tensor] = {}
        self._squares: dict[Site, Tensor] = {}
        self._uniform = torch.zeros(len(self.names), dtype=torch.float64)

    def begin(self, numbers: Sequence[int], uniform_BP: Tensor) -> None:
        """Announce the sequences of a batch: the numbers of their examples, of which even ones are the first half, and their
        `uniform`."""
        self._is_second = torch.tensor([number % 2 == 1 for number in numbers])
        self.examples["second"] += int(self._is_second.sum())
        self.examples["first"] += int((~self._is_second).sum())
        self._uniform += uniform_BP.double().sum(0).cpu()

    def add(self, site: Site, masses_BHP: Tensor) -> None:
        """Add a layer of the batch that was announced."""
        masses_BHP = masses_BHP.double().cpu()
        for half, chosen_B in (("first", ~self._is_second), ("second", self._is_second)):
            self._sums[site, half] = self._sums.get((site, half), 0) + masses_BHP[chosen_B].sum(0)
        self._squares[site] = self._squares.get(site, 0) + masses_BHP.square().sum(0)

    def snapshot(self) -> Relevance:
        """What is known so far, which later batches do not change."""
        known = copy(self)
        known.examples, known._sums, known._squares = dict(self.examples), dict(self._sums), dict(self._squares)
        known._uniform = self._uniform.clone()
        return known

    def join(self, other: Relevance) -> None:
        """Add the patterns that another pass over the same examples measured."""
        self._uniform = torch.cat([self._uniform, other._uniform])
        for key, sums in self._sums.items():
            self._sums[key] = torch.cat([sums, other._sums[key]], dim=-1)
        for site, squares in self._squares.items():
            self._squares[site] = torch.cat([squares, other._squares[site]], dim=-1)
        self.names += other.names

    def of(self, name: str, half: Half | None = None) -> Mapping[Site, Tensor]:
        """The relevance of a pattern for the heads of each site, (H,); NaN where a half has no example."""
        column, halves = self.names.index(name), (half,) if half else ("first", "second")
        number = sum(self.examples[each] for each in halves)
        return {
            site: sum((self._sums[site, each][:, column] for each in halves), torch.zeros(())) / (number or torch.nan)
            for site in self._squares
        }

    def standard_error(self, name: str) -> Mapping[Site, Tensor]:
        """The standard error of `of` over the examples, (H,); NaN of one example."""
        column, number = self.names.index(name), sum(self.examples.values())
        errors = {}
        for site, mean in self.of(name).items():
            variance = (self._squares[site][:, column] / number - mean.square()).clamp(min=0) * number
            errors[site] = (variance / ((number - 1) or torch.nan) / number).sqrt()
        return errors

    def by_chance(self, name: str) -> float:
        """The relevance of a pattern for a head that looks at all tokens alike that it can see."""
        return float(self._uniform[self.names.index(name)]) / max(1, sum(self.examples.values()))


def outstanding(relevance_N: Tensor, deviations: float = DEVIATIONS) -> Tensor:
    """Which heads stand out: a relevance over the mean of all heads plus some (population) standard deviations, bool (N,).

    A single head can be at most √(N - 1) deviations above the mean of N heads, so with three deviations and ten heads or fewer
    none ever stands out.
    """
    values = relevance_N.double()
    return values > values.mean() + deviations * values.std(correction=0)
