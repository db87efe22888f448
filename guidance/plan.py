"""Plans: lists of guides, as TOML that people read, diff and share.

    [[guide]]
    pattern = "next"
    mechanism = "attention_loss"
    heads = [0]
    weight = 100.0
    schedule = "linear"

A guide is one row: a pattern, a mechanism and the heads on which it acts, with a weight and a schedule.  Further keys are
options of its pattern or of its mechanism; unknown ones are refused.  A table ``[pal]`` adds heads beside those of the
model.  A table ``[packages]`` names the package that registers a pattern or mechanism that is not ours.
"""

from __future__ import annotations

import importlib.resources
import inspect
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from guidance.errors import InputError, PlanError, UnknownName
from guidance.mechanisms import MECHANISMS
from guidance.mechanisms.base import Mechanism
from guidance.models.added_heads import Pal
from guidance.options import check_digits, read
from guidance.patterns import PATTERNS, Pattern
from guidance.patterns.combinations import pattern_names, read_pattern
from guidance.registry import missing_package
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
        given = {
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
        for key, value in given.items():
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
        if self.schedule == "hold" and not self.hold_steps:
            raise PlanError("held for no step, it never acts", hint="hold_steps says for how many steps")
        if not self.heads or not self.layers:
            raise PlanError("an empty list of heads or layers", hint="leave the key out to mean all of them")

    def _check_pattern(self) -> None:
        """Raises PlanError if pattern, mechanism and options do not fit each other."""
        kind = MECHANISMS[self.mechanism]
        if kind.takes_pattern and not self.pattern:
            raise PlanError(f"{self.mechanism} acts through a pattern; the row has none")
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
        if self.reference_length is not None and (reason := mechanism.refuses_reference_length()):
            raise PlanError(reason.format(mechanism=self.mechanism))

    def _check_weight(self) -> None:
        weights = [w for _, w in self.weight] if isinstance(self.weight, tuple) else [self.weight]
        if not weights or not all(math.isfinite(w) and w >= 0 for w in weights):
            raise PlanError(f"weight {self.weight} is not a finite number of 0 or more")
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
        return kind(**read(kind, mine, self.mechanism))

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
        return MECHANISMS[self.mechanism].module is not Mechanism.module

    def inherited(self, progress: tuple[int, int] | None) -> Guide | None:
        """What a model that starts from a trained one keeps of this row: the row at the strength that it has there.

        Args:
            progress: the step that training is at, and the last one; see `guidance.checkpoint.read_progress`.

        Returns:
            None for a row that is disabled, acts in training only, or has faded.
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


@dataclass(frozen=True)
class Plan:
    """A list of guides, and heads to add; an empty plan leaves a model as it is."""

    guides: tuple[Guide, ...] = ()
    pal: Pal | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.guides, list | tuple) or not all(isinstance(guide, Guide) for guide in self.guides):
            raise PlanError(f"{self.guides!r} is no list of guides", hint="Plan((Guide(...), Guide(...)))")
        object.__setattr__(self, "guides", tuple(self.guides))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """One name for each guide, unique within the plan."""
        labels: dict[str, None] = {}
        next_number: dict[str, int] = {}
        for label in (guide.label for guide in self.guides):
            number = next_number.get(label, 1)
            while (unique := label if number == 1 else f"{label}#{number}") in labels:
                number += 1
            labels[unique], next_number[label] = None, number + 1
        return tuple(labels)

    @property
    def shapes_outputs(self) -> bool:
        """It matters at inference: without the plan, the model computes something else than it was trained to."""
        return self.pal is not None or any(guide.shapes for guide in self.guides)

    def inherited(self, progress: tuple[int, int] | None) -> Plan:
        """What a model that starts from a trained one keeps of this plan; see `Guide.inherited`."""
        kept = (guide.inherited(progress) for guide in self.guides)
        return Plan(tuple(guide for guide in kept if guide is not None), self.pal)

    def without_rows_of(self, other: Plan) -> Plan:
        """The rows that another plan lacks, and the added heads if it has others."""
        guides = tuple(guide for guide in self.guides if guide not in other.guides)
        return Plan(guides, self.pal if self.pal != other.pal else None)

    @classmethod
    def joined(cls, plans: Sequence[Plan]) -> Plan:
        """The rows of several plans, in their order.

        Raises:
            PlanError: two of them add different heads.
        """
        added = {plan.pal for plan in plans if plan.pal is not None}
        if len(added) > 1:
            raise PlanError("two plans add heads, with different tables [pal]", hint="one of them, or one file of both")
        return cls(tuple(guide for plan in plans for guide in plan.guides), next(iter(added), None))

    def for_part(self, *parts: str) -> Plan:
        """The guides of some parts, as a plan for one model; ``[pal]`` goes with the part ``model``."""
        guides = tuple(replace(guide, part="model") for guide in self.guides if guide.part in parts)
        return Plan(guides, self.pal if "model" in parts else None)

    def as_part(self, part: str) -> Plan:
        """A plan for one model as the guides of one part of a plan for several."""
        return Plan(tuple(replace(guide, part=part) for guide in self.guides), self.pal)

    @property
    def packages(self) -> dict[str, str]:
        """By name, the packages that register its patterns and mechanisms; ours are left out."""
        names = [guide.mechanism for guide in self.guides]
        for guide in self.guides:
            names += pattern_names(guide.pattern) if guide.pattern else ()
        owners = {**MECHANISMS.packages, **PATTERNS.packages}
        return {name: owners[name] for name in sorted(set(names)) if name in owners}

    def needs(self, *, training: bool = True) -> dict[str, str]:
        """The features that its guides read besides ids and padding, each with the label of a guide that reads it.

        Args:
            training: whether guides that only add a loss count.
        """
        found: dict[str, str] = {}
        for label, guide in zip(self.labels, self.guides, strict=True):
            if guide.is_loss and not training:
                continue
            for need in guide.bound_pattern.needs if guide.bound_pattern and guide.enabled else ():
                found.setdefault(need, label)
        return found

    def tables(self, *, training: bool = True) -> dict[str, str]:
        """The tables that its guides look up, each with the label of a guide; see `Guide.tables`."""
        found: dict[str, str] = {}
        for label, guide in zip(self.labels, self.guides, strict=True):
            if guide.enabled and (training or not guide.is_loss):
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
            raise PlanError(f"{source}: not a plan, which is TOML ({error})", hint=_EXAMPLE) from error
        if set(data) - _TABLES or not isinstance(data.get("guide", []), list):
            unknown = ", ".join(sorted(set(data) - _TABLES)) or "guide"
            raise PlanError(f"{source}: unknown table {unknown}", hint="rows are [[guide]]; added heads are [pal]")
        packages = data.get("packages", {})
        if not isinstance(packages, dict) or not all(isinstance(package, str) for package in packages.values()):
            raise PlanError(f"{source}, [packages]: names of packages by the names that they register")
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
                name = error.name if isinstance(error, UnknownName) else ""
                hint = missing_package(packages, name) or error.hint
                raise PlanError(f"{source}, guide {number}: {error.message}", hint=hint) from error
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
        lines = [f"{name} = {as_toml(package)}" for name, package in self.packages.items()]
        packages = ["\n".join(["[packages]", *lines]) + "\n"] if lines else []
        added = [_pal_text(self.pal)] if self.pal else []
        return "\n".join([*packages, *added, *(_row_text(guide) for guide in self.guides)])


def presets() -> dict[str, str]:
    """The plans that ship with the package: TOML text by name."""
    folder = importlib.resources.files("guidance") / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".toml")
    }


_TABLES = {"guide", "pal", "packages"}
_EXAMPLE = 'a row is [[guide]], and below it pattern = "next", mechanism = "mask"; `guide plan new` writes a plan to start from'

KEYS: Mapping[str, Mapping[str, Any]] = {item.name: item.metadata for item in fields(Guide) if item.metadata}
"""The keys of a row, in their order: the types that a file may give, and what each says."""

DEFAULTS: Mapping[str, Any] = {
    name: parameter.default for name, parameter in inspect.signature(Guide).parameters.items() if name in KEYS
}
"""The value of every key that a row leaves out."""


def _guide(row: Any) -> Guide:
    if not isinstance(row, dict):
        raise PlanError("a guide is a table")
    if "mechanism" not in row:
        raise PlanError("it has no mechanism")
    given: dict[str, Any] = {}
    for key, value in row.items():
        table = given if key in KEYS else given.setdefault("options", {})
        table[key] = value
    return Guide(**given)


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
        value = _table(value)
    wider = {dict: (Mapping,), list: (tuple, list)}  # what Python may give where TOML gives these
    accepted = tuple(kind for each in types for kind in wider.get(each, (each,)))
    if not isinstance(value, accepted) or (isinstance(value, bool) and types != (bool,)):
        raise PlanError(f"{key} = {value!r} is not a {' or '.join(kind.__name__ for kind in types)}")
    if key in ("layers", "heads"):
        return _selectors(key, value)
    return _weight(value) if key == "weight" else value


def _table(pairs: Any) -> Any:
    """Pairs as a table; anything else as it is."""
    try:
        return dict(pairs)
    except (TypeError, ValueError):
        return pairs


def _weight(value: Any) -> float | tuple[tuple[int, float], ...]:
    try:
        if not isinstance(value, Mapping):
            return float(value)
        if any(isinstance(weight, bool) for weight in value.values()):
            raise ValueError("a truth value")
        pairs = tuple(sorted((int(least), float(weight)) for least, weight in value.items()))
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError("weight is no number, nor { from so many layers on = number, ... }") from error
    check_digits("weight", pairs)
    return pairs


def _options(given: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a row, from its table and its keywords, with lists as TOML has them."""
    if not isinstance(given, Mapping):
        raise PlanError(f"options = {given!r} is not a table", hint='for example options={"size": 5}, or size=5')
    if twice := sorted(given.keys() & more.keys()):
        raise PlanError(f"the option {twice[0]!r} is given twice", hint="as a keyword, or in options")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in {**given, **more}.items()}


def _selectors(key: str, value: Any) -> tuple[Selector, ...]:
    check_digits(key, value)
    listed = value if isinstance(value, list | tuple) else [value]
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
    for key, default in DEFAULTS.items():
        value = getattr(guide, key)
        if value != default:
            is_table = key == "weight" and isinstance(value, tuple)
            found[key] = as_toml(dict(value) if is_table else value)
    return found | {name: as_toml(option) for name, option in guide.options.items()}


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
