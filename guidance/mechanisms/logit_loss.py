"""Conflicts with mis-predictions (McMisP): where a prediction was wrong, attention to what usually stands beside the wrong
token is pulled towards zero.

Source: Xing et al. 2020, *Focusing More on Conflicts with Mis-Predictions Helps Language Pre-Training*, equations 11 to
13.  For a mis-predicted position t with raw scores a (before softmax and mask) and weights S of its token with every key,

    g = a (1 - S),    L = 1/N  sum_t  ||a_t - stop(g_t)||^2,

so the value of a row is ``sum (a S)^2`` and its gradient ``2 a S``: the target does not move.  A negative score of a
frequent companion is pushed up; that is what the equation says.  Scores are products of queries and keys; what DeBERTa and
T5 add for positions is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.patterns.catalogue import Predicate
from guidance.patterns.features import Tokens


@dataclass(frozen=True)
class LogitLoss:
    """How rows, keys and heads add up; the paper leaves it open, and the scale of the loss depends on it.

    Attributes:
        rows: whose number N the loss is divided by: mis-predictions whose token has weights (``in_vocabulary``), or all.
        key_reduction: the square of the vector, as written (``sum``), or its mean over valid keys.
        head_reduction: mean over all guided heads of all layers, or their sum.
    """

    rows: Literal["in_vocabulary", "all"] = "in_vocabulary"
    key_reduction: Literal["sum", "mean"] = "sum"
    head_reduction: Literal["mean", "sum"] = "mean"


@dataclass(frozen=True)
class Rows:
    """The mis-predictions of a batch, whatever a pattern says about them.

    Attributes:
        places_BR: their positions, padded.
        real_BR: which of these are no padding.
    """

    places_BR: Tensor
    real_BR: Tensor

    @classmethod
    def of(cls, tokens: Tokens) -> Rows:
        """Raises InputError when a batch does not say where predictions were wrong."""
        wrong_BT = tokens.column("mispredicted")
        if wrong_BT.dtype != torch.bool:
            raise InputError(f"mispredicted is {wrong_BT.dtype}, not bool")
        wrong_BT = wrong_BT & tokens.valid_BT
        most = int(wrong_BT.sum(-1).max()) if wrong_BT.numel() else 0
        places_BR = (~wrong_BT).long().argsort(dim=-1, stable=True)[:, :most]
        return cls(places_BR, wrong_BT.gather(1, places_BR))

    def in_vocabulary_BR(self, predicate: Predicate) -> Tensor:
        """Which of them a pattern says anything about."""
        return self.real_BR & predicate.speaks_at(self.places_BR)

    def weights_BRK(self, predicate: Predicate) -> Tensor:
        """S of each with every key; 0 in padded rows, and at padding."""
        return predicate.at(self.places_BR) * self.real_BR.unsqueeze(-1)


def row_losses(
    query_BhQD: Tensor,
    key_BhKD: Tensor,
    scale: float,
    places_BR: Tensor,
    weights_BRK: Tensor,
    options: LogitLoss,
    valid_BT: Tensor,
) -> Tensor:
    """The loss of each example at one site, (B,), float32, summed over its rows and heads; N is not applied.

    Args:
        places_BR: the positions of the rows, and ``weights_BRK`` what they give to every key: see `Rows`.
    """
    index = places_BR[:, None, :, None].expand(-1, query_BhQD.shape[1], -1, query_BhQD.shape[3])
    with torch.autocast(query_BhQD.device.type, enabled=False):
        dtype = torch.promote_types(query_BhQD.dtype, torch.float32)
        scores_BhRK = (query_BhQD.gather(2, index).to(dtype) * scale) @ key_BhKD.to(dtype).transpose(-1, -2)
        weights = weights_BRK[:, None].to(dtype)
        distances = (scores_BhRK - (scores_BhRK * (1 - weights)).detach()).square().sum(-1)
        if options.key_reduction == "mean":
            distances = distances / valid_BT.sum(-1).clamp(min=1)[:, None, None]
        return distances.sum((1, 2))
