"""Compare runs with a baseline: loss at equal steps, steps and seconds to equal loss, speed; statistics over seeds.

Losses are those of the task, without the losses of guides.  All runs are compared up to the last step of the shortest.
The smoothed loss at a step is the mean over the last ``window`` steps.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from guidance.errors import InputError, UnknownName
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.views.comparability import check_comparable, repeated_runs, run_notes
from pipelines.views.curves import Curve, Points, read_curve
from pipelines.views.significance import paired_t

WINDOW = 50
"""Default number of steps to average training losses over; at most a quarter of the run is used."""

FIGURES = {
    "average": "mean training loss over all steps",
    "loss_25": "smoothed training loss after a quarter of the steps",
    "loss_50": "after half of them",
    "loss_75": "after three quarters",
    "final": "smoothed training loss after the last step",
    "valid": "validation loss, at the last step at which all runs have one",
    "best_valid": "lowest validation loss",
    "tokens_per_second": "tokens by seconds of training, validation and saving left out",
    "seconds": "seconds of training",
    "steps_to_equal_loss": "first step at which the smoothed loss is down at the final one of the baseline",
    "share_of_steps": "that step by the number of steps",
    "seconds_to_equal_loss": "seconds up to the end of that step",
    "share_of_seconds": "these by the seconds of the baseline",
    "equal_seconds": "seconds after which the first of run and baseline ends",
    "loss_at_equal_seconds": "smoothed loss of the run then",
    "baseline_at_equal_seconds": "smoothed loss of the baseline then",
    "score": "the score, at the last step at which all runs have one",
    "best_score": "best score",
    "steps_to_equal_score": "first step at which the score is as good as the last one of the baseline",
}
"""The figures of a run, in output order; a figure is None where it is not defined."""

TESTED = ("average", "loss_25", "loss_50", "loss_75", "final", "valid", "best_valid", "score", "best_score")
"""Figures whose difference from the baseline is computed and tested."""

RELATIVE = {
    *("steps_to_equal_loss", "share_of_steps", "seconds_to_equal_loss", "share_of_seconds", "steps_to_equal_score"),
    *("equal_seconds", "loss_at_equal_seconds", "baseline_at_equal_seconds"),
}
"""Figures that compare a run with its partner in the baseline."""

Figures = dict[str, float | None]

LOWER_IS_BETTER = ("loss", "nll", "perplexity", "error")
"""Endings of the names of scores for which lower is better."""


@dataclass(frozen=True)
class Group:
    """One run, or several that differ only in their seed."""

    label: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Summary:
    """One figure of the runs of a group.

    Attributes:
        values: one per run; None where the figure is not defined.
        mean: None unless all runs have a value.
        sd: sample standard deviation; None for fewer than two runs.
    """

    values: tuple[float | None, ...]
    mean: float | None = None
    sd: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Summary:
        values = tuple(values)
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return cls(values)
        return cls(values, statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    @property
    def known(self) -> int:
        return sum(value is not None for value in self.values)


@dataclass(frozen=True)
class Row:
    """The results of one group.

    Attributes:
        runs: the figures of each run, by their names in `FIGURES`; for a run without a partner in the baseline, those
            in `RELATIVE` are None.
        summary: each figure over all runs; those in `RELATIVE` over the runs that have a partner.
        difference: figures in `TESTED`, run minus partner, over all pairs.
        p: p-value of a two-sided paired t-test that the mean difference is 0; None for fewer than two pairs, or if all
            differences are equal.
        num_pairs: number of runs with a partner of the same seed in the baseline.
        differs: settings and inputs in which the first run differs from the first run of the baseline.
    """

    group: Group
    runs: tuple[Figures, ...]
    summary: dict[str, Summary]
    difference: dict[str, Summary]
    p: dict[str, float | None]
    num_pairs: int
    differs: list[str]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, the baseline first, compared over ``steps`` steps."""

    loss: str
    steps: int
    window: int
    score: str | None
    rows: tuple[Row, ...]
    notes: list[str] = field(default_factory=list)


def run(
    references: Sequence[str],
    store: Store,
    *,
    loss: str | None = None,
    score: str | None = None,
    group: bool = False,
    window: int | None = None,
) -> Comparison:
    """Compare runs, finished or not, with the first of them.

    Args:
        references: names, ids or paths of model artifacts, or ``model/<id>`` of unfinished runs.
        loss: the loss to compare, by default the first one of each run.
        score: also compare this column, ``eval/<task>/<metric>``.
        group: group runs that differ only in their seed.
        window: steps to average training losses over; `WINDOW` by default.

    Raises:
        ArtifactMissing, NumericalError: see `pipelines.views.curves.read_curve`.
        InputError: the runs cannot be compared, or two runs of a group have the same seed.
    """
    curves = [read_curve(reference, store, loss=loss) for reference in references]
    notes = [] if group else repeated_runs(curves)
    groups = grouped(curves, notes) if group else [Group(curve.label, (curve,)) for curve in curves]
    notes += check_comparable(curves, store, chosen=loss is not None) + run_notes(curves)
    return compare(groups, window=window or WINDOW, score=score, notes=notes)


def grouped(curves: Sequence[Curve], notes: list[str]) -> list[Group]:
    """Group runs whose settings and inputs differ only in the seed, in the order of their first runs.

    Args:
        notes: a line is appended for each run that was given twice, which counts once.

    Raises:
        InputError: two different runs of a group have the same seed.
    """
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        origin = curve.origin
        settings = {key: value for key, value in origin.settings.items() if key != "seed"}
        key = digest([settings, dict(origin.inputs)])
        members = found.setdefault(key, [])
        twin = next((other for other in members if other.seed == curve.seed), None)
        if twin is None:
            members.append(curve)
        elif twin.origin.reference == origin.reference:
            notes.append(f"{curve.label} is the same run as {twin.label} and counts once")
        else:
            raise InputError(
                f"{twin.label} and {curve.label} have the same settings and the same seed, {curve.seed}",
                hint="leave one of them out",
            )
    return [Group(_common_label([member.label for member in members]), tuple(members)) for members in found.values()]


def _common_label(labels: Sequence[str]) -> str:
    """One label for several runs: ``plain-*`` for plain-0 and plain-1; without a common prefix, ``a +1``."""
    if len(labels) == 1:
        return labels[0]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(labels), max(labels), strict=False))
    prefix = "".join(letter for letter, _ in same).rstrip("0123456789")
    return f"{prefix}*" if prefix and not prefix.endswith("/") else f"{labels[0]} +{len(labels) - 1}"


def _differences(base: Curve, group: Group) -> list[str]:
    """Names of the settings and inputs in which a group differs from the baseline."""
    ours, theirs = base.origin, group.curves[0].origin
    found = {
        key
        for one, other in ((ours.settings, theirs.settings), (ours.inputs, theirs.inputs))
        for key in {*one, *other}
        if one.get(key) != other.get(key)
    }
    return sorted(found - {"continued_from"} - ({"seed"} if len(group.curves) > 1 else set()))


# figures


def compare(
    groups: Sequence[Group], *, window: int = WINDOW, score: str | None = None, notes: Sequence[str] = ()
) -> Comparison:
    """Compare every run with its partner in the first group: the run of the same seed.

    If both groups are a single run, those are partners whatever their seeds.

    Raises:
        UnknownName: no run has the score.
    """
    whole = [curve for group in groups for curve in group.curves]
    notes = list(notes)
    score = _column(score, whole) if score else None
    shortest = min(whole, key=lambda curve: len(curve.losses))
    steps = len(shortest.losses)
    window = min(window, max(1, steps // 4))
    if any(len(curve.losses) > steps for curve in whole):
        notes.append(f"compared up to step {steps:,}, where {shortest.label} ends")
    groups = [Group(group.label, tuple(curve.until(steps) for curve in group.curves)) for group in groups]
    base = groups[0].curves
    partner = {curve: _partner(base, curve, group) for group in groups for curve in group.curves}
    if unpaired := [curve.label for curve, other in partner.items() if other is None]:
        notes.append(f"in no pair, since the baseline has no run of the same seed: {', '.join(unpaired)}")
    valid_step = _shared_step("validation losses", [curve.valid for curve in partner], notes)
    score_step = _shared_step("scores", [curve.scores.get(score or "", ()) for curve in partner], notes)
    figures = {
        curve: _own_figures(curve, window, valid_step)
        | _relative_figures(curve, other, window)
        | _score_figures(curve, other, score, score_step)
        for curve, other in partner.items()
    }
    rows = tuple(_row(group, partner, figures, _differences(base[0], group)) for group in groups)
    notes += [f"{row.group.label} differs from the baseline in {', '.join(row.differs)}" for row in rows if row.differs]
    return Comparison(whole[0].loss, steps, window, score, rows, notes)


def _row(
    group: Group, partner: Mapping[Curve, Curve | None], figures: Mapping[Curve, Figures], differs: list[str]
) -> Row:
    pairs = [(figures[curve], figures[other]) for curve in group.curves if (other := partner[curve])]
    runs = tuple(figures[curve] for curve in group.curves)
    paired = [found for found, _ in pairs]
    summary = {name: Summary.of(run[name] for run in (paired if name in RELATIVE else runs)) for name in FIGURES}
    difference = {name: Summary.of(_minus(ours[name], theirs[name]) for ours, theirs in pairs) for name in TESTED}
    p = {name: paired_t_test(found) for name, found in difference.items()}
    return Row(group, runs, summary, difference, p, len(pairs), differs)


def _column(score: str, curves: Sequence[Curve]) -> str:
    known = sorted({name for curve in curves for name in curve.scores})
    name = score if score.startswith("eval/") else f"eval/{score}"
    if name not in known:
        raise UnknownName("score", score, known)
    return name


def _shared_step(what: str, series: Sequence[Points], notes: list[str]) -> int | None:
    """The last step that all non-empty series have.  If there is none: None, and a note is appended."""
    steps = [{step for step, _ in points} for points in series if points]
    shared = max(set.intersection(*steps), default=None) if steps else None
    if steps and shared is None:
        notes.append(f"{what} have no step in common; the last one of each run is used")
    return shared


def _partner(baseline: Sequence[Curve], curve: Curve, group: Group) -> Curve | None:
    """The run of the baseline that a run is compared with."""
    if len(baseline) == len(group.curves) == 1:
        return baseline[0]
    return next((other for other in baseline if curve.seed is not None and other.seed == curve.seed), None)


def _own_figures(curve: Curve, window: int, valid_step: int | None) -> Figures:
    """The figures that depend on this run alone."""
    smoothed, num_steps = curve.smoothed(window), len(curve.losses)
    quarters = {f"loss_{25 * q}": float(smoothed[max(0, num_steps * q // 4 - 1)]) for q in (1, 2, 3)}
    return {
        "average": statistics.fmean(curve.losses),
        **quarters,
        "final": float(smoothed[-1]),
        "valid": _value_at(curve.valid, valid_step),
        "best_valid": min((value for _, value in curve.valid), default=None),
        "tokens_per_second": curve.tokens_per_second,
        "seconds": float(curve.elapsed()[-1]),
    }


def _relative_figures(curve: Curve, other: Curve | None, window: int) -> Figures:
    """The figures in `RELATIVE`, except that of scores."""
    if other is None:
        return dict.fromkeys(RELATIVE)
    elapsed, others = curve.elapsed(), other.elapsed()
    step = curve.first_step_at(float(other.smoothed(window)[-1]), window)
    seconds = None if step is None else float(elapsed[step - 1])
    end = float(min(elapsed[-1], others[-1]))
    return {
        "steps_to_equal_loss": step,
        "share_of_steps": None if step is None else step / len(curve.losses),
        "seconds_to_equal_loss": seconds,
        "share_of_seconds": seconds / float(others[-1]) if seconds is not None and others[-1] > 0 else None,
        "equal_seconds": end,
        "loss_at_equal_seconds": _loss_after(curve, end, window),
        "baseline_at_equal_seconds": _loss_after(other, end, window),
    }


def _score_figures(curve: Curve, other: Curve | None, score: str | None, step: int | None) -> Figures:
    points = curve.scores.get(score, ()) if score else ()
    sign = -1 if score and lower_is_better(score) else 1
    goal = _value_at(other.scores.get(score, ()), step) if other and score else None
    reached = (at for at, value in points if goal is not None and sign * value >= sign * goal)
    return {
        "score": _value_at(points, step),
        "best_score": max((value for _, value in points), key=lambda value: sign * value, default=None),
        "steps_to_equal_score": next(reached, None),
    }


def lower_is_better(score: str) -> bool:
    """Whether a column ``eval/<task>/<metric>`` is a loss."""
    return score.endswith(LOWER_IS_BETTER)


def _value_at(points: Points, step: int | None) -> float | None:
    """The value at a step, or the last value if ``step`` is None; None if there is no such value."""
    return next((value for at, value in reversed(points) if step in (None, at)), None)


def _loss_after(curve: Curve, seconds: float, window: int) -> float | None:
    """The smoothed loss after the last step that ended within this time."""
    import numpy as np

    done = int(np.searchsorted(curve.elapsed(), seconds, side="right"))
    return float(curve.smoothed(window)[done - 1]) if done else None


def _minus(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours - theirs


def paired_t_test(difference: Summary) -> float | None:
    """Two-sided p-value for a mean difference of 0; None for fewer than two pairs, or if all differences are equal."""
    if difference.mean is None or difference.sd is None:
        return None
    if difference.sd <= 1e-12 * max(abs(value or 0.0) for value in difference.values):
        return None
    return paired_t([value for value in difference.values if value is not None]).p
