"""Mechanisms: how does a wish about keys act on a head?

Each is a dataclass of its options, in a module of its own, and one row in `MECHANISMS`, which says where it acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from guidance import options
from guidance.mechanisms.adversary import Adversary, RandomMask
from guidance.mechanisms.attention_loss import AttentionLoss
from guidance.mechanisms.fixed import Fix, Gaussian, Off
from guidance.mechanisms.gate import Gate
from guidance.mechanisms.logit_loss import LogitLoss
from guidance.mechanisms.masks import Bias, Mask

Place = Literal["probabilities", "scores", "mask", "bias", "replacement", "attack", "output"]
"""Where a mechanism acts: a loss on probabilities or on raw scores; a mask; a bias; in the place of the attention; in a
second forward pass; on the output of a head."""


@dataclass(frozen=True)
class Mechanism:
    """One row of `MECHANISMS`.

    Attributes:
        options: the dataclass that holds its options and does its work.
        place: where it acts.
        summary: what it does, in one line.
        source: paper, section, equation.
    """

    name: str
    options: type[Any]
    place: Place
    summary: str
    source: str

    @property
    def wants_pattern(self) -> bool:
        """It acts through a pattern, and a row without one is refused."""
        return self.place in ("probabilities", "scores", "mask", "bias") or self.options is Fix

    @property
    def is_loss(self) -> bool:
        """It is a term of the objective, with a weight and a schedule, and does nothing at inference."""
        return self.place in ("probabilities", "scores", "attack")

    @property
    def option_names(self) -> tuple[str, ...]:
        """Keys that its rows may have."""
        return tuple(options.declared(self.options))


_ASA = "Wu et al. 2023"

MECHANISMS: Mapping[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism(
            "attention_loss",
            AttentionLoss,
            "probabilities",
            "pulls the probabilities of heads to the pattern",
            "Deshpande & Narasimhan 2020, eq. 2-4",
        ),
        Mechanism(
            "logit_loss",
            LogitLoss,
            "scores",
            "pulls raw scores towards zero where a prediction was wrong and the pattern has weight",
            "Xing et al. 2020, eq. 11-13",
        ),
        Mechanism(
            "mask",
            Mask,
            "mask",
            "lets heads see nothing but the pattern",
            "Wang et al. 2020, eq. 2; Li et al. 2022, eq. 3",
        ),
        Mechanism(
            "bias",
            Bias,
            "bias",
            "makes keys of the pattern count more, or the others less",
            "Li et al. 2022, eq. 3, softened",
        ),
        Mechanism(
            "fix", Fix, "replacement", "puts the pattern in the place of the head's attention", "Li et al. 2022, eq. 6"
        ),
        Mechanism(
            "gaussian",
            Gaussian,
            "replacement",
            "puts a bell curve over neighbours in the place of the head's attention",
            "You et al. 2020, hard-coded Gaussian attention",
        ),
        Mechanism("off", Off, "replacement", "switches heads off, as head_mask did", "Michel et al. 2019"),
        Mechanism(
            "gate",
            Gate,
            "output",
            "multiplies heads by a learned factor between 0 and 2",
            "Wang et al. 2020, section 3",
        ),
        Mechanism(
            "adversary", Adversary, "attack", "a learned mask attacks the model in a second pass", f"{_ASA}, eq. 6-10"
        ),
        Mechanism(
            "random_mask",
            RandomMask,
            "attack",
            "a random mask, or that of the highest scores, in a second pass",
            f"{_ASA}, table 3",
        ),
    )
}
"""Every mechanism by name."""
