"""How much of its attention a head spends on a pattern.

Source: Li et al. 2022, equation 1 and section 3.1 (METHODS E.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from guidance import measures
from guidance.sites import Site

DEVIATIONS = 3.0


def mass(attention_BHQK: Tensor, pattern_BQK: Tensor, valid_BT: Tensor) -> Tensor:
    """The mean attention of the tokens of each example that falls on keys of a pattern, (B, H), from 0 to 1.

    Args:
        attention_BHQK: probabilities; pattern_BQK: bool, or weights from 0 to 1.
        valid_BT: which tokens are no padding; special tokens count.
    """
    rows_BHQ = torch.einsum("bhqk,bqk->bhq", attention_BHQK.float(), pattern_BQK.float())
    return (rows_BHQ * valid_BT[:, None]).sum(-1) / valid_BT.sum(-1)[:, None]


def keys_of(pattern: str, ids_BT: Tensor, valid_BT: Tensor, **more: Any) -> Tensor:
    """The keys of a pattern whose attention counts, (B, Q, K), float32.

    These are the keys of `guidance.measures.pattern`, but for ``matching_token``.  There a token that occurs once may look at all
    keys as far as a mask is concerned, and has none here: relevance asks for x_i = x_j of tokens that occur several times.  A token counts as equal to itself (METHODS E.2).

    Args:
        more: see `guidance.measures.pattern`.
    """
    if pattern != "matching_token":
        return measures.pattern(pattern, ids_BT, valid_BT, **more).float()
    equal_BTT = measures.pattern({"name": pattern, "unique": "self"}, ids_BT, valid_BT, **more)
    return (equal_BTT & (equal_BTT.sum(-1, keepdim=True) > 1)).float()


class Relevance:
    """The global relevance of patterns for every head: the mean of `mass` over examples, collected batch by batch."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Site], Tensor] = {}
        self._examples: dict[tuple[str, Site], int] = {}

    def add(self, pattern: str, site: Site, mass_BH: Tensor) -> None:
        """Add the examples of a batch."""
        key = pattern, site
        self._sums[key] = self._sums.get(key, 0) + mass_BH.double().sum(0).cpu()
        self._examples[key] = self._examples.get(key, 0) + len(mass_BH)

    def of(self, pattern: str) -> Mapping[Site, Tensor]:
        """The relevance of a pattern for the heads of each site, (H,)."""
        return {
            site: total / self._examples[name, site] for (name, site), total in self._sums.items() if name == pattern
        }


def outstanding(relevance_N: Tensor) -> Tensor:
    """Which heads stand out: a relevance over the mean of all heads plus three (population) standard deviations, bool (N,).

    A single head can be at most √(N - 1) deviations above the mean of N heads, so with ten heads or fewer none ever stands
    out.
    """
    values = relevance_N.double()
    return values > values.mean() + DEVIATIONS * values.std(correction=0)
