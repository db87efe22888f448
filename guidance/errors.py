"""Expected failures.  A message says what was expected, what was found and what to do next.

GuideError
├── InputError        what the user gave is wrong: usage, configuration, data, a plan, an artifact
│   ├── PlanError             a plan that cannot be read or does not fit the model
│   ├── UnknownName           a name that is not registered; the message suggests the nearest
│   ├── UnsupportedModel      a model whose attention cannot be guided
│   └── GuidanceHadNoEffect   a guide that reached no head, or matched nothing
├── MachineError      the machine cannot do it: space, permission, lock, device, a missing extra
├── NumericalError    a loss, gradient or statistic is not finite
├── GateFailed        a limit that the user set was not met
└── Interrupted       work stopped early on request; what was done is saved

Only the command line turns these into exit codes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GuideError(Exception):
    """An expected failure; any other exception that escapes is a bug in this package."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(GuideError):
    """What the user gave is wrong."""


class PlanError(InputError):
    """A plan cannot be read, or does not fit the model."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the nearest known name, or an empty string if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def counted(number: int, one: str, many: str = "", *, of: str = "") -> str:
    """A number with what it counts, such as ``1 text was``, ``2,000 texts were`` or ``1 of 2,000 texts was``.

    Args:
        one: the words after 1.
        many: those after any other number; by default ``one`` with an s.
        of: all that the number is a part of, such as ``2,000 texts``.
    """
    part = f"{number:,} of {of}" if of else f"{number:,}"
    return f"{part} {one if number == 1 else many or one + 's'}"


def reason_of(error: Exception) -> str:
    """Why Python refused a value, in the words of Python; in fewer where an integer has too many digits."""
    return "a number has too many digits" if "integer string conversion" in str(error) else str(error)


class UnknownName(InputError):
    """A name is not registered.

    Attributes:
        name: the name that was given.
    """

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.name, known = name, sorted(known)
        guess = did_you_mean(name, known) or "."
        super().__init__(f"unknown {what} {name!r}{guess}", hint=f"known: {', '.join(known)}" if known else None)


class UnsupportedModel(InputError):
    """The attention of this model cannot be guided."""


class GuidanceHadNoEffect(InputError):
    """A guide reached no head, or its pattern matched nothing."""


class MachineError(GuideError):
    """The machine cannot do what was asked: space, permission, lock, device, or a missing extra."""


class NumericalError(GuideError):
    """A loss, a gradient or a statistic is not finite."""


class GateFailed(GuideError):
    """A limit that the user set was not met."""


class Interrupted(GuideError):
    """Work stopped early on request; what was done is saved and the same command continues."""

    def __init__(self, message: str, *, signal_number: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.signal_number = signal_number
