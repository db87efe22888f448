"""Guiding attention heads: which keys a query should look at, how that wish acts on a head, and on which heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guidance.checkpoint import load, save
    from guidance.errors import GuideError
    from guidance.installation import install
    from guidance.plan import Guide, Plan
    from guidance.trainer import GuidedTrainer

__all__ = ["Guide", "GuideError", "GuidedTrainer", "Plan", "install", "load", "save"]

_HOMES = {
    "Guide": "plan",
    "GuideError": "errors",
    "GuidedTrainer": "trainer",
    "Plan": "plan",
    "install": "installation",
    "load": "checkpoint",
    "save": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """What is imported only when somebody asks for it, since it brings torch and transformers along."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"guidance.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
