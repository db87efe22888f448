"""Options: the keyword arguments of patterns and mechanisms, as a plan writes them, checked by their annotations.

A function or dataclass declares its options as annotated keyword parameters with defaults.  What a plan may write, what
`guide patterns list` prints and what is refused all follow from these declarations.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from guidance.errors import PlanError, UnknownName, did_you_mean


@dataclass(frozen=True)
class Within:
    """The range of a number, both ends included, for use in ``Annotated``."""

    least: float = -math.inf
    most: float = math.inf

    def check(self, name: str, value: float) -> None:
        """Raises PlanError if the value is outside the range."""
        if not self.least <= value <= self.most:
            raise PlanError(f"{name} = {value!r} is not between {self.least:g} and {self.most:g}")


MOST_DIGITS = 15
"""Of a whole number in a plan: more than anything has, and few enough for exact sums of 64 bits."""


def check_digits(name: str, value: Any) -> None:
    """Raises PlanError if a value, or one in its lists and tables, is a whole number of more than `MOST_DIGITS` digits."""
    if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        raise too_many_digits(f"{name} is")
    if isinstance(value, Mapping):
        check_digits(name, list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            check_digits(name, item)


def too_many_digits(subject: str) -> PlanError:
    """What to say of a number of more than `MOST_DIGITS` digits, after the words that say where it stands."""
    return PlanError(
        f"{subject} a number of more than {MOST_DIGITS} digits", hint="no number in a plan needs to be so large"
    )


Share = typing.Annotated[float, Within(0, 1)]
Count = typing.Annotated[int, Within(1)]


def declared(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function or dataclass, by name, with their defaults."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def read_options(function: Callable[..., Any], options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Options, converted to the types that a function declares; ``what`` names the function in messages."""
    known = declared(function)
    target = function.__init__ if inspect.isclass(function) else function
    hints = typing.get_type_hints(target, include_extras=True)
    for name in options:
        if name not in known:
            raise UnknownName(f"option of {what}", name, known)
    return {name: _value(name, hints[name], value) for name, value in options.items()}


def _value(name: str, hint: Any, value: Any) -> Any:
    check_digits(name, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        value = _value(name, arguments[0], value)
        for rule in arguments[1:]:
            for item in value if isinstance(value, tuple) else (value,):
                rule.check(name, item)
        return value
    if origin is Literal:
        if value not in arguments:
            choices = [str(choice) for choice in arguments]
            guess = did_you_mean(str(value), choices)
            raise PlanError(f"{name} = {value!r} is not a choice{guess}", hint=f"one of: {', '.join(choices)}")
        return value
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _value(name, inner[0], value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise PlanError(f"{name} = {value!r} is not a list")
        return tuple(_value(name, arguments[0], item) for item in value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise PlanError(f"{name} = {value!r} is not a finite number")
        return float(value)
    if hint in (bool, int, str) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise PlanError(f"{name} = {value!r} is not a {getattr(hint, '__name__', hint)}")
