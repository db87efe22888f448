"""Mechanisms: how does a pattern act on a head?  One file each, which owns all that the mechanism contributes."""

from __future__ import annotations

from dataclasses import is_dataclass

from guidance.errors import PlanError
from guidance.mechanisms.adversary import Adversary
from guidance.mechanisms.attention_loss import AttentionLoss
from guidance.mechanisms.base import Mechanism
from guidance.mechanisms.fixed import Fix, Gaussian, Off
from guidance.mechanisms.gate import Gate
from guidance.mechanisms.logit_loss import LogitLoss
from guidance.mechanisms.masks import Bias, Mask
from guidance.mechanisms.mix import Mix
from guidance.mechanisms.random_mask import RandomMask
from guidance.registry import Registry

MECHANISMS: Registry[type[Mechanism]] = Registry("mechanism")
"""Every mechanism by name."""

for _name, _mechanism in {
    "attention_loss": AttentionLoss,
    "logit_loss": LogitLoss,
    "mask": Mask,
    "bias": Bias,
    "fix": Fix,
    "gaussian": Gaussian,
    "off": Off,
    "gate": Gate,
    "mix": Mix,
    "adversary": Adversary,
    "random_mask": RandomMask,
}.items():
    MECHANISMS.add(_name, _mechanism)


def register_mechanism(name: str, mechanism: type[Mechanism], *, package: str = "") -> type[Mechanism]:
    """Add a mechanism, so that plans can name it.

    Args:
        mechanism: a frozen dataclass of its options, derived from `Mechanism`, that makes at least one contribution.
        package: the package that registers it, which plans then name; by default the one that defines the class.

    Raises:
        PlanError: the name is taken, or the class is no mechanism.
    """
    if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism) and is_dataclass(mechanism)):
        raise PlanError(f"{mechanism!r} is no mechanism", hint="a frozen dataclass derived from guidance.Mechanism")
    if not mechanism.contributes:
        raise PlanError(
            f"the mechanism {name!r} contributes nothing", hint="it overrides a method such as keys or edit_scores"
        )
    return MECHANISMS.add(name, mechanism, package or mechanism.__module__)
