"""``random_mask``: the naive masks with which adversarial self-attention is compared.

The same second pass as an adversary's, but nothing is learned.  Source: Wu et al. 2023, table 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.mechanisms.attacks import AttackMechanism, Sentence, uniform_numbers
from guidance.mechanisms.base import Attack, HeadInputs
from guidance.options import Share

PROPORTIONS = "masking_proportion"
"""The table of the shares of units that an adversary switched off: (steps, layers)."""


@dataclass(frozen=True)
class RandomMask(AttackMechanism):
    """The naive attacks, with one mask for all heads.

    Attributes:
        kind: ``bernoulli`` switches every unit off with the same probability; ``scheduled`` with the one that an adversary
            had at that step and layer (table ``masking_proportion``); ``magnitude`` switches the highest scores off.
        proportion: the probability, or for ``magnitude`` the share of every row, rounded down.
        sentence: see `AttackMechanism`.
    """

    kind: Literal["bernoulli", "scheduled", "magnitude"] = "bernoulli"
    proportion: Share = 0.1
    sentence: Sentence = "hidden"

    summary = "a random mask, or that of the highest scores, in a second pass"
    source = "Wu et al. 2023, table 3"

    @property
    def tables(self) -> tuple[str, ...]:
        return (PROPORTIONS,) if self.kind == "scheduled" else ()

    def attack(self, scores_BhQK: Tensor, inputs: HeadInputs) -> Attack:
        """The attack that switches off a share of the units; every row keeps at least one key."""
        assert inputs.seeds_B is not None
        proportion, allowed_B1QK = self._proportion_at(inputs), inputs.scope.allowed_BQK[:, None]
        if self.kind == "magnitude":
            # half precision would make many means equal
            order = scores_BhQK.detach().float().mean(1, keepdim=True).masked_fill(~allowed_B1QK, -torch.inf)
            rank = order.argsort(stable=True, dim=-1, descending=True).argsort(-1)
            # for rows of 0, 1, 2, ... keys; the small sum keeps 0.29 of 100 keys at 29
            shares = [min(math.floor(proportion * n + 1e-9), max(n - 1, 0)) for n in range(order.shape[-1] + 1)]
            off = rank < torch.tensor(shares, device=order.device)[allowed_B1QK.sum(-1, keepdim=True)]
        else:
            order = uniform_numbers(inputs.seeds_B, *allowed_B1QK.shape[1:]).masked_fill(~allowed_B1QK, -torch.inf)
            # the numbers are uniform, so the unit of the highest is as good a choice to keep as any
            off = (order < proportion) & (order < order.amax(-1, keepdim=True))
        return Attack.of((~off).float(), inputs)

    def _proportion_at(self, inputs: HeadInputs) -> float:
        """The share of units that is switched off at this step and layer."""
        proportion = self.proportion
        if self.kind == "scheduled":
            table = torch.as_tensor(inputs.tables[PROPORTIONS])
            proportion = float(table[min(inputs.step, len(table) - 1), inputs.layer])
        if not 0 <= proportion <= 1:
            raise InputError(f"a proportion of {proportion} of the units cannot be switched off", hint="from 0 to 1")
        return proportion
