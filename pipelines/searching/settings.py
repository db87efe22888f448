"""The settings that a search compares: every combination of the values of a grid, and which rows of a plan are kept.

An axis of the grid is a setting of the runs (``learning-rate=1e-5,2e-5``) or a key of a row of their plan
(``plan.next.weight=1,10``); the rows that are kept are one more axis.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError, PlanError, did_you_mean

if TYPE_CHECKING:
    from guidance.plan import Plan

PLAN = "plan."
"""The prefix of axes that vary a row of a plan."""

EXAMPLE = "--grid learning-rate=1e-5,2e-5"
PLAN_EXAMPLE = "--grid plan.next.weight=1,10,100, where next is the name of a row, or its number from 1"


def as_flag(name: str) -> str:
    """The name of an axis as people write it after ``--grid``; rows and keys of a plan keep their underscores."""
    return name if name.startswith(PLAN) else name.replace("_", "-")


@dataclass(frozen=True)
class Axis:
    """What varies, and its values.

    Attributes:
        name: of a setting as its field is called, or ``plan.ROW.KEY``.
        values: text for a setting, plain values of TOML for a key of a plan.
    """

    name: str
    values: tuple[Any, ...]

    @property
    def is_of_plan(self) -> bool:
        return self.name.startswith(PLAN)

    @property
    def row(self) -> str:
        """The row of the plan; names of rows may have dots in them."""
        return self.name.removeprefix(PLAN).rpartition(".")[0]

    @property
    def key(self) -> str:
        """The key of the row."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Setting:
    """One point of a search.

    Attributes:
        values: of the settings that vary, and of the keys of the plan, by the names of their axes.
        kept: indices of the rows of the plan that are kept; None where all are and this does not vary.
    """

    values: Mapping[str, Any]
    kept: tuple[int, ...] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run among the values."""
        return {name: value for name, value in self.values.items() if not name.startswith(PLAN)}

    def changed(self, plan: Plan) -> Plan:
        """A plan with the values and the rows of this setting.

        Raises:
            PlanError: the plan has no such row, the row no such key, or a value is refused.
        """
        places: dict[tuple[int | None, str], str] = {}
        changed = plan
        for axis in (Axis(name, (value,)) for name, value in self.values.items() if name.startswith(PLAN)):
            place = place_of(axis, plan)
            if other := places.get((place, axis.key)):
                raise PlanError(f"--grid {axis.name} and {other} are the same key", hint="one axis with all values")
            places[place, axis.key] = axis.name
            try:
                changed = changed.with_value(place, axis.key, axis.values[0])
            except InputError as error:
                raise PlanError(f"--grid {axis.name}: {error.message}", hint=error.hint) from error
        return changed if self.kept in (None, _rows(plan)) else changed.keeping(self.kept or ())


def place_of(axis: Axis, plan: Plan) -> int | None:
    """Where a plan has the row of an axis.  Raises PlanError if there is no such row."""
    if not plan.guides and plan.pal is None:
        raise PlanError(f"--grid {axis.name}: there is no plan that has rows", hint="--plan preset:ag")
    try:
        return plan.place_of(axis.row)
    except InputError as error:
        raise PlanError(f"--grid {axis.name}: {error.message}", hint=error.hint) from error


def axes_of(grid: Sequence[str], known: Collection[str]) -> list[Axis]:
    """The axes of a grid.

    Args:
        grid: each NAME=VALUE,VALUE.
        known: the settings that may vary.

    Raises:
        InputError: an entry is not written so, or names no setting that can vary.
    """
    axes: dict[str, Axis] = {}
    for text in grid:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--")
        if name.startswith(PLAN):
            axis = Axis(name, _plan_values(text, values))
            if not axis.row or not axis.key:
                raise InputError(f"--grid {text}: not plan.ROW.KEY=VALUE,VALUE", hint=PLAN_EXAMPLE)
        else:
            axis = Axis(name.replace("-", "_"), tuple(value.strip() for value in values.split(",")))
            _check_setting(text, axis, known)
        if axis.name in axes:
            raise InputError(f"--grid names {as_flag(axis.name)} twice")
        axes[axis.name] = axis
    return list(axes.values())


def _check_setting(text: str, axis: Axis, known: Collection[str]) -> None:
    flag, values = as_flag(axis.name), axis.values
    if axis.name not in known:
        near = did_you_mean(flag, [as_flag(name) for name in known])
        raise InputError(f"--grid {text}: {flag} is no setting that can vary{near}", hint="guide search -h lists them")
    if values == ("",) or ("" in values and axis.name != "plan") or len(set(map(_known_as, values))) < len(values):
        raise InputError(f"--grid {text}: not NAME=VALUE,VALUE with different values", hint=EXAMPLE)


def _known_as(value: str) -> float | str:
    """A value as it is compared: numbers are equal in whichever way they are written."""
    try:
        return float(value)
    except ValueError:
        return value


def _plan_values(text: str, values: str) -> tuple[Any, ...]:
    """Values of TOML with commas between them; words need no quotes.

    Raises:
        InputError: they are not TOML, there are none, or two are equal.
    """
    try:
        read = tomllib.loads(f"values = [{values}\n]")["values"]
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        if any(sign in values for sign in "[]{}\"'#\n"):
            raise InputError(
                f"--grid {text}: its values are not TOML",
                hint="""texts beside lists have quotes, as in --grid 'plan.next.heads="all",[0, 1]'""",
            ) from None
        read = [_value(word.strip()) for word in values.split(",")]
    if not read or "" in read or any(value in read[:number] for number, value in enumerate(read)):
        raise InputError(f"--grid {text}: not plan.ROW.KEY=VALUE,VALUE with different values", hint=PLAN_EXAMPLE)
    return tuple(read)


def _value(word: str) -> Any:
    """A value of TOML, or else the word itself."""
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except (tomllib.TOMLDecodeError, ValueError):
        return word


def settings_of(axes: Sequence[Axis], rows: Sequence[tuple[int, ...]], plan: Plan | None) -> Iterator[Setting]:
    """Every combination of the values, for each set of rows that is kept in turn.

    Args:
        rows: the sets of rows; empty if this does not vary.
        plan: the plan whose rows they are.
    """
    places = {axis.name: place_of(axis, plan) for axis in axes if plan is not None and axis.is_of_plan}
    every: Sequence[tuple[int, ...] | None] = rows or [None]
    for kept in every:
        # the values of a row that is left out make no difference
        own = [axis for axis in axes if kept is None or places.get(axis.name) in (None, *kept)]
        for point in itertools.product(*(axis.values for axis in own)):
            yield Setting({axis.name: value for axis, value in zip(own, point, strict=True)}, kept)


def left_out_one_by_one(plan: Plan) -> list[tuple[int, ...]]:
    """All rows that are enabled, and these rows without each of them in turn."""
    rows = _rows(plan)
    return [rows, *(tuple(row for row in rows if row != left) for left in rows)]


def subsets(plan: Plan) -> list[tuple[int, ...]]:
    """Every subset of the rows that are enabled, from none to all."""
    rows = _rows(plan)
    return [kept for size in range(len(rows) + 1) for kept in itertools.combinations(rows, size)]


def number_of_rows(plan: Plan) -> int:
    """How many rows are enabled."""
    return len(_rows(plan))


def _rows(plan: Plan) -> tuple[int, ...]:
    return tuple(number for number, guide in enumerate(plan.guides) if guide.enabled)
