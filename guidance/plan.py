"""Plans: lists of guides, as TOML that people read, diff and share.

    [[guide]]
    pattern = "next"
    mechanism = "attention_loss"
    heads = [0]
    weight = 100.0
    schedule = "linear"

A guide is one row: pattern, mechanism, sites, with a weight and a schedule.  Keys that are not named here are options of
its pattern or of its mechanism; unknown ones are refused.  A table ``[pal]`` adds heads beside those of the model.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from guidance.errors import InputError, PlanError, UnknownName
from guidance.mechanisms import MECHANISMS, Mechanism
from guidance.models.added_heads import Pal
from guidance.options import read
from guidance.patterns.catalogue import Pattern
from guidance.patterns.combinations import read_pattern
from guidance.sites import Selector

SIZE_LIMIT = 1 << 20
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
"""How a weight moves: from (step, total steps, steps to hold) to a factor."""


@dataclass(frozen=True)
class Guide:
    """One row of a plan.

    Attributes:
        pattern: a name in `PATTERNS`, or a combination, see `guidance.patterns.combinations.read_pattern`; empty for mechanisms that
            take none.
        mechanism: a name in `MECHANISMS`.
        part, stack, attention: which model of several, which stack of it, self- or cross-attention.
        layers, heads: selectors, see `guidance.sites.Selector`; ``pal:`` before one of heads means added heads.
        weight: the factor of a loss; or pairs (from this many layers on, factor).
        reference_length: the sequence length to which the weight belongs.  The default reduction of ``attention_loss``
            is a mean over n x n entries and shrinks as 1/n; an example of n tokens therefore counts n / reference_length.
        schedule, hold_steps: how the weight moves during training; see `SCHEDULES`.
        optional: the row may select no head (small models have fewer, encoders have no decoder).
        enabled: false leaves the row out, as a weight of 0 does.
        name: how logs call it; the pattern's name by default.
        options: further keys, for the pattern and the mechanism.
    """

    pattern: str | Mapping[str, Any] = ""
    mechanism: str = ""
    part: str = "model"
    stack: str = "encoder"
    attention: str = "self"
    layers: tuple[Selector, ...] = ("all",)
    heads: tuple[Selector, ...] = ("all",)
    weight: float | tuple[tuple[int, float], ...] = 1.0
    reference_length: int | None = None
    schedule: str = "constant"
    hold_steps: int = 0
    optional: bool = False
    enabled: bool = True
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.mechanism, MECHANISMS, "mechanism"),
            (self.schedule, SCHEDULES, "schedule"),
            (self.part, PARTS, "part"),
            (self.stack, STACKS, "stack"),
            (self.attention, ATTENTIONS, "attention"),
        ):
            if value not in known:
                raise UnknownName(what, str(value), known)
        self._check_pattern()
        self._check_weight()
        if self.hold_steps < 0 or (self.reference_length is not None and self.reference_length < 1):
            raise PlanError("hold_steps starts at 0 and reference_length at 1")
        if not self.heads or not self.layers:
            raise PlanError("an empty list of heads or layers", hint="leave the key out to mean all of them")

    def _check_pattern(self) -> None:
        """Raises PlanError when pattern, mechanism and options do not fit each other."""
        takes = self.acts.wants_pattern
        if takes and not self.pattern:
            raise PlanError(f"{self.mechanism} acts through a pattern; the row has none")
        if self.pattern and not takes:
            raise PlanError(f"{self.mechanism} takes no pattern", hint="leave the pattern out")
        known = (*(self._pattern_options if takes else ()), *self.acts.option_names)
        for key in self.options:
            if key not in known:
                raise UnknownName("key", key, [*_TYPES, *known])
        pattern, mechanism = self.wish, self.how
        if pattern and pattern.weighted and self.acts.place == "mask":
            raise PlanError(
                f"{pattern.name} has weights, and a mask is yes or no", hint='mechanism = "bias" takes weights'
            )
        if self.attention == "cross" and self.acts.place in ("attack", "scores"):
            raise PlanError(f"{self.mechanism} needs queries and keys of one sequence; cross-attention has two")
        if self.reference_length is not None and self.acts.place != "probabilities":
            raise PlanError(f"reference_length belongs to attention_loss, not to {self.mechanism}")
        if self.reference_length is not None and mechanism.reduction == "frobenius":
            raise PlanError("reference_length undoes the 1/n of a mean; frobenius is a sum and has none to undo")

    def _check_weight(self) -> None:
        weights = [w for _, w in self.weight] if isinstance(self.weight, tuple) else [self.weight]
        if not weights or not all(math.isfinite(w) and w >= 0 for w in weights):
            raise PlanError(f"weight {self.weight} is not a finite number of 0 or more")
        if not self.acts.is_loss and (self.weight != 1.0 or self.schedule != "constant"):
            raise PlanError(
                f"weights and schedules belong to losses, and {self.mechanism} is none",
                hint="enabled = false leaves a row out",
            )

    @property
    def acts(self) -> Mechanism:
        """The row of its mechanism in `MECHANISMS`."""
        return MECHANISMS[self.mechanism]

    @cached_property
    def wish(self) -> Pattern | None:
        """Its pattern with its options; None for mechanisms that take none."""
        own = {key: value for key, value in self.options.items() if key not in self.acts.option_names}
        return read_pattern(self.pattern, own) if self.pattern else None

    @property
    def tables(self) -> tuple[str, ...]:
        """What it looks up beside tokens, by the names of `guidance.patterns.features.TABLES`, but for scores that choose heads."""
        return (*(self.wish.tables if self.wish else ()), *getattr(self.how, "tables", ()))

    @cached_property
    def how(self) -> Any:
        """Its mechanism with its options."""
        own = {key: value for key, value in self.options.items() if key in self.acts.option_names}
        return self.acts.options(**read(self.acts.options, own, self.mechanism))

    @property
    def _pattern_options(self) -> tuple[str, ...]:
        bare = self.pattern if isinstance(self.pattern, str) else self.pattern.get("name")
        return read_pattern(bare).option_names if bare else ()

    @property
    def label(self) -> str:
        """How it is called: its name, else its pattern's, else its mechanism's."""
        return self.name or (self.wish.name if self.wish else self.mechanism)

    def weight_for(self, num_layers: int) -> float:
        """The weight in a model of that many layers.

        Raises:
            PlanError: the weight is given by depth, and only for deeper models.
        """
        if not isinstance(self.weight, tuple):
            return self.weight
        for least, weight in sorted(self.weight, reverse=True):
            if num_layers >= least:
                return weight
        raise PlanError(f"no weight for {num_layers} layers: the smallest depth given is {min(self.weight)[0]}")

    def factor(self, step: int, total: int) -> float:
        """Where the schedule is after ``step`` of ``total`` optimizer steps."""
        return SCHEDULES[self.schedule](step, total, self.hold_steps)


@dataclass(frozen=True)
class Plan:
    """A list of guides, and heads to add; an empty plan leaves a model as it is."""

    guides: tuple[Guide, ...] = ()
    pal: Pal | None = None

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """One name for each guide, unique within the plan."""
        labels: list[str] = []
        for guide in self.guides:
            number = 1
            while (unique := guide.label if number == 1 else f"{guide.label}#{number}") in labels:
                number += 1
            labels.append(unique)
        return tuple(labels)

    @property
    def shapes_outputs(self) -> bool:
        """It matters at inference: a model that was trained with it is another one without it."""
        return self.pal is not None or any(g.enabled and not g.acts.is_loss for g in self.guides)

    def needs(self, *, training: bool = True) -> dict[str, str]:
        """The features that its guides read besides ids and padding, each with the label of a guide that does.

        Args:
            training: guides that only add a loss count, too.
        """
        found: dict[str, str] = {}
        for label, guide in zip(self.labels, self.guides, strict=True):
            if guide.acts.is_loss and not training:
                continue
            for need in guide.wish.needs if guide.wish and guide.enabled else ():
                found.setdefault(need, label)
        return found

    def tables(self, *, training: bool = True) -> dict[str, str]:
        """The tables that its guides look up, likewise; see `Guide.tables`."""
        found: dict[str, str] = {}
        for label, guide in zip(self.labels, self.guides, strict=True):
            if guide.enabled and (training or not guide.acts.is_loss):
                found |= {table: label for table in guide.tables if table not in found}
        return found

    @classmethod
    def parse(cls, text: str, *, source: str = "plan") -> Plan:
        """Read a plan from TOML.

        Raises:
            PlanError: not TOML, an unknown key, a value of the wrong type or out of range; the row is named.
        """
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{source}: not a plan ({error})") from error
        if set(data) - {"guide", "pal"} or not isinstance(data.get("guide", []), list):
            unknown = ", ".join(sorted(set(data) - {"guide", "pal"})) or "guide"
            raise PlanError(f"{source}: unknown table {unknown}", hint="rows are [[guide]]; added heads are [pal]")
        pal = None
        if "pal" in data:
            try:
                pal = _pal(data["pal"])
            except InputError as error:
                raise PlanError(f"{source}, [pal]: {error.message}", hint=error.hint) from error
        guides = []
        for number, row in enumerate(data.get("guide", []), 1):
            try:
                guides.append(_guide(row))
            except InputError as error:
                raise PlanError(f"{source}, guide {number}: {error.message}", hint=error.hint) from error
        return cls(tuple(guides), pal)

    @classmethod
    def load(cls, reference: str | Path) -> Plan:
        """A plan from a file, or one that ships with the package (``preset:ag``).

        Raises:
            UnknownName: no preset of that name.
            PlanError: the file cannot be read.
        """
        text = str(reference)
        if text.startswith("preset:"):
            name = text.removeprefix("preset:")
            if name not in presets():
                raise UnknownName("preset", name, presets())
            return cls.parse(presets()[name], source=text)
        path = Path(reference)
        if text in presets() and not path.exists():
            raise PlanError(f"there is no file {text!r}", hint=f"did you mean preset:{text}?")
        if path.exists() and not path.is_file():
            raise PlanError(f"{text}: cannot be read (not a plain file)", hint="a file, or preset:ag")
        try:
            with path.open("rb") as file:
                data = file.read(SIZE_LIMIT + 1)
            if len(data) > SIZE_LIMIT:
                raise PlanError(f"{text}: larger than a plan can be")
            return cls.parse(data.decode(), source=text)
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{text}: cannot be read ({error})", hint="a file, or preset:ag") from error

    def dumps(self) -> str:
        """The plan as TOML; `parse` gives it back exactly."""
        added = [_pal_text(self.pal)] if self.pal else []
        return "\n".join([*added, *(_row_text(guide) for guide in self.guides)])


def presets() -> dict[str, str]:
    """The plans that ship with the package: TOML text by name."""
    folder = importlib.resources.files("guidance") / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".toml")
    }


_TYPES: Mapping[str, tuple[type, ...]] = {
    "pattern": (str, dict),
    **dict.fromkeys(("mechanism", "part", "stack", "attention", "schedule", "name"), (str,)),
    **dict.fromkeys(("hold_steps", "reference_length"), (int,)),
    **dict.fromkeys(("layers", "heads"), (list, str, int)),
    "weight": (float, int, dict),
    **dict.fromkeys(("optional", "enabled"), (bool,)),
}


def _guide(row: Any) -> Guide:
    if not isinstance(row, dict):
        raise PlanError("a guide is a table")
    if "mechanism" not in row:
        raise PlanError("it has no mechanism")
    given: dict[str, Any] = {}
    for key, value in row.items():
        if key not in _TYPES:
            given.setdefault("options", {})[key] = value
            continue
        if not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and _TYPES[key] != (bool,)):
            raise PlanError(f"{key} = {value!r} is not a {' or '.join(t.__name__ for t in _TYPES[key])}")
        given[key] = value
    for key in ("layers", "heads"):
        if key in given:
            given[key] = _selectors(key, given[key])
    weight = given.get("weight", 1.0)
    try:
        if isinstance(weight, dict):
            if any(isinstance(w, bool) for w in weight.values()):
                raise ValueError("a truth value")
            given["weight"] = tuple(sorted((int(least), float(w)) for least, w in weight.items()))
        else:
            given["weight"] = float(weight)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError("weight wants a number, or {from so many layers on = number, ...}") from error
    return Guide(**given)


def _selectors(key: str, value: Any) -> tuple[Selector, ...]:
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(s, int | str) and not isinstance(s, bool) for s in listed):
        raise PlanError(f"{key} = {value!r} is not a list of numbers and rules")
    return tuple(listed)


def _pal(table: Any) -> Pal:
    if not isinstance(table, dict):
        raise PlanError("it is a table")
    given = read(Pal, {key: value for key, value in table.items() if key != "layers"}, "pal")
    if "layers" in table:
        given["layers"] = _selectors("layers", table["layers"])
    return Pal(**given)


def _pal_text(pal: Pal) -> str:
    lines = [
        f"{item.name} = {as_toml(getattr(pal, item.name))}"
        for item in fields(Pal)
        if getattr(pal, item.name) != item.default
    ]
    return "\n".join(["[pal]", *lines]) + "\n"


def _row_text(guide: Guide) -> str:
    return "\n".join(["[[guide]]", *(f"{key} = {text}" for key, text in written_keys(guide).items())]) + "\n"


def written_keys(guide: Guide) -> dict[str, str]:
    """The keys of a row and their values, as a plan's file has them; keys at their defaults are left out."""
    found: dict[str, str] = {}
    for item in fields(Guide):
        value = getattr(guide, item.name)
        if item.name == "options":
            found |= {key: as_toml(option) for key, option in value.items()}
        elif value != item.default:
            is_table = item.name == "weight" and isinstance(value, tuple)
            found[item.name] = as_toml(dict(value) if is_table else value)
    return found


def as_toml(value: Any) -> str:
    """A plain value as TOML writes it; ``none`` for None, which TOML does not have."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {as_toml(item)}' for key, item in value.items())} }}" if value else "{}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(as_toml(item) for item in value)}]"
    return repr(value)
