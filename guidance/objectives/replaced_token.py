"""Replaced-token detection: a generator fills in masked tokens, and a discriminator judges whether each token is original.

Each masked token is drawn with one uniform number, by the inverse of the cumulative distribution.  The numbers depend only
on (seed, epoch, example), so the tokens that are drawn do not depend on how a batch is split.

Source: Clark et al. 2020, *ELECTRA*, section 2; Xing et al. 2020, equations 5 to 7.  Their generators may draw any token;
ours never draw special tokens, because masked positions never hold them, and a discriminator would recognise them at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from guidance.statistics.ngrams import counts_below


def uniform_numbers(number: int, *, seed: int, epoch: int, example: int) -> np.ndarray:
    """Uniform numbers in [0, 1), float64, with which the tokens of an example are drawn; they are independent of those of
    `guidance.objectives.masked_lm.Masker`."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 1, 0, example])).random(number)


@torch.no_grad()
def draw(logits_NV: Tensor, uniform_N: Tensor, ordinary_W: Tensor) -> Tensor:
    """Tokens drawn from the softmax of the logits over the ``ordinary`` ids: int64 (N,), without a gradient."""
    logits_NW = logits_NV.index_select(1, ordinary_W)
    logits_NW = logits_NW.to(torch.promote_types(logits_NW.dtype, torch.float32))
    return ordinary_W[_inverse(logits_NW.softmax(-1).cumsum(-1), uniform_N)]


@dataclass(frozen=True)
class Unigram:
    """The unigram distribution of a corpus, which is the generator in the ELECTRA of Deshpande & Narasimhan 2020.

    Attributes:
        ordinary_W: the ids that can be drawn, ascending.
        cumulative_W: cumulative counts of these ids, float64.
    """

    ordinary_W: Tensor
    cumulative_W: Tensor

    @classmethod
    def of(cls, ids: np.ndarray, ordinary: np.ndarray) -> Unigram:
        """Count the ids of a corpus; those that are not ``ordinary`` are left out."""
        counts = counts_below(int(ordinary.max()) + 1, ids)
        return cls(torch.from_numpy(ordinary), torch.from_numpy(counts[ordinary].cumsum().astype(np.float64)))

    def draw(self, uniform_N: Tensor) -> Tensor:
        """Tokens drawn in proportion to their counts: int64 (N,)."""
        return self.ordinary_W[_inverse(self.cumulative_W, uniform_N)]


def _inverse(cumulative: Tensor, uniform_N: Tensor) -> Tensor:
    """The first index whose cumulative weight, (W,) or (N, W), is above ``uniform`` times the total.

    The last index if there is none: rounding may lift the product to the total, and weights may not be finite.
    """
    wanted_N1 = uniform_N.to(cumulative.dtype)[:, None] * cumulative[..., -1:]
    found_N1 = torch.searchsorted(cumulative, wanted_N1, right=True)
    return found_N1[:, 0].clamp(max=cumulative.shape[-1] - 1)


def two_classes(logits_N: Tensor) -> Tensor:
    """One logit each, where above 0 means yes ("replaced" of a discriminator), as logits of no and yes: (N, 2).

    Their softmax is the sigmoid of the one logit, and their cross-entropy is the binary one.
    """
    return torch.stack([torch.zeros_like(logits_N), logits_N], dim=-1)
