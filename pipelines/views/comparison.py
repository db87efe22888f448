"""Compare runs with a baseline: loss at equal steps, steps to given losses, n-gram floors; statistics over seeds.

Losses are those of the task, without the losses of guides.  All runs are compared up to the last step of the shortest.
The smoothed loss at a step is the mean over the last ``window`` steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from guidance.errors import InputError, MachineError, UnknownName
from guidance.tasks.significance import paired_t
from pipelines.progress import Progress
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import inputs_of
from pipelines.training.report import LEFT
from pipelines.views.comparability import check_comparable, repeated_runs, run_notes
from pipelines.views.curves import Curve, Points, read_curve

WINDOW = 50
"""Default number of steps to average training losses over; at most a quarter of the run is used."""

MOST_PAIRS = 1000
"""The search for a number of seeds ends there."""

FEW = 1000
"""At fewer tokens a mean loss is uncertain by about a tenth of a nat or more."""

FIGURES = {
    "average": "mean training loss over all steps: the area under the curve by the number of steps",
    "loss_25": "smoothed training loss after a quarter of the steps",
    "loss_50": "after half of them",
    "loss_75": "after three quarters",
    "final": "smoothed training loss after the last step",
    "valid": "validation loss, at the last step at which all runs have one",
    "best_valid": "lowest validation loss",
    "tokens_per_second": "tokens by seconds of training, validation and saving left out",
    "seconds": "seconds of training",
    "step_seconds": "seconds of a step, timed one run after the other, at the start of training",
    "equal_seconds": "seconds after which the first of run and baseline would end, at these seconds a step",
    "loss_at_equal_seconds": "smoothed loss of the run then",
    "baseline_at_equal_seconds": "smoothed loss of the baseline then",
    "score": "the score, at the last step at which all runs have one",
    "best_score": "best score",
    "steps_to_equal_score": "first step at which the score is as good as the last one of the baseline",
}
"""The figures of a run, in output order; a figure is None where it is not defined.  `Comparison.figures` has those of
the losses that are asked for, too."""

TESTED = ("average", "loss_25", "loss_50", "loss_75", "final", "valid", "best_valid", "score", "best_score")
"""Figures whose difference from the baseline is computed and tested."""

RELATIVE = {*("steps_to_equal_score", "equal_seconds", "loss_at_equal_seconds", "baseline_at_equal_seconds")}
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
    """Groups of runs, the baseline first, compared over ``steps`` steps.

    Attributes:
        at: losses; when runs have first reached them is among the figures.
        floors: validation losses of models that only count, by name; on the same sequences, masked with seed 0.
        power: the size of an effect, in nats, for which the number of seeds is asked; None for no question.
    """

    loss: str
    steps: int
    window: int
    score: str | None
    rows: tuple[Row, ...]
    notes: list[str] = field(default_factory=list)
    at: tuple[float, ...] = ()
    floors: Mapping[str, float] = field(default_factory=dict)
    power: float | None = None

    @property
    def figures(self) -> dict[str, str]:
        """The figures of a run by name, each with its definition."""
        return FIGURES | {
            steps_to(loss): f"first step at which the smoothed loss is down at {loss:g}" for loss in self.at
        }


def steps_to(loss: float) -> str:
    """The name of the figure that says when a run has reached a loss."""
    return f"steps_to_{loss:g}"


def run(
    references: Sequence[str],
    store: Store,
    *,
    loss: str | None = None,
    score: str | None = None,
    group: bool = False,
    window: int | None = None,
    at: Sequence[float] = (),
    power: float | None = None,
    timed: bool = False,
    with_floors: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compare runs, finished or not, with the first of them.

    Args:
        references: names, ids or paths of model artifacts, or ``model/<id>`` of unfinished runs.
        loss: the loss to compare, by default the first one of each run.
        score: also compare this column, ``eval/<task>/<metric>``.
        group: group runs that differ only in their seed.
        window: steps to average training losses over; `WINDOW` by default.
        at: losses; when has each run first reached them?  By default some that the baseline passes.
        power: an effect in nats; how many seeds would find it?
        timed: measure the seconds of a step of every run, now and one after the other.
        with_floors: count n-grams, unless the store has the result.

    Raises:
        ArtifactMissing, NumericalError: see `pipelines.views.curves.read_curve`.
        InputError: the runs cannot be compared, two runs of a group have the same seed, or one cannot be timed.
    """
    curves = [read_curve(reference, store, loss=loss) for reference in references]
    notes = [] if group else repeated_runs(curves)
    groups = grouped(curves, notes) if group else [Group(curve.label, (curve,)) for curve in curves]
    notes += check_comparable(curves, store, chosen=loss is not None) + run_notes(curves)
    costs: Mapping[str, float] = {}
    if timed:
        from pipelines.views.timing import step_seconds

        costs = step_seconds([curve.origin.reference for curve in curves], store, progress=progress)
    about_floors: list[str] = []
    known = floors_of(curves, store, about_floors, progress) if with_floors else {}
    found = compare(
        groups, window=window or WINDOW, score=score, notes=notes, at=at, power=power, costs=costs, floors=known
    )
    return replace(found, notes=[*found.notes, *about_floors])


def floors_of(
    curves: Sequence[Curve], store: Store, notes: list[str], progress: Progress | None = None
) -> dict[str, float]:
    """The n-gram floors of the validation of runs on the same sequences; empty where there are none.

    Args:
        notes: a line is appended if floors are left out, or read at few tokens.
    """
    from pipelines.stages import floors
    from pipelines.training.objectives import OBJECTIVES

    if curves[0].loss != "mlm":
        return {}
    origin = next((curve.origin for curve in curves if curve.origin.finished), None)
    if origin is None:
        notes.append("n-gram floors are left out, because no run has finished")
        return {}
    row = OBJECTIVES.get(origin.settings.get("objective", ""))
    if row is None or not row.floors:
        return {}
    if len(inputs_of("sequences", origin.inputs)) != 1:
        notes.append("n-gram floors are left out, because the runs read several sequences artifacts")
        return {}
    probability = origin.settings.get("mask_probability", floors.Config().mask_probability)
    config = floors.Config(
        layout=row.floors, mask_probability=probability, limit=origin.settings.get("valid_sequences", 0)
    )
    try:
        with store.load(origin.reference, kind="model", verify=False) as model:
            data = store.load_input(model, "sequences", verify=False).reference
        found = floors.run(data, config, store=store, progress=progress).artifact.counts
    except (InputError, MachineError) as error:  # the sequences are gone, or only others may write to the store
        notes.append(f"n-gram floors are left out: {error.message}")
        return {}
    if found["predicted"] < FEW:
        notes.append(f"n-gram floors are read at only {found['predicted']:,} masked tokens, so they are rough")
    return dict(found["nats"])


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
    groups: Sequence[Group],
    *,
    window: int = WINDOW,
    score: str | None = None,
    notes: Sequence[str] = (),
    at: Sequence[float] = (),
    power: float | None = None,
    costs: Mapping[str, float] = MappingProxyType({}),
    floors: Mapping[str, float] = MappingProxyType({}),
) -> Comparison:
    """Compare every run with its partner in the first group: the run of the same seed.

    If both groups are a single run, those are partners whatever their seeds.

    Args:
        at, power: see `run`.
        costs: seconds of a step measured alone, by the reference of the run.
        floors: see `Comparison`.

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
    at = tuple(at) or passed_losses(base[0], window)
    figures = {
        curve: _own_figures(curve, window, valid_step)
        | {steps_to(loss): curve.first_step_at(loss, window) for loss in at}
        | _at_equal_seconds(curve, other, window, costs)
        | _score_figures(curve, other, score, score_step)
        for curve, other in partner.items()
    }
    rows = tuple(_row(group, partner, figures, _differences(base[0], group)) for group in groups)
    notes += [f"{row.group.label} differs from the baseline in {', '.join(row.differs)}" for row in rows if row.differs]
    notes += _above_floors(whole, floors)
    if power is not None and not any(row.num_pairs > 1 for row in rows[1:]):
        notes.append(
            "how many seeds an effect needs follows from the spread of at least two pairs of runs: give more seeds, and"
            " --group"
        )
    return Comparison(whole[0].loss, steps, window, score, rows, notes, at, floors, power)


def passed_losses(curve: Curve, window: int) -> tuple[float, ...]:
    """The losses that a run has passed after a quarter, a half and all of its steps, rounded up to hundredths."""
    smoothed = curve.smoothed(window)
    places = (max(0, len(smoothed) // part - 1) for part in (4, 2, 1))
    return tuple(sorted({math.ceil(100 * float(smoothed[place])) / 100 for place in places}, reverse=True))


def _above_floors(curves: Sequence[Curve], floors: Mapping[str, float]) -> list[str]:
    """Notes on runs that have learned nothing from context."""
    unigram = floors.get("unigram", -math.inf)
    found = [curve.label for curve in curves if curve.valid and curve.valid[-1][1] > unigram - LEFT]
    if not found or not floors:
        return []
    return [
        f"no better than word frequencies alone ({unigram:.2f} nats), so a comparison with it says nothing about a"
        f" model that has been trained: {', '.join(found)}"
    ]


def _row(
    group: Group, partner: Mapping[Curve, Curve | None], figures: Mapping[Curve, Figures], differs: list[str]
) -> Row:
    pairs = [(figures[curve], figures[other]) for curve in group.curves if (other := partner[curve])]
    runs = tuple(figures[curve] for curve in group.curves)
    paired = [found for found, _ in pairs]
    summary = {name: Summary.of(run[name] for run in (paired if name in RELATIVE else runs)) for name in runs[0]}
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


def _at_equal_seconds(curve: Curve, other: Curve | None, window: int, costs: Mapping[str, float]) -> Figures:
    """The losses of a run and its partner when the first of them would end, if each step took what it takes alone."""
    found: Figures = dict.fromkeys(
        ("step_seconds", "equal_seconds", "loss_at_equal_seconds", "baseline_at_equal_seconds")
    )
    mine = found["step_seconds"] = costs.get(curve.origin.reference)
    theirs = costs.get(other.origin.reference) if other else None
    if mine is None or theirs is None or other is None:
        return found
    end = min(mine * len(curve.losses), theirs * len(other.losses))
    # the last step that ends in time; a rounding error does not make it one less
    mine_at, theirs_at = (int(end / cost + 1e-6) for cost in (mine, theirs))
    return found | {
        "equal_seconds": end,
        "loss_at_equal_seconds": float(curve.smoothed(window)[mine_at - 1]) if mine_at else None,
        "baseline_at_equal_seconds": float(other.smoothed(window)[theirs_at - 1]) if theirs_at else None,
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


def _minus(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours - theirs


def paired_t_test(difference: Summary) -> float | None:
    """Two-sided p-value for a mean difference of 0; None for fewer than two pairs, or if all differences are equal."""
    if difference.mean is None or difference.sd is None:
        return None
    if difference.sd <= 1e-12 * max(abs(value or 0.0) for value in difference.values):
        return None
    return paired_t([value for value in difference.values if value is not None]).p


def seeds_needed(difference: Summary, effect: float, *, level: float = 0.05, power: float = 0.8) -> int | None:
    """How many pairs of runs a two-sided paired t-test needs to find an effect of this size.

    Args:
        difference: those of the pairs that there are; only their standard deviation is used.

    Returns:
        None if there are fewer than two pairs, or if more than `MOST_PAIRS` would be needed.
    """
    from scipy import stats

    if difference.sd is None or effect <= 0:
        return None
    for pairs in range(2, MOST_PAIRS + 1):
        bound = stats.t.ppf(1 - level / 2, pairs - 1)
        shift = effect / max(difference.sd, 1e-12) * math.sqrt(pairs)
        if shift > 100 or stats.nct.sf(bound, pairs - 1, shift) >= power:
            return pairs
    return None
