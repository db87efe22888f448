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

import difflib
import importlib.resources
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from guidance.errors import InputError, PlanError, UnknownName, did_you_mean
from guidance.guide import DEFAULTS, KEYS, Guide, selectors_of
from guidance.mechanisms import MECHANISMS
from guidance.models.added_heads import Pal
from guidance.options import read_options, too_many_digits
from guidance.patterns import PATTERNS
from guidance.patterns.combinations import pattern_names
from guidance.registry import missing_package
from guidance.sites import is_by_score

SIZE_LIMIT = 1 << 20
_TABLES = {"guide", "pal", "packages"}
_EXAMPLE = 'a row is [[guide]], and below it pattern = "next", mechanism = "mask"; `guide plan new` writes a plan to start from'

_PLANS = "a plan is a TOML file, or one that ships with the package, such as preset:ag; `guide plan new` writes one"


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

    def key_of(self, number: int) -> str:
        """The name under which a site holds the parameters of a guide."""
        return f"{self.guides[number].mechanism}{number}"

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

    def place_of(self, row: str) -> int | None:
        """The index of a row, given by its label or by its number, which counts from 1; None for ``pal``, the table ``[pal]``,
        where there is one and no row has that name.

        Raises:
            UnknownName: there is no such row.
        """
        if row in self.labels:
            return self.labels.index(row)
        if row == "pal" and self.pal is not None:
            return None
        if row.isdecimal() and 1 <= int(row) <= len(self.guides):
            return int(row) - 1
        raise UnknownName("row of the plan", row, self.labels)

    def with_value(self, place: int | None, key: str, value: Any) -> Plan:
        """The plan with another value of a key, as TOML gives it.

        Args:
            place: see `place_of`.

        Raises:
            UnknownName: there is no such key.
            PlanError: the value is refused.
        """
        if place is None:
            assert self.pal is not None, "it has a table [pal]"
            return Plan(self.guides, _pal({**_pal_values(self.pal), key: value}))
        changed = _guide({**_row_values(self.guides[place]), key: value})
        return Plan((*self.guides[:place], changed, *self.guides[place + 1 :]), self.pal)

    def keeping(self, rows: Iterable[int]) -> Plan:
        """The plan with only some of its rows, given by their indices; added heads stay."""
        return Plan(tuple(self.guides[number] for number in rows), self.pal)

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
        return self._labelled(lambda guide: guide.bound_pattern.needs if guide.bound_pattern else (), training)

    def tables(self, *, training: bool = True) -> dict[str, str]:
        """The tables that its guides look up, each with the label of a guide; see `Guide.tables`."""
        return self._labelled(lambda guide: guide.tables, training)

    def selects_by_score(self) -> bool:
        """Whether a guide that counts selects its heads by a table of scores."""
        return any(guide.enabled and any(map(is_by_score, guide.heads)) for guide in self.guides)

    def _labelled(self, names: Callable[[Guide], Iterable[str]], training: bool) -> dict[str, str]:
        """What the guides that count name, each with the label of the first that does."""
        labelled: dict[str, str] = {}
        for label, guide in zip(self.labels, self.guides, strict=True):
            if guide.enabled and (training or not guide.is_loss):
                for name in names(guide):
                    labelled.setdefault(name, label)
        return labelled

    @classmethod
    def parse(cls, text: str, *, source: str = "plan") -> Plan:
        """Read a plan from TOML.

        Raises:
            PlanError: not TOML, an unknown key, a value of the wrong type or out of range; the row is named.
        """
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise PlanError(f"{source}: not a plan, which is TOML ({error})", hint=_EXAMPLE) from error
        except ValueError as error:  # of Python, which reads no number of thousands of digits
            raise too_many_digits(f"{source}: it has") from error
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
        if not text:
            raise PlanError("the plan has no name", hint=_PLANS)
        if not path.exists():
            near = difflib.get_close_matches(path.stem, presets(), n=1)
            raise PlanError(f"there is no plan {text!r}", hint=f"did you mean preset:{near[0]}?" if near else _PLANS)
        if not path.is_file():
            raise PlanError(f"{text}: cannot be read as a plan, since it is not a plain file", hint=_PLANS)
        try:
            with path.open("rb") as file:
                data = file.read(SIZE_LIMIT + 1)
            if len(data) > SIZE_LIMIT:
                raise PlanError(f"{text}: larger than a plan can be")
            return cls.parse(data.decode("utf-8-sig"), source=text)
        except OSError as error:
            raise PlanError(f"{text}: cannot be read ({os.strerror(error.errno or 0)})", hint=_PLANS) from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{text}: not a plan, which is UTF-8 text", hint=_PLANS) from error

    def dumps(self) -> str:
        """The plan as TOML; `parse` gives it back exactly."""
        tables = [_written_table("[[guide]]", written_keys(guide)) for guide in self.guides]
        if self.pal:
            changed = {key: as_toml(value) for key, value in _pal_values(self.pal).items()}
            tables.insert(0, _written_table("[pal]", changed))
        if self.packages:
            tables.insert(0, _written_table("[packages]", {n: as_toml(p) for n, p in self.packages.items()}))
        return "\n".join(tables)


def presets() -> dict[str, str]:
    """The plans that ship with the package: TOML text by name."""
    folder = importlib.resources.files("guidance") / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".toml")
    }


def _guide(row: Any) -> Guide:
    if not isinstance(row, dict):
        raise PlanError("a guide is a table")
    if "mechanism" not in row:
        misspelt = [
            f"unknown key {key!r}{near}" for key in row if key not in KEYS and (near := did_you_mean(key, KEYS))
        ]
        raise PlanError("it has no mechanism", hint="; ".join(misspelt) or None)
    keys = {key: value for key, value in row.items() if key in KEYS}
    return Guide(**keys, options={key: value for key, value in row.items() if key not in KEYS})


def _pal(table: Any) -> Pal:
    if not isinstance(table, dict):
        raise PlanError("it is a table")
    options = read_options(Pal, {key: value for key, value in table.items() if key != "layers"}, "pal")
    if "layers" in table:
        options["layers"] = selectors_of("layers", table["layers"])
    return Pal(**options)


def _pal_values(pal: Pal) -> dict[str, Any]:
    """The keys of the table ``[pal]`` that are not at their defaults, and their values."""
    return {item.name: value for item in fields(Pal) if (value := getattr(pal, item.name)) != item.default}


def _row_values(guide: Guide) -> dict[str, Any]:
    """The keys of a row that are not at their defaults, and their values, as a plan's file gives them."""
    values = {key: getattr(guide, key) for key, default in DEFAULTS.items() if getattr(guide, key) != default}
    if isinstance(values.get("weight"), tuple):
        values["weight"] = dict(values["weight"])
    return {**values, **guide.options}


def _written_table(name: str, values: Mapping[str, str]) -> str:
    return "\n".join([name, *(f"{key} = {text}" for key, text in values.items())]) + "\n"


def written_keys(guide: Guide) -> dict[str, str]:
    """The keys of a row and their values, as a plan's file has them; keys at their defaults are left out."""
    return {key: as_toml(value) for key, value in _row_values(guide).items()}


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
