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
from guidance.mechanisms.base import HeadInputs
from guidance.mechanisms.results import Attack
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

    def proportion_at(self, inputs: HeadInputs) -> float:
        """The share of units that is switched off at this step and layer."""
        found = self.proportion
        if self.kind == "scheduled":
            table = torch.as_tensor(inputs.tables[PROPORTIONS])
            found = float(table[min(inputs.step, len(table) - 1), inputs.layer])
        if not 0 <= found <= 1:
            raise InputError(f"a proportion of {found} of the units cannot be switched off", hint="from 0 to 1")
        return found

    def attack(self, scores_BhQK: Tensor, inputs: HeadInputs) -> Attack:
        assert inputs.seeds_B is not None
        allowed_B1QK, queries_BQ = inputs.scope.allowed_BQK[:, None], inputs.pattern.queries.valid_BT
        return self.attack_with(scores_BhQK, allowed_B1QK, queries_BQ, inputs.seeds_B, self.proportion_at(inputs))

    def attack_with(
        self, scores_BhQK: Tensor, allowed_B1QK: Tensor, queries_BQ: Tensor, seeds_B: Tensor, proportion: float
    ) -> Attack:
        """The attack that switches off a share of the units; every row keeps at least one key.

        Args:
            queries_BQ: the valid queries.
            seeds_B: see `guidance.mechanisms.attacks.uniform_numbers`.
        """
        if self.kind == "magnitude":
            order = scores_BhQK.detach().mean(1, keepdim=True)
        else:
            order = uniform_numbers(seeds_B, *allowed_B1QK.shape[1:])
        order = order.masked_fill(~allowed_B1QK, -torch.inf)
        if self.kind == "magnitude":
            rank = order.argsort(-1, descending=True).argsort(-1)
            # for rows of 0, 1, 2, ... keys; the small sum keeps 0.29 of 100 keys at 29
            shares = [min(math.floor(proportion * n + 1e-9), max(n - 1, 0)) for n in range(order.shape[-1] + 1)]
            off = rank < torch.tensor(shares, device=order.device)[allowed_B1QK.sum(-1, keepdim=True)]
        else:
            # the numbers are uniform, so the unit of the highest is as good a choice to keep as any
            off = (order < proportion) & (order < order.amax(-1, keepdim=True))
        return Attack.of((~off).float(), allowed_B1QK, queries_BQ)
