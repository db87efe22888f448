"""Comparisons of evaluations and of searches as tables for people, and as JSON for programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pipelines.views.comparison_tables import MISSING, Table, rounded
from pipelines.views.evaluations import Tested
from pipelines.views.searches import Reached


def tables_of_tests(tests: Sequence[Tested], label: Mapping[str, str] = MappingProxyType({})) -> list[Table]:
    """A table for the baseline and each of the others, with a row for each metric.

    Args:
        label: what to call the baseline and the others; those that it does not have keep their own label.
    """
    tables = []
    for (baseline, other), of_pair in itertools.groupby(tests, lambda tested: (tested.baseline, tested.other)):
        rows = []
        for tested in of_pair:
            difference = tested.difference
            values = [
                *(rounded(mean, ".4f") for mean in (tested.first, tested.second)),
                rounded(difference.effect, "+.4f"),
            ]
            interval = (
                ""
                if math.isnan(difference.low)
                else " to ".join(rounded(end, "+.4f") for end in (difference.low, difference.high))
            )
            ps = (MISSING if math.isnan(p) else f"{p:.4f}" for p in (difference.p, tested.corrected))
            test = (
                f"{difference.test}, {difference.n:,} {tested.unit}"
                if difference.n > 1
                else f"needs several {tested.unit}"
            )
            rows.append([tested.metric, *values, interval, *ps, test])
        sides = (label.get(baseline, baseline), label.get(other, other))
        titles = ["metric", *sides, "difference", "95 % interval", "p", "corrected p", "test"]
        tables.append(Table(f"{sides[1]} compared with {sides[0]}", titles, rows))
    return tables


def reached_tables(reached: Sequence[Reached], label: Mapping[str, str] = MappingProxyType({})) -> list[Table]:
    """When searches along pre-training reach the last score of the baseline, as a table; none if ``reached`` is empty.  For
    ``label`` see `tables_of_tests`."""
    titles = ["metric", "baseline", "other", "last score", "steps to it", "of", "seconds to it", "of"]
    rows = []
    for each in reached:
        steps, seconds = ("never" if when is None else f"{when:,.0f}" for when in (each.steps, each.seconds))
        of = [f"{each.score:.4f}", steps, f"{each.all_steps:,}", seconds, f"{each.all_seconds:,.0f}"]
        sides = (label.get(name, name) for name in (each.baseline, each.other))
        rows.append([each.metric, *sides, *of])
    return [Table("steps and seconds to the last score of the baseline", titles, rows)] if rows else []


def as_json(tested: Tested) -> dict[str, Any]:
    """A comparison in JSON's types; a number that its test does not give, such as the interval of a single seed, is null."""
    difference = {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in vars(tested.difference).items()
    }
    corrected = None if math.isnan(tested.corrected) else tested.corrected
    return {**vars(tested), "difference": difference, "corrected": corrected}
