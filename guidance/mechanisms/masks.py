"""Masks and biases: a pattern decides which keys a head may look at, or how much more it looks at some of them.

Sources: Wang et al. 2020, *Multi-Head Self-Attention with Role-Guided Masks*, equation 2; Li et al. 2022, *Human Guided
Exploitation of Interpretable Attention Patterns*, equation 3.  Both write additive masks of 0 and minus infinity; here
they stay booleans, are joined with the padding mask, and a query that would be left without any key keeps all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from guidance.errors import PlanError
from guidance.options import Within
from guidance.patterns.catalogue import Predicate


@dataclass(frozen=True)
class Mask:
    """A head sees only the keys of its pattern.

    Attributes:
        scale: by which root the scores are divided: that of the head's width (``d_k``), or that of the model's
            (``d_model``), as the published code of role-guided masks does in its guided model alone.  Where a model does not
            divide by the first (T5), the second is what it does, over the root of the number of heads.
    """

    scale: Literal["d_k", "d_model"] = "d_k"


@dataclass(frozen=True)
class Bias:
    """A soft mask: attention to a key is multiplied by a factor before it is normalised.

    Attributes:
        inside, outside: the factors of keys that the pattern names, and of the others; a weighted pattern lies between,
            where weights above 1 count as 1.
    """

    inside: Annotated[float, Within(1e-30, 1e30)] = 1.0
    outside: Annotated[float, Within(1e-30, 1e30)] = 0.01

    def __post_init__(self) -> None:
        if self.inside == self.outside:
            raise PlanError("inside and outside are equal, so that the bias changes nothing")

    def scores(self, predicate: Predicate) -> Tensor:
        """What is added to the scores: float32 (B, Q, K)."""
        dense = predicate.dense()
        if dense.dtype == torch.bool:
            return torch.where(dense, math.log(self.inside), math.log(self.outside))
        # exact at both ends, so that the smaller factor, however small, never becomes 0 and its logarithm infinite
        ends = dense.new_tensor([self.outside, self.inside])
        return torch.lerp(ends[0], ends[1], dense.clamp(max=1)).log()


def joined(wishes_BQK: list[Tensor], allowed_BQK: Tensor) -> Tensor:
    """Several masks on one head, joined with what its queries may see at all; a row that is left empty is given back."""
    keep = allowed_BQK
    for wish in wishes_BQK:
        keep = keep & wish
    return keep | (allowed_BQK & ~keep.any(-1, keepdim=True))
