"""Guides: the rows of a plan, checked against their pattern and mechanism when they are made."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from guidance.errors import PlanError, UnknownName, did_you_mean
from guidance.mechanisms import MECHANISMS
from guidance.mechanisms.base import Mechanism
from guidance.options import MOST_DIGITS, check_digits, read_options, too_many_digits
from guidance.patterns.combinations import read_pattern
from guidance.patterns.pattern import Pattern
from guidance.sites import Selector, check_selector

PARTS = ("model", "generator", "discriminator")
STACKS = ("encoder", "decoder")
ATTENTIONS = ("self", "cross")


def linear(step: int, total: int, hold: int) -> float:
    """1 for ``hold`` steps, then straight down to 0 at step ``total``."""
    return 1.0 if step < hold else max(0.0, (total - step) / max(1, total - hold))


def cosine(step: int, total: int, hold: int) -> float:
    """1 for ``hold`` steps, then half a cosine down to 0 at step ``total``."""
    return (1 - math.cos(math.pi * linear(step, total, hold))) / 2


SCHEDULES: Mapping[str, Callable[[int, int, int], float]] = {
    "constant": lambda step, total, hold: 1.0,
    "linear": linear,
    "cosine": cosine,
    "hold": lambda step, total, hold: float(step < hold),
}
"""How a weight, or the share of what a guide does, moves: from (step, total steps, steps to hold) to a factor."""


def _key(types: tuple[type, ...], help: str) -> Any:
    """A key of a guide: the types that a plan's file may give, and what it says.  `DEFAULTS` has the defaults."""
    return field(metadata={"types": types, "help": help})


@dataclass(frozen=True, init=False)
class Guide:
    """One row of a plan.  The metadata of each field holds its description (``help``) and the types that TOML may give.

    Attributes:
        layers, heads: selectors; see `guidance.sites.Selector`.
        weight: the factor of a loss, or pairs (from this many layers on, factor).
        reference_length: the default reduction of ``attention_loss`` is a mean over n x n entries and shrinks as 1/n.  With
            a reference length, an example of n tokens counts n / reference_length.
        schedule: see `SCHEDULES`.  A guide that is no loss acts in full with the factor 1, and not at all with 0; between
            them, scores, probabilities and outputs are those of the head itself, moved that part of the way.
        options: further keys, for the pattern and the mechanism.

    Example:
        >>> Guide("window", "mask", heads="first 2", size=5)
    """

    pattern: str | Mapping[str, Any] = _key(
        (str, dict),
        'the keys that a query should attend to: a name, or a combination such as { or = ["next", "previous"] }',
    )
    mechanism: str = _key((str,), "how the pattern acts on a head")
    part: str = _key((str,), "model; or generator or discriminator, if two models are trained together")
    stack: str = _key((str,), "encoder or decoder")
    attention: str = _key((str,), "self or cross")
    layers: tuple[Selector, ...] = _key(
        (list, str, int),
        'numbers and selectors: 0, "2-4", "first 2", "last 2", "fraction 0.5", "not 0-1", "all"',
    )
    heads: tuple[Selector, ...] = _key(
        (list, str, int),
        'likewise; also "least important 3", by a table of scores, and "pal:0" for a head that [pal] adds',
    )
    weight: float | tuple[tuple[int, float], ...] = _key(
        (float, int, dict),
        "of a loss: a number, or one that depends on the number of layers: { 1 = 100.0, 12 = 10.0 }",
    )
    reference_length: int | None = _key(
        (int,),
        "attention_loss: the sequence length for which the weight is meant; n tokens count n / this",
    )
    schedule: str = _key(
        (str,), "how the weight of a loss, or the share of what a guide does to a head, falls over the run"
    )
    until: float = _key((float, int), "the share of the run after which the schedule has reached zero")
    strength: float = _key(
        (float, int), "the share of what a guide does to a head, above 0 and up to 1; a schedule multiplies it"
    )
    hold_steps: int = _key((int,), "steps before the schedule starts to fall; 20000 in the code of paper A")
    optional: bool = _key((bool,), "true: the row may select no head, for example in smaller models")
    enabled: bool = _key((bool,), "false: ignore the row")
    name: str = _key((str,), "the name of the row in logs; by default that of its pattern")
    options: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        pattern: str | Mapping[str, Any] = "",
        mechanism: str = "",
        part: str = "model",
        stack: str = "encoder",
        attention: str = "self",
        layers: Selector | Sequence[Selector] = ("all",),
        heads: Selector | Sequence[Selector] = ("all",),
        weight: float | Mapping[int, float] | tuple[tuple[int, float], ...] = 1.0,
        reference_length: int | None = None,
        schedule: str = "constant",
        hold_steps: int = 0,
        optional: bool = False,
        enabled: bool = True,
        name: str = "",
        options: Mapping[str, Any] = {},
        *,
        until: float = 1.0,
        strength: float = 1.0,
        **more: Any,
    ) -> None:
        """A row; see `KEYS`.

        Args:
            layers, heads: one selector, or several.
            weight: a number, or one that depends on the number of layers: ``{1: 100.0, 12: 10.0}``.
            options: options of the pattern and the mechanism by name.
            more: the same as keywords.

        Raises:
            UnknownName: a pattern, mechanism, schedule or option that does not exist.
            PlanError: a value of the wrong type or out of range, or keys that do not fit each other.
        """
        keys = {
            "pattern": pattern,
            "mechanism": mechanism,
            "part": part,
            "stack": stack,
            "attention": attention,
            "layers": layers,
            "heads": heads,
            "weight": weight,
            "reference_length": reference_length,
            "schedule": schedule,
            "until": until,
            "strength": strength,
            "hold_steps": hold_steps,
            "optional": optional,
            "enabled": enabled,
            "name": name,
        }
        for key, value in keys.items():
            object.__setattr__(self, key, _value(key, value))
        object.__setattr__(self, "options", _options(options, more))
        self._check()

    def _check(self) -> None:
        """Raises PlanError if a value is out of range, or keys do not fit each other."""
        MECHANISMS.find(self.mechanism)
        for value, known, what in (
            (self.schedule, SCHEDULES, "schedule"),
            (self.part, PARTS, "part"),
            (self.stack, STACKS, "stack"),
            (self.attention, ATTENTIONS, "attention"),
        ):
            if value not in known:
                raise UnknownName(what, str(value), known)
        self._check_pattern()
        self._check_weight()
        if not 0 < self.until <= 1:
            raise PlanError(f"until = {self.until:g} is no share of the run", hint="above 0, up to 1")
        if self.hold_steps < 0 or (self.reference_length is not None and self.reference_length < 1):
            raise PlanError("hold_steps starts at 0 and reference_length at 1")
        if self.until < 1 and self.schedule not in ("linear", "cosine"):
            raise PlanError(f"until ends a schedule that falls, and {self.schedule!r} does not", hint='"linear"')
        if self.hold_steps and self.schedule == "constant":
            raise PlanError(
                "hold_steps delays the fall of a schedule, and 'constant' does not fall", hint='"linear", or "hold"'
            )
        if self.schedule == "hold" and not self.hold_steps:
            raise PlanError("held for no step, it never acts", hint="hold_steps says for how many steps")
        if not self.heads or not self.layers:
            raise PlanError("an empty list of heads or layers", hint="leave the key out to mean all of them")

    def _check_pattern(self) -> None:
        """Raises PlanError if pattern, mechanism and options do not fit each other."""
        kind = MECHANISMS[self.mechanism]
        if kind.takes_pattern and not self.pattern:
            misspelt = [f"unknown key {key!r}{near}" for key in self.options if (near := did_you_mean(key, KEYS))]
            hint = "; ".join(misspelt) or None
            raise PlanError(f"{self.mechanism} acts through a pattern; the row has none", hint=hint)
        if self.pattern and not kind.takes_pattern:
            raise PlanError(f"{self.mechanism} takes no pattern", hint="leave the pattern out")
        known = (*(self._pattern_options if kind.takes_pattern else ()), *kind.option_names())
        for key in self.options:
            if key not in known:
                raise UnknownName("key", key, [*KEYS, *known])
        pattern, mechanism = self.bound_pattern, self.bound_mechanism
        if pattern and pattern.weighted and not kind.takes_weights:
            raise PlanError(
                f"{pattern.name} has weights, and a {self.mechanism} is yes or no",
                hint='mechanism = "bias" takes weights',
            )
        if self.attention == "cross" and any(c.one_sequence for c in kind.contributions()):
            raise PlanError(f"{self.mechanism} needs queries and keys of one sequence; cross-attention has two")
        if self.heads != ("all",) and mechanism.of_whole_layers:
            raise PlanError(f"{mechanism.of_whole_layers} belongs to whole layers", hint="leave heads out")
        if self.reference_length is not None and (reason := mechanism.refuses_reference_length()):
            raise PlanError(reason.format(mechanism=self.mechanism))

    def _check_weight(self) -> None:
        weights = [w for _, w in self.weight] if isinstance(self.weight, tuple) else [self.weight]
        if not weights:
            raise PlanError("the table of weights is empty", hint="weight = 3.0, or weight = { 4 = 3.0, 12 = 1.0 }")
        if not all(math.isfinite(w) and w >= 0 for w in weights):
            raise PlanError(
                f"weight {self.weight} is not a finite number of 0 or more",
                hint="an attention_loss with away = true pushes attention away"
                if min(weights, default=0) < 0
                else None,
            )
        if not self.is_loss and self.weight != 1.0:
            raise PlanError(
                f"weights belong to losses, and {self.mechanism} is none", hint="enabled = false leaves a row out"
            )
        if not 0 < self.strength <= 1:
            raise PlanError(f"strength = {self.strength:g} is no share of what a guide does", hint="above 0, up to 1")
        if self.strength < 1 and self.is_loss:
            raise PlanError(f"strength is for guides that act on a head, and {self.mechanism} is a loss", hint="weight")
        if (self.schedule != "constant" or self.strength < 1) and not MECHANISMS[self.mechanism].fades():
            raise PlanError(
                f"a {self.mechanism} cannot fade or act in part: a key is visible or not",
                hint='mechanism = "bias" with a small outside is a mask that can',
            )

    @cached_property
    def bound_pattern(self) -> Pattern | None:
        """Its pattern with its options; None for mechanisms that take none."""
        mine = {key: value for key, value in self.options.items() if key not in self._mechanism_options}
        return read_pattern(self.pattern, mine) if self.pattern else None

    @cached_property
    def bound_mechanism(self) -> Mechanism:
        """Its mechanism with its options."""
        mine = {key: value for key, value in self.options.items() if key in self._mechanism_options}
        kind = MECHANISMS[self.mechanism]
        return kind(**read_options(kind, mine, self.mechanism))

    @property
    def is_loss(self) -> bool:
        """It adds a term to the objective and does nothing at inference."""
        return MECHANISMS[self.mechanism].is_loss()

    @property
    def fades(self) -> bool:
        """It shapes outputs of heads, and a schedule takes that away in the course of training."""
        return not self.is_loss and self.schedule != "constant"

    @property
    def is_partial(self) -> bool:
        """It shapes outputs of heads, and does less than all of it for a part of the run or in the whole run."""
        return self.fades or self.strength < 1

    @property
    def shapes(self) -> bool:
        """It acts at inference."""
        return self.enabled and not self.is_loss

    @property
    def learns(self) -> bool:
        """Its mechanism may add parameters to the model."""
        return self.bound_mechanism.learns

    def inherited(self, progress: tuple[int, int] | None) -> Guide | None:
        """What a model that starts from a trained one keeps of this row: the row at the strength that it has there.

        None for a row that is disabled, acts in training only, or has faded at the given step of all steps.
        """
        if not self.shapes:
            return None
        if not self.fades:
            return self
        strength = self.factor(*(progress or (0, 1)))
        if not strength:
            return None
        return replace(self, schedule="constant", until=1.0, hold_steps=0, strength=strength)

    def makes(self, contribution: str) -> bool:
        """Whether its mechanism makes a contribution of that name; see `guidance.mechanisms.base.CONTRIBUTIONS`."""
        return contribution in MECHANISMS[self.mechanism].contributes

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that its pattern and its mechanism look up, by the names of `guidance.patterns.features.TABLES`.

        Scores that select heads are not among them.
        """
        return (*(self.bound_pattern.tables if self.bound_pattern else ()), *self.bound_mechanism.tables)

    @property
    def _mechanism_options(self) -> tuple[str, ...]:
        return MECHANISMS[self.mechanism].option_names()

    @property
    def _pattern_options(self) -> tuple[str, ...]:
        bare = self.pattern if isinstance(self.pattern, str) else self.pattern.get("name")
        return read_pattern(bare).option_names if bare else ()

    @property
    def label(self) -> str:
        """Its name; without one its pattern's, and without a pattern its mechanism's."""
        return self.name or (self.bound_pattern.name if self.bound_pattern else self.mechanism)

    def weight_for(self, num_layers: int) -> float:
        """The weight in a model of that many layers.

        Raises:
            PlanError: the weight is given by depth, and all depths given are larger.
        """
        if not isinstance(self.weight, tuple):
            return self.weight
        for least, weight in sorted(self.weight, reverse=True):
            if num_layers >= least:
                return weight
        raise PlanError(f"no weight for {num_layers} layers: the smallest depth given is {min(self.weight)[0]}")

    def factor(self, step: int, total: int) -> float:
        """Schedule times strength after ``step`` of ``total`` optimizer steps."""
        end = round(total * self.until)
        if self.until < 1 and step >= end:
            return 0.0
        return self.strength * SCHEDULES[self.schedule](step, end, self.hold_steps)


KEYS: Mapping[str, Mapping[str, Any]] = {item.name: item.metadata for item in fields(Guide) if item.metadata}
"""The keys of a row, in their order: the types that a file may give, and what each says."""

DEFAULTS: Mapping[str, Any] = {
    name: parameter.default for name, parameter in inspect.signature(Guide).parameters.items() if name in KEYS
}
"""The value of every key that a row leaves out."""


def _value(key: str, value: Any) -> Any:
    """A value that Python or TOML gives for a key, in the form in which `Guide` stores it.

    Raises:
        PlanError: it has the wrong type.
    """
    types = KEYS[key]["types"]
    check_digits(key, value)
    if value is None and DEFAULTS[key] is None:
        return None
    if key == "weight" and isinstance(value, tuple):
        with suppress(TypeError, ValueError):
            value = dict(value)
    wider = {dict: (Mapping,), list: (tuple, list)}  # what Python may give where TOML gives these
    accepted = tuple(kind for each in types for kind in wider.get(each, (each,)))
    if not isinstance(value, accepted) or (isinstance(value, bool) and types != (bool,)):
        raise PlanError(f"{key} = {value!r} is not a {' or '.join(kind.__name__ for kind in types)}")
    if key in ("layers", "heads"):
        return selectors_of(key, value)
    return _weight(value) if key == "weight" else value


def _weight(value: Any) -> float | tuple[tuple[int, float], ...]:
    try:
        if not isinstance(value, Mapping):
            return float(value)
        if any(isinstance(weight, bool) for weight in value.values()):
            raise ValueError("a truth value")
        pairs = tuple(sorted((int(least), float(weight)) for least, weight in value.items()))
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError("weight is neither a number nor a table { number of layers = number, ... }") from error
    check_digits("weight", pairs)
    return pairs


def _options(table: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a row, from its table and its keywords, with lists as TOML has them."""
    if not isinstance(table, Mapping):
        raise PlanError(f"options = {table!r} is not a table", hint='for example options={"size": 5}, or size=5')
    if twice := sorted(table.keys() & more.keys()):
        raise PlanError(f"the option {twice[0]!r} is given twice", hint="as a keyword, or in options")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in {**table, **more}.items()}


_TOO_MANY_DIGITS = re.compile(rf"(?<![.\d])\d{{{MOST_DIGITS + 1}}}")
"""A long number in a selector; a fraction may have as many digits as it likes."""


def selectors_of(key: str, value: Any) -> tuple[Selector, ...]:
    """The selectors that a value under ``heads`` or ``layers`` lists, one or several.  Raises PlanError if one cannot be read."""
    check_digits(key, value)
    listed = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(s, int | str) and not isinstance(s, bool) for s in listed):
        raise PlanError(f"{key} = {value!r} is not a list of numbers and rules")
    if any(map(_TOO_MANY_DIGITS.search, map(str, listed))):
        raise too_many_digits(f"{key} has")
    for selector in listed:
        check_selector(selector, "head" if key == "heads" else "layer")
    return tuple(listed)
