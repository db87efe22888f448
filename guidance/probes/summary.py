"""The numbers that probes take from attention: one function of one layer's maps, after which the maps are forgotten.

This is the seam for a backend that computes the same numbers without writing the maps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from guidance.probes.relevance import masses


@dataclass(frozen=True)
class Summary:
    """What one layer's heads do on a batch, from probabilities before dropout.

    Attributes:
        masses_BHP: the mean attention of valid queries on the keys of each pattern, from 0 to 1.
        entropy_BHQ: of each row, in nats; 0 for padding.
        highest_BHQ: the most attention that a key gets; 0 for padding.
        offsets_BHO: the mean attention of valid queries at each distance from -reach to +reach.
    """

    masses_BHP: Tensor
    entropy_BHQ: Tensor
    highest_BHQ: Tensor
    offsets_BHO: Tensor


def summarise(attention_BHQK: Tensor, patterns_BPQK: Tensor, valid_BT: Tensor, *, reach: int = 0) -> Summary:
    """The numbers of one layer.

    Args:
        patterns_BPQK: the keys of each pattern, float; may have no pattern, (B, 0, Q, K).
        valid_BT: bool, which tokens are no padding.
        reach: the largest distance of ``offsets_BHO``.
    """
    attention = attention_BHQK.float() * valid_BT[:, None, :, None]
    lengths_B1 = valid_BT.sum(-1, keepdim=True).clamp(min=1)
    diagonals = [attention.diagonal(offset, -2, -1).sum(-1) for offset in range(-reach, reach + 1)]
    return Summary(
        masses(attention, patterns_BPQK, valid_BT),
        -torch.special.xlogy(attention, attention).sum(-1),
        attention.amax(-1),
        torch.stack(diagonals, dim=-1) / lengths_B1[:, None],
    )
