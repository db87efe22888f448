"""``logit_loss``: conflicts with mis-predictions (McMisP).

Where a prediction was wrong, attention to the tokens that usually stand beside the wrong token is pulled towards zero.

Source: Xing et al. 2020, *Focusing More on Conflicts with Mis-Predictions Helps Language Pre-Training*, equations 11 to
13.  For a mis-predicted position t with raw scores a (before softmax and mask) and weights S of its token with every key,

    g = a (1 - S),    L = 1/N  sum_t  ||a_t - stop(g_t)||^2,

so the value of a row is ``sum (a S)^2`` and its gradient ``2 a S``: the target does not move.  A negative score of a
frequent companion is pushed up; that is what the equation says.  Scores are products of queries and keys; what DeBERTa and
T5 add for positions is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.mechanisms.base import HeadInputs, Mechanism, PatternInputs
from guidance.patterns.features import Tokens
from guidance.patterns.predicates import Predicate


@dataclass(frozen=True)
class LogitLoss(Mechanism):
    """How rows, keys and heads add up.  The paper leaves it open, and the scale of the loss depends on it.

    Attributes:
        rows: the loss is divided by their number N: the mis-predictions whose token has weights (``in_vocabulary``), or all.
        key_reduction: the square of the vector, as the equation says (``sum``), or its mean over valid keys.
        head_reduction: mean over all guided heads of all layers, or their sum.
    """

    rows: Literal["in_vocabulary", "all"] = "in_vocabulary"
    key_reduction: Literal["sum", "mean"] = "sum"
    head_reduction: Literal["mean", "sum"] = "mean"

    summary = "pulls raw scores towards zero where a prediction was wrong and the pattern has weight"
    source = "Xing et al. 2020, eq. 11-13"
    needs = ("mispredicted",)

    def seen(self, tokens: Tokens) -> Tokens:
        """The tokens as the generator filled them in; masks and biases must not know what is under a masked token."""
        if "predicted" not in tokens.columns:
            return tokens
        return Tokens(tokens.column("predicted"), tokens.valid_BT, tokens.columns, tokens.tables)

    def prepare(self, inputs: PatternInputs) -> tuple[Rows, Tensor]:
        """The mis-predicted rows, and what the pattern gives to every key of theirs, (B, R, K)."""
        assert inputs.predicate is not None
        rows = Rows.of(inputs.queries)
        return rows, rows.weights_BRK(inputs.predicate)

    def num_matches(self, inputs: PatternInputs, prepared: Any) -> Tensor:
        """Counted over mis-predicted rows, so that the pattern is not written out for all others."""
        return (prepared[1] > 0).sum()

    def denominator(self, tokens: Tokens, pattern: Predicate | None) -> Tensor:
        """The number N of mis-predictions; see ``rows``."""
        in_vocabulary, every = mispredictions(tokens, pattern)
        return in_vocabulary if self.rows == "in_vocabulary" else every

    def row_losses(self, query_BhQD: Tensor, key_BhKD: Tensor, scale: float, inputs: HeadInputs) -> Tensor:
        rows, weights_BRK = inputs.prepared
        keys_valid_BK = inputs.pattern.keys.valid_BT
        loss_B = row_losses(query_BhQD, key_BhKD, scale, rows.places_BR, weights_BRK, self, keys_valid_BK)
        return loss_B / (inputs.num_guided if self.head_reduction == "mean" else 1)


def mispredictions(tokens: Tokens, pattern: Predicate | None) -> tuple[Tensor, Tensor]:
    """The number of mis-predictions that a pattern says anything about, and of all of them."""
    rows = Rows.of(tokens)
    assert pattern is not None
    return rows.in_vocabulary_BR(pattern).sum(), rows.real_BR.sum()


@dataclass(frozen=True)
class Rows:
    """The mis-predictions of a batch.

    Attributes:
        places_BR: their positions, padded to the same number in every example.
        real_BR: False where ``places_BR`` is padding.
    """

    places_BR: Tensor
    real_BR: Tensor

    @classmethod
    def of(cls, tokens: Tokens) -> Rows:
        """Raises InputError if the batch has no feature ``mispredicted``, or one that is not bool."""
        wrong_BT = tokens.column("mispredicted")
        if wrong_BT.dtype != torch.bool:
            raise InputError(f"mispredicted is {wrong_BT.dtype}, not bool")
        wrong_BT = wrong_BT & tokens.valid_BT
        most = int(wrong_BT.sum(-1).max()) if wrong_BT.numel() else 0
        places_BR = (~wrong_BT).long().argsort(dim=-1, stable=True)[:, :most]
        return cls(places_BR, wrong_BT.gather(1, places_BR))

    def in_vocabulary_BR(self, predicate: Predicate) -> Tensor:
        """Those that a pattern says anything about."""
        return self.real_BR & predicate.covers(self.places_BR)

    def weights_BRK(self, predicate: Predicate) -> Tensor:
        """The weight S of each with every key; 0 in padded rows and at padding."""
        return predicate.rows(self.places_BR) * self.real_BR.unsqueeze(-1)


def row_losses(
    query_BhQD: Tensor,
    key_BhKD: Tensor,
    scale: float,
    places_BR: Tensor,
    weights_BRK: Tensor,
    options: LogitLoss,
    valid_BT: Tensor,
) -> Tensor:
    """The loss of each example at one site, (B,), float32: summed over its rows and heads, not divided by N.

    Args:
        places_BR: the positions of the rows.
        weights_BRK: the weight of every key in these rows; see `Rows`.
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
