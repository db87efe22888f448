"""How different two heads attend: the Jensen-Shannon distance of their rows.

Source: Clark et al. 2019, section 6, and their published code.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMOOTHING = 0.001
"""How much of the uniform distribution is mixed into each row."""


def head_distances(one_HQK: Tensor, other_HQK: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of every head of one map from every head of another, (H, H'), in nats.

    It is the mean over rows.  The published script sums them, which is this times the number of rows.

    Args:
        one_HQK, other_HQK: probabilities of two sets of heads on the same text, without padding among the keys.
    """
    keys = one_HQK.shape[-1]
    one, other = ((1 - SMOOTHING) * maps.double() + SMOOTHING / keys for maps in (one_HQK, other_HQK))
    distances = torch.empty(len(one), len(other), dtype=torch.float64, device=one.device)
    negative_entropies = [(maps * maps.log()).sum(-1) for maps in (one, other)]
    for head, rows_QK in enumerate(one):  # one head against all others, so that no (H, H, Q, K) is held
        middle = (rows_QK + other) / 2
        mixed = (middle * middle.log()).sum(-1)
        own = (negative_entropies[0][head] + negative_entropies[1]) / 2
        distances[head] = (own - mixed).mean(-1).clamp(min=0)
    return distances
