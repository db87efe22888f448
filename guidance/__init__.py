"""Guide attention heads: which keys should a query look at, how does that act on a head, and on which heads."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guidance.attention.backends import register_backend as register_backend
    from guidance.batch import BatchGuidance as BatchGuidance
    from guidance.checkpoint import load as load
    from guidance.checkpoint import save as save
    from guidance.collator import FeatureCollator as FeatureCollator
    from guidance.errors import GuidanceHadNoEffect as GuidanceHadNoEffect
    from guidance.errors import GuideError as GuideError
    from guidance.errors import InputError as InputError
    from guidance.errors import MachineError as MachineError
    from guidance.errors import NumericalError as NumericalError
    from guidance.errors import PlanError as PlanError
    from guidance.errors import UnknownName as UnknownName
    from guidance.errors import UnsupportedModel as UnsupportedModel
    from guidance.guide import Guide as Guide
    from guidance.installation import Handle as Handle
    from guidance.installation import install as install
    from guidance.measures import attention_loss as attention_loss
    from guidance.measures import logit_loss as logit_loss
    from guidance.measures import pattern as pattern
    from guidance.mechanisms import register_mechanism as register_mechanism
    from guidance.mechanisms.attacks import AttackMechanism as AttackMechanism
    from guidance.mechanisms.base import Mechanism as Mechanism
    from guidance.models.added_heads import Pal as Pal
    from guidance.models.families import register_family as register_family
    from guidance.options import Within as Within
    from guidance.patterns import Columns as Columns
    from guidance.patterns import Pairs as Pairs
    from guidance.patterns import Predicate as Predicate
    from guidance.patterns import Rule as Rule
    from guidance.patterns import Shift as Shift
    from guidance.patterns import Weights as Weights
    from guidance.patterns import register_pattern as register_pattern
    from guidance.patterns.features import RELATIONS as RELATIONS
    from guidance.patterns.features import UPOS as UPOS
    from guidance.patterns.features import Cooccurrence as Cooccurrence
    from guidance.patterns.features import Tokens as Tokens
    from guidance.patterns.features import register_feature as register_feature
    from guidance.plan import Plan as Plan
    from guidance.prompts import encode_prompts as encode_prompts
    from guidance.sites import Site as Site
    from guidance.statistics.texts import Word as Word
    from guidance.statistics.texts import word_features as word_features
    from guidance.trainer import GuidedTrainer as GuidedTrainer

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
    "guide": ("Guide",),
    "plan": ("Plan",),
    "prompts": ("encode_prompts",),
    "sites": ("Site",),
    "statistics.texts": ("Word", "word_features"),
    "trainer": ("GuidedTrainer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


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
