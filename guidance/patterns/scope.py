"""The scope of attention: which keys each query of one call may see at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionScope:
    """What padding, causality and a sliding window leave to the queries of one call.

    All layers that get the same mask share one scope, and what is computed from it.

    Attributes:
        allowed_BQK: bool, True where a query may see a key.
        is_causal: later keys are among those that it hides.
        hides_padding_only: it hides nothing but padding.
    """

    allowed_BQK: Tensor
    is_causal: bool
    hides_padding_only: bool

    def empty_B1Q1(self) -> Tensor:
        """The queries that may see no key at all, bool."""
        return ~self.allowed_BQK.any(-1)[:, None, :, None]


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to be added to scores: 0 where it is True, minus infinity elsewhere.

    ``scaled_dot_product_attention`` does the same with a boolean mask, anew in each layer, and keeps every copy for the
    backward pass.
    """
    numbers = torch.tensor([0.0, -torch.inf], dtype=dtype, device=allowed.device)
    return torch.where(allowed, numbers[0], numbers[1])  # one pass over memory
