"""Compares searches over the same seeds or folds: is the difference of their test metrics significant?

Runs of the same fold and seed are paired.  Seeds are compared by Student's paired t-test.  The folds of a cross-validation share
training examples, so their t-test is corrected (Nadeau & Bengio 2003), each fold counting with the mean over its seeds.  The
p-values of all comparisons are corrected together by Holm's method.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from guidance.errors import InputError
from pipelines.metrics import lower_is_better
from pipelines.metrics.significance import paired_t
from pipelines.stages.folds import VALID_FRACTION
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.training.plan_inputs import inputs_of
from pipelines.training.tasks.summarization import OF_DATA
from pipelines.views.evaluations import Tested, corrected
from pipelines.views.search_tables import labels_of_settings

_Condition = tuple[int | None, tuple[str, ...] | None]
"""The step of pre-training that runs start from, and the rows of the plan that they keep."""

Runs = Mapping[tuple[int, int], Mapping[str, float | None]]
"""The test metrics of the chosen runs, by fold and seed."""
VALIDATION = "validation loss"
"""What is measured of pre-training whose data have no test split."""


@dataclass(frozen=True)
class Reached:
    """When a search along pre-training reaches the last score of another one.

    Attributes:
        metric: its name; ``score``: the last one of the baseline, the mean over seeds and folds.
        steps, seconds: of pre-training until the other search reaches it, between two moments by linear interpolation; None if
            it never does.
        all_steps, all_seconds: of the whole pre-training of the baseline.
    """

    baseline: str
    other: str
    metric: str
    score: float
    steps: float | None
    seconds: float | None
    all_steps: int
    all_seconds: float


def equal_scores(searches: Sequence[Artifact], labels: Sequence[str]) -> list[Reached]:
    """For each metric, after how many steps and seconds other searches reach the last score of the first (paper C, figure 3).

    Empty for searches that are not along pre-training.
    """
    first, *others = (_along(search) for search in searches)
    reached = []
    for other, label in zip(others, labels[1:], strict=True):
        end = max(first, default=0)
        for metric, score in first[end][1].items() if other and first else ():
            if all(metric in means for _, means in other.values()):
                steps = sorted(other)
                values = np.array([other[step][1][metric] for step in steps])
                moment = _crossing(-values, -score) if lower_is_better(metric) else _crossing(values, score)
                when = after = None
                if moment is not None:
                    seconds = [other[step][0] for step in steps]
                    when, after = (float(np.interp(moment, range(len(steps)), each)) for each in (steps, seconds))
                reached.append(Reached(labels[0], label, metric, score, when, after, end, first[end][0]))
    return reached


def _crossing(values: np.ndarray, wanted: float) -> float | None:
    """The first index, between two values by linear interpolation, that is at least ``wanted``; None if there is none."""
    reached = np.flatnonzero(values >= wanted - 1e-12)
    if not len(reached) or not reached[0]:
        return 0.0 if len(reached) else None
    before, after = values[reached[0] - 1 : reached[0] + 1]
    return float(reached[0] - 1 + np.clip((wanted - before) / (after - before), 0, 1))


def _along(search: Artifact) -> dict[int, tuple[float, dict[str, float]]]:
    """For each moment of pre-training its seconds and the mean of each test metric; empty without ``--along``."""
    moments = {}
    rows = [row for row in _rows(search) if row["chosen"]]
    for step in {row["step"] for row in rows} - {None}:
        own = [row for row in rows if row["step"] == step]
        names = [name for name in own[0]["test"] if all(row["test"][name] is not None for row in own)]
        means = {name: statistics.fmean(row["test"][name] for row in own) for name in names}
        moments[int(step)] = own[0]["seconds"], means
    return moments


def _rows(search: Artifact) -> list[dict[str, Any]]:
    """The runs of a search; ``test`` has the test metrics of each."""
    with search.open("runs.parquet") as file:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    tests = (
        {name.removeprefix("test/"): value for name, value in row.items() if name.startswith("test/")} for row in rows
    )
    new = {"step": None, "rows": None, "selected_on": True}  # columns that the first searches do not have
    return [{**new, **row, "test": test} for row, test in zip(rows, tests, strict=True)]


def data_of(search: Artifact) -> str:
    """The beginnings of the digests of a dataset, or of sequences."""
    inputs = search.manifest["inputs"]
    given = [inputs["dataset"]] if "dataset" in inputs else inputs_of("sequences", inputs)
    return " ".join(each["content"][:16] for each in given)


def compare_searches(searches: Sequence[Artifact], labels: Sequence[str]) -> list[Tested]:
    """Each test metric of the first search beside that of every other one.

    Raises:
        ArtifactMismatch: they are of different datasets or tasks, or have other seeds or folds.
        InputError: nothing was tested.
    """
    first, *others = searches
    tests: list[Tested] = []
    for other, label in zip(others, labels[1:], strict=True):
        tasks = [search.counts["task"] for search in (first, other)]
        data = [data_of(search) for search in (first, other)]
        for what, (one, two) in (("task", tasks), ("data", data)):
            if one != two:
                raise ArtifactMismatch(f"{labels[0]} and {label} have not the same {what}: {one} and {two}")
        conditions, others_conditions = (
            _chosen_runs(each, name) for each, name in ((first, labels[0]), (other, label))
        )
        common = [condition for condition in conditions if condition in others_conditions]
        if not common:
            raise _nothing_in_common((labels[0], label), (conditions, others_conditions))
        for condition in common:
            baseline, runs = conditions[condition], others_conditions[condition]
            if runs.keys() != baseline.keys():
                raise ArtifactMismatch(
                    f"{labels[0]} and {label} have other seeds or folds",
                    hint="the same --seed, --seeds, --test-seeds, --folds, --fold-seed",
                )
            tests += _tests(labels[0], label, baseline, runs, _shown(*condition))
    return corrected(tests)


def _nothing_in_common(labels: Sequence[str], conditions: Sequence[Iterable[_Condition]]) -> ArtifactMismatch:
    """The error for two searches of which no runs start alike."""
    over_rows, along = (
        [label for label, some in zip(labels, conditions, strict=True) if any(one[at] is not None for one in some)]
        for at in (1, 0)
    )
    for searched, what, hint in (
        (along, "starts from several steps of pre-training", "--along with the same pre-training"),
        (
            over_rows,
            "varies the rows of its plan",
            f"guide compare {over_rows[0]} compares its rows" if over_rows else "",
        ),
    ):
        if len(searched) == 1:
            (other,) = set(labels) - set(searched)
            return ArtifactMismatch(f"{searched[0]} {what}, and {other} does not", hint=hint)
    return ArtifactMismatch(
        f"{labels[0]} and {labels[1]} start from no common step of pre-training, or keep no common rows of a plan",
        hint="the same --snapshots of `guide pretrain`, and the same rows",
    )


def compare_settings(search: Artifact) -> list[Tested]:
    """Each metric of the first setting of a search that was tested beside that of every other one, such as a plan and the plan
    without one of its rows; empty if there is only one, or one run of each."""
    labels = labels_of_settings(search)
    tests: list[Tested] = []
    moments: dict[int | None, dict[str, dict[tuple[int, int], Mapping[str, float | None]]]] = {}
    for row in measured_runs(search):
        moments.setdefault(row["step"], {}).setdefault(row["setting"], {})[row["fold"], row["seed"]] = row["test"]
    for step, settings in moments.items():
        (first, baseline), *others = settings.items()
        for other, runs in others:
            # in each fold another setting of the grid may have been chosen
            if runs.keys() == baseline.keys() and len(runs) > 1:
                tests += _tests(labels[first], labels[other], baseline, runs, _shown(step, None))
    return corrected(tests)


def _shown(step: int | None, rows: tuple[str, ...] | None) -> str:
    """What to add to the name of a metric."""
    kept = "" if rows is None else f", rows {' + '.join(rows) or 'none'}"
    return ("" if step is None else f", step {step:,}") + kept


def _tests(first: str, other: str, baseline: Runs, runs: Runs, condition: str) -> Iterator[Tested]:
    """A test of each metric that all runs have, and that is of the model."""
    shared_folds = len({fold for fold, _ in runs}) > 1
    every = [*baseline.values(), *runs.values()]
    for metric in every[0]:
        if metric.endswith(OF_DATA) or any(run.get(metric) is None for run in every):
            continue
        before, after = (_by_fold_or_seed(side, metric, shared_folds) for side in (baseline, runs))
        differences = [b - a for a, b in zip(before, after, strict=True)]
        difference = paired_t(differences, shared_folds=shared_folds, held_out=VALID_FRACTION)
        means = statistics.fmean(before), statistics.fmean(after)
        yield Tested(first, other, metric + condition, *means, difference, unit="folds" if shared_folds else "seeds")


def measured_runs(search: Artifact) -> list[dict[str, Any]]:
    """The runs that were tested.  Without a test split these are, of pre-training, all runs, with their validation loss; but if
    there are runs that the choice has not seen, only these."""
    rows = _rows(search)
    tested = [row for row in rows if row["evaluation"]]
    if tested or "dataset" in search.manifest["inputs"]:
        return tested
    fresh = [row for row in rows if not row["selected_on"]] or rows
    return [{**row, "test": {VALIDATION: row["valid"]}} for row in fresh]


def _chosen_runs(search: Artifact, label: str) -> dict[_Condition, Runs]:
    """The runs of the best setting that were tested, by the step of pre-training that they start from and the rows of the plan
    that they keep."""
    runs: dict[_Condition, dict[tuple[int, int], Mapping[str, float | None]]] = {}
    for row in measured_runs(search):
        if row["chosen"]:
            rows = None if row["rows"] is None else tuple(row["rows"])
            runs.setdefault((row["step"], rows), {})[row["fold"], row["seed"]] = row["test"]
    if not runs:
        raise InputError(f"{label}: nothing was tested, because its dataset has no test split")
    return dict(runs)


def _by_fold_or_seed(runs: Runs, metric: str, shared_folds: bool) -> list[float]:
    """The metric of each seed, or its mean over the seeds of each fold."""
    grouped: dict[int, list[float]] = {}
    for (fold, seed), metrics in sorted(runs.items()):
        value = metrics[metric]
        assert value is not None, "only metrics that all runs have"
        grouped.setdefault(fold if shared_folds else seed, []).append(value)
    return [statistics.fmean(values) for values in grouped.values()]
