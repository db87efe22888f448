"""Compare runs with a baseline: loss at equal steps, steps to given losses, n-gram floors; statistics over seeds.

Losses are those of the task, without the losses of guides.  All runs are compared up to the last step of the shortest.
The smoothed loss at a step is the mean over the last ``window`` steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from guidance.errors import InputError, MachineError, UnknownName
from pipelines.progress import Progress
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import inputs_of
from pipelines.training.report import LEFT
from pipelines.views.comparability import check_comparable, repeated_runs, run_notes
from pipelines.views.curves import Curve, Points, read_curve
from pipelines.views.figures import FIGURES, RELATIVE, TESTED, Figures, Summary, figures_of, paired_t_test, steps_to

WINDOW = 50
"""Default number of steps to average training losses over; at most a quarter of the run is used."""

FEW = 1000
"""At fewer tokens a mean loss is uncertain by about a tenth of a nat or more."""


@dataclass(frozen=True)
class Group:
    """One run, or several that differ only in their seed."""

    label: str
    curves: tuple[Curve, ...]


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
    compared = compare(
        groups, window=window or WINDOW, score=score, notes=notes, at=at, power=power, costs=costs, floors=known
    )
    return replace(compared, notes=[*compared.notes, *about_floors])


def floors_of(
    curves: Sequence[Curve], store: Store, notes: list[str], progress: Progress | None = None
) -> dict[str, float]:
    """The n-gram floors of the validation of runs on the same sequences; empty where there are none.

    Args:
        notes: a line is appended if floors are left out, or read at few tokens.
    """
    from pipelines.stages import floors
    from pipelines.training.objectives import OBJECTIVES

    if curves[0].loss not in ("mlm", "clm"):
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
        counted = floors.run(data, config, store=store, progress=progress).artifact.counts
    except (InputError, MachineError) as error:  # the sequences are gone, or only others may write to the store
        notes.append(f"n-gram floors are left out: {error.message}")
        return {}
    if counted["predicted"] < FEW:
        notes.append(f"n-gram floors are read at only {counted['predicted']:,} tokens, so they are rough")
    return dict(counted["nats"])


def grouped(curves: Sequence[Curve], notes: list[str]) -> list[Group]:
    """Group runs whose settings and inputs differ only in the seed, in the order of their first runs.

    Args:
        notes: a line is appended for each run that was given twice, which counts once.

    Raises:
        InputError: two different runs of a group have the same seed.
    """
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        origin = curve.origin
        settings = {key: value for key, value in origin.settings.items() if key != "seed"}
        members = groups.setdefault(digest([settings, dict(origin.inputs)]), [])
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
    labels = common_labels([[member.label for member in members] for members in groups.values()])
    return [Group(label, tuple(members)) for label, members in zip(labels, groups.values(), strict=True)]


def common_labels(groups: Sequence[Sequence[str]]) -> list[str]:
    """A label for each group of runs, no two the same: what its runs share, such as ``plain-*`` for plain-0 and plain-1; its
    first run, ``a +1``, if they share nothing, or if another group shares the same."""
    shared = [_common_label(labels) for labels in groups]
    return [
        label if label and shared.count(label) == 1 else f"{labels[0]} +{len(labels) - 1}"
        for label, labels in zip(shared, groups, strict=True)
    ]


def _common_label(labels: Sequence[str]) -> str:
    """How the labels of several runs begin and end, with a star for the rest; empty if they begin differently."""
    if len(labels) == 1:
        return labels[0]
    prefix = _common_prefix(labels)
    suffix = _common_prefix([label[len(prefix) :][::-1] for label in labels])[::-1]
    return f"{prefix}*{suffix}" if prefix and not prefix.endswith("/") else ""


def _common_prefix(labels: Sequence[str]) -> str:
    """What all labels begin with, without the digits of numbers that differ."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(labels), max(labels), strict=False))
    return "".join(letter for letter, _ in same).rstrip("0123456789")


def _differences(base: Curve, group: Group) -> list[str]:
    """Names of the settings and inputs in which a group differs from the baseline."""
    ours, theirs = base.origin, group.curves[0].origin
    both = ((ours.settings, theirs.settings), (ours.inputs, theirs.inputs))
    keys = {key for one, other in both for key in {*one, *other} if one.get(key) != other.get(key)}
    if "init" in {*ours.inputs, *theirs.inputs}:  # its shape is that of the model it began from
        keys -= {"architecture", "size"}
    return sorted(keys - {"continued_from"} - ({"seed"} if len(group.curves) > 1 else set()))


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
    valid_step = _shared_step("validation losses", {curve.label: curve.valid for curve in partner}, notes)
    score_step = _shared_step("scores", {curve.label: curve.scores.get(score or "", ()) for curve in partner}, notes)
    at = tuple(at) or passed_losses(base[0], window)
    figures = {
        curve: figures_of(curve, other, window, at, costs, score, valid_step, score_step)
        for curve, other in partner.items()
    }
    rows = tuple(_row(group, partner, figures, _differences(base[0], group)) for group in groups)
    notes += [f"{row.group.label} differs from the baseline in {', '.join(row.differs)}" for row in rows if row.differs]
    notes += _above_floors(whole, floors)
    notes += _other_masks(partner)
    if power is not None and not any(row.num_pairs > 1 for row in rows[1:]):
        notes.append(
            "how many seeds an effect needs follows from the spread of at least two pairs of runs: give more seeds, and"
            " --group"
        )
    return Comparison(whole[0].loss, steps, window, score, rows, notes, at, floors, power)


def passed_losses(curve: Curve, window: int) -> tuple[float, ...]:
    """The losses that a run has passed after a quarter, a half and all of its steps, rounded up to hundredths."""
    smoothed = curve.smoothed(window)
    steps = (max(0, len(smoothed) // part - 1) for part in (4, 2, 1))
    return tuple(sorted({math.ceil(100 * float(smoothed[step])) / 100 for step in steps}, reverse=True))


def _above_floors(curves: Sequence[Curve], floors: Mapping[str, float]) -> list[str]:
    """Notes on runs that have learned nothing from context.

    Runs of other seeds mask other tokens, so each is held against its own floor, or, if that is not known, the one that is shown.
    """
    if "unigram" not in floors:
        return []
    own = {curve: floors["unigram"] if curve.floor is None else curve.floor for curve in curves}
    above = [curve for curve in curves if curve.valid and curve.valid[-1][1] > own[curve] - LEFT]
    if not above:
        return []
    return [
        "no better than word frequencies alone, so a comparison with it says nothing about a model that has been trained: "
        + ", ".join(f"{curve.label} (they give {own[curve]:.2f} nats)" for curve in above)
    ]


def _other_masks(partner: Mapping[Curve, Curve | None]) -> list[str]:
    """Notes on runs of masked words that are compared with a run of another seed, whose validation masks other words."""
    notes = []
    for curve, base in partner.items():
        if base is not None and curve.loss == "mlm" and curve.seed != base.seed:
            known = [each.floor for each in (base, curve) if each.floor is not None]
            easier = f": word frequencies give {' and '.join(f'{nats:.2f}' for nats in known)} nats there" * (
                len(known) == 2
            )
            notes.append(
                f"{base.label} and {curve.label} have other seeds, so their validations mask other words{easier}"
            )
    return notes


def _row(
    group: Group, partner: Mapping[Curve, Curve | None], figures: Mapping[Curve, Figures], differs: list[str]
) -> Row:
    pairs = [(figures[curve], figures[other]) for curve in group.curves if (other := partner[curve])]
    runs = tuple(figures[curve] for curve in group.curves)
    paired = [ours for ours, _ in pairs]
    summary = {name: Summary.of(run[name] for run in (paired if name in RELATIVE else runs)) for name in runs[0]}
    difference = {name: Summary.of(_minus(ours[name], theirs[name]) for ours, theirs in pairs) for name in TESTED}
    p = {name: paired_t_test(summary) for name, summary in difference.items()}
    return Row(group, runs, summary, difference, p, len(pairs), differs)


def _column(score: str, curves: Sequence[Curve]) -> str:
    known = sorted({name for curve in curves for name in curve.scores})
    name = score if score.startswith("eval/") else f"eval/{score}"
    if name not in known:
        raise UnknownName("score", score, known)
    return name


def _shared_step(what: str, series: Mapping[str, Points], notes: list[str]) -> int | None:
    """The last step that all non-empty series, by the labels of their runs, have; None if there is none.  Notes are appended
    if some series have later ones, and on those that are empty beside others."""
    steps = [{step for step, _ in points} for points in series.values() if points]
    if steps and (without := [label for label, points in series.items() if not points]):
        notes.append(f"no {what} in the steps that are compared: {', '.join(without)}")
    shared = max(set.intersection(*steps), default=None) if steps else None
    if steps and shared is None:
        last = (f"step {points[-1][0]:,} of {label}" for label, points in series.items() if points)
        notes.append(f"{what} have no step in common; the last one of each run is used: {', '.join(last)}")
    elif any(max(known) != shared for known in steps):
        notes.append(f"{what} are those of step {shared:,}, the last step at which all runs have one")
    return shared


def _partner(baseline: Sequence[Curve], curve: Curve, group: Group) -> Curve | None:
    """The run of the baseline that a run is compared with."""
    if len(baseline) == len(group.curves) == 1:
        return baseline[0]
    return next((other for other in baseline if curve.seed is not None and other.seed == curve.seed), None)


def _minus(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours - theirs
