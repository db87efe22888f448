"""Compares searches over the same seeds or folds: is the difference of their test metrics more than chance?

Runs of the same fold and seed are paired.  Seeds are compared by Student's paired t-test.  The folds of a cross-validation share
training examples, so their t-test is corrected (Nadeau & Bengio 2003), each fold counting with the mean over its seeds.  The
p-values of all comparisons are corrected together by Holm's method.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow.parquet as pq

from guidance.errors import InputError
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.views.evaluations import Tested
from pipelines.views.significance import holm, paired_t

Runs = Mapping[tuple[int, int], Mapping[str, float | None]]
"""The test metrics of the chosen runs, by fold and seed."""


def compare_searches(searches: Sequence[Artifact], labels: Sequence[str]) -> list[Tested]:
    """Each test metric of the first search beside that of every other one.

    Raises:
        ArtifactMismatch: they are of different datasets or tasks, or have other seeds or folds.
        InputError: nothing was tested.
    """
    first, *others = searches
    baseline = _tested_runs(first, labels[0])
    found: list[Tested] = []
    for other, label in zip(others, labels[1:], strict=True):
        for what in ("task", "dataset"):
            one, two = (_fact(search, what) for search in (first, other))
            if one != two:
                raise ArtifactMismatch(f"{labels[0]} and {label} have not the same {what}: {one[:16]} and {two[:16]}")
        runs = _tested_runs(other, label)
        if runs.keys() != baseline.keys():
            raise ArtifactMismatch(
                f"{labels[0]} and {label} have other seeds or folds",
                hint="the same --seed, --seeds, --folds, --fold-seed",
            )
        shared_folds = len({fold for fold, _ in runs}) > 1
        for metric in _metrics(baseline, runs):
            before, after = (_by_fold_or_seed(side, metric, shared_folds) for side in (baseline, runs))
            differences = [b - a for a, b in zip(before, after, strict=True)]
            difference = paired_t(differences, shared_folds=shared_folds)
            means = statistics.fmean(before), statistics.fmean(after)
            unit = "folds" if shared_folds else "seeds"
            found.append(Tested(labels[0], label, metric, *means, difference, unit=unit))
    corrected = holm([tested.difference.p for tested in found])
    return [replace(tested, corrected=p) for tested, p in zip(found, corrected, strict=True)]


def _fact(search: Artifact, what: str) -> str:
    return str(search.counts["task"] if what == "task" else search.manifest["inputs"]["dataset"]["content"])


def _tested_runs(search: Artifact, label: str) -> Runs:
    with search.open("runs.parquet") as file:
        rows = pq.read_table(file).to_pylist()
    found = {
        (row["fold"], row["seed"]): {
            name.removeprefix("test/"): value for name, value in row.items() if name.startswith("test/")
        }
        for row in rows
        if row["chosen"] and row["evaluation"]
    }
    if not found:
        raise InputError(f"{label}: nothing was tested, because its dataset has no test split")
    return found


def _metrics(one: Runs, other: Runs) -> list[str]:
    """The metrics that all runs of both searches have."""
    runs = [*one.values(), *other.values()]
    return [name for name in runs[0] if all(run.get(name) is not None for run in runs)]


def _by_fold_or_seed(runs: Runs, metric: str, shared_folds: bool) -> list[float]:
    """The metric of each seed, or its mean over the seeds of each fold."""
    grouped: dict[int, list[float]] = {}
    for (fold, seed), metrics in sorted(runs.items()):
        value = metrics[metric]
        assert value is not None, "see _metrics"
        grouped.setdefault(fold if shared_folds else seed, []).append(value)
    return [statistics.fmean(values) for values in grouped.values()]
