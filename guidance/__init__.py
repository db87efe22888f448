"""Guide attention heads: which keys should a query look at, how does that act on a head, and on which heads."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guidance.attention.backends import register_backend
    from guidance.batch import BatchGuidance
    from guidance.checkpoint import load, save
    from guidance.collator import FeatureCollator
    from guidance.errors import (
        GuidanceHadNoEffect,
        GuideError,
        InputError,
        MachineError,
        NumericalError,
        PlanError,
        UnknownName,
        UnsupportedModel,
    )
    from guidance.installation import Handle, install
    from guidance.measures import attention_loss, logit_loss, pattern
    from guidance.mechanisms import register_mechanism
    from guidance.mechanisms.attacks import AttackMechanism
    from guidance.mechanisms.base import Mechanism
    from guidance.models.added_heads import Pal
    from guidance.models.families import register_family
    from guidance.options import Within
    from guidance.patterns import Columns, Pairs, Predicate, Rule, Shift, Weights, register_pattern
    from guidance.patterns.features import RELATIONS, UPOS, Cooccurrence, Tokens, register_feature
    from guidance.plan import Guide, Plan
    from guidance.sites import Site
    from guidance.statistics.texts import Word, word_features
    from guidance.trainer import GuidedTrainer

_HOMES = {
    "attention.backends": ("register_backend",),
    "batch": ("BatchGuidance",),
    "checkpoint": ("load", "save"),
    "collator": ("FeatureCollator",),
    "errors": (
        "GuidanceHadNoEffect",
        "GuideError",
        "InputError",
        "MachineError",
        "NumericalError",
        "PlanError",
        "UnknownName",
        "UnsupportedModel",
    ),
    "installation": ("Handle", "install"),
    "measures": ("attention_loss", "logit_loss", "pattern"),
    "mechanisms": ("register_mechanism",),
    "mechanisms.attacks": ("AttackMechanism",),
    "mechanisms.base": ("Mechanism",),
    "models.added_heads": ("Pal",),
    "models.families": ("register_family",),
    "options": ("Within",),
    "patterns": ("Columns", "Pairs", "Predicate", "Rule", "Shift", "Weights", "register_pattern"),
    "patterns.features": ("RELATIONS", "UPOS", "Cooccurrence", "Tokens", "register_feature"),
    "plan": ("Guide", "Plan"),
    "sites": ("Site",),
    "statistics.texts": ("Word", "word_features"),
    "trainer": ("GuidedTrainer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "RELATIONS",
    "UPOS",
    "AttackMechanism",
    "BatchGuidance",
    "Columns",
    "Cooccurrence",
    "FeatureCollator",
    "GuidanceHadNoEffect",
    "Guide",
    "GuideError",
    "GuidedTrainer",
    "Handle",
    "InputError",
    "MachineError",
    "Mechanism",
    "NumericalError",
    "Pairs",
    "Pal",
    "Plan",
    "PlanError",
    "Predicate",
    "Rule",
    "Shift",
    "Site",
    "Tokens",
    "UnknownName",
    "UnsupportedModel",
    "Weights",
    "Within",
    "Word",
    "attention_loss",
    "install",
    "load",
    "logit_loss",
    "pattern",
    "register_backend",
    "register_family",
    "register_feature",
    "register_mechanism",
    "register_pattern",
    "save",
    "word_features",
]


class _Public:
    """A public name, imported when it is asked for: most of them bring torch and transformers along.

    In the class of the module and not in ``__getattr__``, which is asked last: nnsight gives every object a method ``save``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return getattr(import_module(f"guidance.{_HOME_OF[self.name]}"), self.name)


sys.modules[__name__].__class__ = type("Module", (ModuleType,), {name: _Public(name) for name in _HOME_OF})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
