"""``mask`` and ``bias``: a pattern decides which keys a head may see, or how much more it looks at some of them.

Sources: Wang et al. 2020, *Multi-Head Self-Attention with Role-Guided Masks*, equation 2; Li et al. 2022, *Human Guided
Exploitation of Interpretable Attention Patterns*, equation 3.  Both write additive masks of 0 and minus infinity.  Here
masks stay boolean and are ANDed with the padding mask; a query that they would leave without any key sees all valid keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from guidance.errors import PlanError
from guidance.mechanisms.base import HeadInputs, Mechanism, PatternInputs
from guidance.options import Within
from guidance.patterns.pattern import Pattern


@dataclass(frozen=True)
class Mask(Mechanism):
    """A head sees only the keys of its pattern.

    Attributes:
        scale: what scores are divided by: the root of the head's width (``d_k``), or of the model's (``d_model``), which the
            published code of role-guided masks does in its guided model only.  With ``d_model``, scores become those of the
            model divided by the root of the number of heads, also in models that do not divide by ``d_k`` (T5).
    """

    scale: Literal["d_k", "d_model"] = "d_k"

    summary = "lets heads see nothing but the pattern"
    source = "Wang et al. 2020, eq. 2; Li et al. 2022, eq. 3"
    takes_weights = False

    def is_idle(self, pattern: Pattern | None) -> bool:
        return pattern is not None and pattern.name == "all" and self.scale == "d_k"

    def query_factor(self, num_heads: int) -> float:
        return num_heads**-0.5 if self.scale == "d_model" else 1.0

    def prepare(self, inputs: PatternInputs) -> Tensor:
        assert inputs.predicate is not None
        return inputs.predicate.dense()

    def num_matches(self, inputs: PatternInputs, prepared: Any) -> Tensor:
        keys: Tensor = prepared
        return keys.count_nonzero()

    def keys(self, prepared: Any) -> Tensor:
        keys: Tensor = prepared
        return keys


@dataclass(frozen=True)
class Bias(Mechanism):
    """A soft mask: attention to a key is multiplied by a factor before it is normalised.

    Attributes:
        inside, outside: the factors of keys that the pattern names, and of the others.  A weight between 0 and 1 gives a
            factor between them; weights above 1 count as 1.
        learn: each head learns how strong its bias is: the logarithms of the factors times one number, 1 at first.
    """

    inside: Annotated[float, Within(1e-30, 1e30)] = 1.0
    outside: Annotated[float, Within(1e-30, 1e30)] = 0.01
    learn: bool = False

    summary = "makes keys of the pattern count more, or the others less"
    source = "Li et al. 2022, eq. 3, softened"
    decays = False

    def __post_init__(self) -> None:
        if self.inside == self.outside:
            raise PlanError("inside and outside are equal, so the bias would change nothing")

    @property
    def learns(self) -> bool:
        return self.learn

    @property
    def explanation(self) -> str:
        return (
            "each head learns how strong its bias is: the logarithms of inside and outside times a number, 1 at first"
            if self.learn
            else ""
        )

    def module(self, num_heads: int, width: int) -> nn.Module | None:
        return BiasWeights(num_heads) if self.learn else None

    def prepare(self, inputs: PatternInputs) -> Tensor:
        """What is added to the scores: float32 (B, Q, K)."""
        assert inputs.predicate is not None
        dense = inputs.predicate.dense()
        if dense.dtype == torch.bool:
            return torch.where(dense, math.log(self.inside), math.log(self.outside))
        # lerp is exact at both ends: the smaller factor never becomes 0, and its logarithm stays finite
        ends = dense.new_tensor([self.outside, self.inside])
        return torch.lerp(ends[0], ends[1], dense.clamp(max=1)).log()

    def edit_scores(self, scores_BhQK: Tensor, inputs: HeadInputs) -> Tensor:
        bias: Tensor = inputs.prepared[:, None]
        return scores_BhQK + (bias if inputs.parameters is None else inputs.parameters(bias))


class BiasWeights(nn.Module):
    """How strong the bias of each head of one site is."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))

    def forward(self, bias_B1QK: Tensor) -> Tensor:
        """The bias of each head: (B, h, Q, K)."""
        return self.weight[:, None, None] * bias_B1QK


def joined(keep_BQK: Tensor, allowed_BQK: Tensor) -> Tensor:
    """The keys that a head may see: those that its masks leave, and all that are allowed for a query to which they leave none."""
    return keep_BQK | (allowed_BQK & ~keep_BQK.any(-1, keepdim=True))  # onnxruntime has no choice between booleans


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to be added to scores: 0 where it is True, minus infinity elsewhere.

    ``scaled_dot_product_attention`` does the same with a boolean mask, anew in each layer, and keeps every copy for the
    backward pass.
    """
    numbers = torch.tensor([0.0, -torch.inf], dtype=dtype, device=allowed.device)
    return torch.where(allowed, numbers[0], numbers[1])  # one pass over memory
