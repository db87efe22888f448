"""``adversary``: adversarial self-attention, a learned mask that removes the keys on which a model relies most.

Source: Wu et al. 2023, *Adversarial Self-Attention for Language Understanding*, equations 6 to 9, as their published code
does it.  In every layer two linear maps read h, the input of the attention module, detached.  (In layers that normalise
first, such as ModernBERT's and T5's, h is the normalised input.)

    u = (h Wq + bq)(h Wk + bk)^T / sqrt(d),    m = 1[u > 0],    scores + (1 - m) (-10000).

The gradient passes the threshold as that of a sigmoid and is reversed there, so one backward pass trains the model to resist
and the adversary to attack.  The constant 10000 is part of the method: the adversary's gradient is 10000 times that of a
score.  A key that is off has probability 0 and gets no gradient, so only the penalty can bring it back; with minus infinity
there would be no gradient at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from guidance.mechanisms.attacks import AttackMechanism, Sentence, uniform_numbers
from guidance.mechanisms.base import Attack, HeadInputs
from guidance.options import Within


@dataclass(frozen=True)
class Adversary(AttackMechanism):
    """The learned attack.

    Attributes:
        tau: the root of what hiding a unit costs the adversary; lower values attack harder.  The paper fine-tunes with 0.3 and
            pre-trains with 0.1.
        penalty_weight: the weight of the penalty, which counts units that are left on and whose gradient is reversed: what hiding one
            costs.  By default the square of tau, as in the published code.
        noise: ``gumbel`` adds the noise at the threshold that the paper describes and the code cancels.
        per_head: each head has its own mask, instead of one for all.
        normalise: the penalty is the share of units left on, instead of their number.  Units of padding count in neither;
            the published code counts padding rows in the number.
        init_bias: entries of both bias vectors at the start; above 0 the attack begins gently.
        sentence: see `AttackMechanism`.
        train: false leaves the adversary as it was drawn: a control, whose masks have structure and no knowledge.
    """

    tau: Annotated[float, Within(0, 100)] = 0.3
    penalty_weight: Annotated[float, Within(0, 1e6)] | None = None
    noise: Literal["none", "gumbel"] = "none"
    per_head: bool = False
    normalise: bool = False
    init_bias: Annotated[float, Within(-100, 100)] = 0.0
    sentence: Sentence = "hidden"
    train: bool = True

    summary = "a learned mask attacks the model in a second pass"
    source = "Wu et al. 2023, eq. 6-10"
    needs_layer_input = True

    def module(self, num_heads: int, width: int) -> nn.Module:
        return AdversaryWeights(self, num_heads, width).requires_grad_(self.train)

    def attack(self, scores_BhQK: Tensor, inputs: HeadInputs) -> Attack:
        assert inputs.parameters is not None and inputs.layer_input_BTd is not None and inputs.seeds_B is not None
        units = inputs.parameters(inputs.layer_input_BTd.detach())
        if self.noise == "gumbel":
            uniform = uniform_numbers(inputs.seeds_B, *units.shape[1:]).clamp(1e-6, 1 - 1e-6)
            units = units + torch.logit(uniform)  # the difference of two Gumbel draws
        return Attack.of(ReversedThreshold.apply(units), inputs)

    def penalty_B(self, attack: Attack) -> Tensor:
        weight = self.tau**2 if self.penalty_weight is None else self.penalty_weight
        return weight * (attack.kept_B / attack.units_B.clamp(min=1) if self.normalise else attack.kept_B)


class AdversaryWeights(nn.Module):
    """The two maps of one layer; they start from N(0, 0.02)."""

    def __init__(self, options: Adversary, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_maps = num_heads if options.per_head else 1
        self.head_size = max(1, width // self.num_maps)  # of 3 heads of 16 each has 5
        self.query, self.key = (nn.Linear(width, self.num_maps * self.head_size) for _ in range(2))
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.constant_(linear.bias, options.init_bias)

    def forward(self, states_BTd: Tensor) -> Tensor:
        """The units before the threshold, (B, 1 or heads, Q, K)."""
        query, key = (
            linear(states_BTd).unflatten(-1, (self.num_maps, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key)
        )
        return (query * self.head_size**-0.5) @ key.transpose(-1, -2)


class ReversedThreshold(torch.autograd.Function):
    """1 where u > 0, else 0; the gradient is that of a sigmoid, with the opposite sign."""

    @staticmethod
    def forward(ctx: Any, units: Tensor) -> Tensor:
        ctx.save_for_backward(units)
        return (units > 0).to(torch.promote_types(units.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (units,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(units.to(grads[0].dtype))
        return (-grads[0] * sigmoid * (1 - sigmoid)).to(units.dtype)
