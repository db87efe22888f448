"""The sections of a report about trained models: losses over seeds with tests, learning curves with floors."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guidance.errors import GuideError
from pipelines.metrics.significance import paired_t
from pipelines.progress import Progress
from pipelines.report.blocks import Block, Grid, Picture, Section, grids_of_tests, notes_of
from pipelines.report.given import Given, Runs
from pipelines.storage.manifest import digest
from pipelines.views import comparison
from pipelines.views.comparison import Comparison, Row
from pipelines.views.comparison_tables import tables, unit_of
from pipelines.views.curves import Curve, read_curve
from pipelines.views.evaluations import Tested, corrected
from pipelines.views.learning_curves import run_curves

OF_THE_PLAN = ("plan", "masks", "cooccur", "scores", "masking", "masking_run", "continued_from", "seed", "name")
"""Settings and inputs that differ between runs with different plans, or different seeds."""


@dataclass(frozen=True)
class Family:
    """Runs that are compared with each other, the baseline first."""

    label: str
    curves: Sequence[Curve]


def compared(runs: Runs, progress: Progress | None, notes: list[str]) -> list[tuple[Family, Comparison]]:
    """The comparison of the models of every family; a family that cannot be compared is left out, with a note."""
    curves = []
    for each in runs.of("model"):
        try:
            curves.append(read_curve(each.label, runs.store))
        except GuideError as error:
            notes.append(f"{each.label} has no learning curve: {error.message}")
    found = []
    topics = {
        each.label: f"{objective_of(each)} on {runs.data_of(each.artifact.manifest)}" for each in runs.of("model")
    }
    for family in families(curves, topics):
        labels = [curve.label for curve in family.curves]
        try:
            found.append((family, comparison.run(labels, runs.store, group=True, progress=progress)))
        except GuideError as error:
            notes.append(f"{', '.join(labels)} are not compared: {error.message}")
    return found


def objective_of(each: Given) -> str:
    """What a model learned: its objective, or its task."""
    return str(each.config.get("objective") or each.config.get("task") or "")


def families(curves: Sequence[Curve], topics: Mapping[str, str]) -> list[Family]:
    """Group the runs that share loss, objective and training data.

    Where plans were crossed with another setting, such as the number of layers, only runs with the same value of it are compared: a
    run is then compared with a baseline of its own size.

    Args:
        topics: the objective and the data of each run in words, by its label.
    """
    by_data: dict[str, list[Curve]] = {}
    for curve in curves:
        data = {role: content for role, content in curve.origin.inputs.items() if role.startswith("sequences")}
        by_data.setdefault(digest([curve.loss, topics[curve.label], data]), []).append(curve)
    found = []
    for members in by_data.values():
        parts: dict[str, list[Curve]] = {}
        for curve in members:
            parts.setdefault(digest(_besides_plan(curve)), []).append(curve)
        is_crossed = all(len({_plan(curve) for curve in part}) > 1 for part in parts.values())
        for part in parts.values() if is_crossed else [members]:
            topic = topics[part[0].label] if len(by_data) > 1 else ""
            differs = _differences(part, members) if is_crossed else ""
            found.append(Family(", ".join(filter(None, (topic, differs))), part))
    return found


def _besides_plan(curve: Curve) -> list[Any]:
    kept = (
        {k: v for k, v in each.items() if k not in OF_THE_PLAN} for each in (curve.origin.settings, curve.origin.inputs)
    )
    return list(kept)


def _plan(curve: Curve) -> str:
    return str(curve.origin.inputs.get("plan", ""))


def _differences(part: Sequence[Curve], everything: Sequence[Curve]) -> str:
    """How a part differs from the others: ``layers 8``; empty if there are no others."""
    own = part[0].origin.settings
    keys = sorted(
        key
        for key in own
        if key not in OF_THE_PLAN and any(curve.origin.settings.get(key) != own[key] for curve in everything)
    )
    return ", ".join(f"{key.replace('_', ' ')} {own[key]}" for key in keys)


def sections(found: Sequence[tuple[Family, Comparison]], tests: Sequence[Sequence[Tested]]) -> Iterator[Section]:
    """A section for each family: all tables of `guide compare --group`, those of its tests, and the learning curves."""
    for number, ((family, compared), own) in enumerate(zip(found, tests, strict=True), 1):
        suffix = f": {family.label}" if family.label else ""
        name = "training" if len(found) == 1 else f"training-{number}"
        blocks: list[Block] = [*notes_of(compared.notes)]
        blocks += [Grid(f"{name}-{each.name}", each) for each in tables(compared)]
        blocks += grids_of_tests(name, own)
        blocks.append(_curves(f"{name}-curves", compared))
        yield Section(name, f"Training{suffix}", blocks)


def _curves(name: str, compared: Comparison) -> Picture:
    floors = "; dotted lines: what n-gram models reach" if compared.floors else ""
    rows = ", ".join(
        f"{row.group.label} ends at {row.summary['final'].mean:.3f}"
        for row in compared.rows
        if row.summary["final"].mean
    )
    several = any(len(row.group.curves) > 1 for row in compared.rows)
    caption = (
        f"Training loss ({compared.loss}, {unit_of(compared.loss)}, guides left out) over {compared.steps:,} steps{', smoothed' * (compared.window > 1)}"
        f"{', means over seeds with their standard deviation' * several}; markers: validation loss{floors}."
    )
    says = f"Learning curves: {rows}."
    return Picture(name, caption, says, run_curves(compared, form="svg"), run_curves(compared, form="pdf"))


TESTED = {"average": "mean training loss", "final": "final training loss", "valid": "validation loss"}
"""The figures whose differences are tested, in words."""


def tests_of(compared: Comparison) -> list[Tested]:
    """Compare the losses in `TESTED` of every group with those of the baseline: paired t-tests over seeds, at least two pairs each.

    The p-values of all of them are corrected together by Holm's method.
    """
    base, *others = compared.rows
    tests = []
    for row in others:
        for figure, words in TESTED.items():
            pairs = list(_pairs(base, row, figure))
            if len(pairs) > 1 and row.p[figure] is not None:
                first, second = (statistics.fmean(side) for side in zip(*pairs, strict=True))
                difference = paired_t([after - before for before, after in pairs])
                tests.append(Tested(base.group.label, row.group.label, words, first, second, difference, unit="seeds"))
    return corrected(tests)


def _pairs(base: Row, row: Row, figure: str) -> Iterator[tuple[float, float]]:
    """A figure of the baseline and of a group, for each seed that both have."""
    of_seed = {curve.seed: figures[figure] for curve, figures in zip(base.group.curves, base.runs, strict=True)}
    for curve, figures in zip(row.group.curves, row.runs, strict=True):
        before, after = of_seed.get(curve.seed), figures[figure]
        if curve.seed is not None and before is not None and after is not None:
            yield before, after
