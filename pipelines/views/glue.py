"""Scores on the tasks of GLUE, and their average over the eight tasks that are usually reported (without WNLI)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guidance.errors import InputError
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

EIGHT = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")

CONVENTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "glue": {
        "cola": ("matthews",),
        "mrpc": ("f1", "accuracy"),
        "stsb": ("pearson", "spearman"),
        "qqp": ("f1", "accuracy"),
    },
    "mcmisp": {"cola": ("matthews",), "stsb": ("pearson",)},
    "asa": {"cola": ("matthews",), "stsb": ("spearman",), "qqp": ("f1",)},
}
"""The metrics whose mean is the score of a task, by convention; of all other tasks it is the accuracy.

``glue`` is that of the benchmark (Wang et al. 2019), ``mcmisp`` that of paper C (Xing et al. 2020), ``asa`` that of paper D (Wu et
al. 2023).
"""


@dataclass(frozen=True)
class Score:
    """The score of one evaluation.

    Attributes:
        task: of GLUE, such as ``rte``.
        metrics: what it is the mean of.
        value: from 0 to 1; a correlation may be negative.
        examples: how many were measured.
    """

    task: str
    metrics: tuple[str, ...]
    value: float
    examples: int


def score(evaluation: Artifact, label: str, store: Store, convention: str = "glue") -> Score:
    """The score of an evaluation, whose task is the format that its dataset was read from.

    MNLI is the mean of its matched and its mismatched part, if the dataset was built from both files.

    Raises:
        InputError: the dataset was not read by ``--format glue-…``, or no example has a label.
    """
    with store.load_input(evaluation, "corpus", verify=False) as dataset:
        format_ = str(dataset.manifest["config"].get("format") or "")
    if not format_.startswith("glue-"):
        raise InputError(
            f"{label}: its dataset was not read as a task of GLUE",
            hint="guide build-dataset --format glue-rte, for example",
        )
    task = format_.removeprefix("glue-")
    metrics = CONVENTIONS[convention].get(task, ("accuracy",))
    measured: Mapping[str, float | None] = evaluation.counts["metrics"]
    if any(measured.get(name) is None for name in metrics):
        known = any(name in measured for name in metrics)
        why = "all examples have the same label" if known else "no example has a label"
        raise InputError(f"{label}: {why}, so it has no {' or '.join(metrics)}")
    parts = evaluation.counts.get("slices", {}).get("source", {})
    tables = list(parts.values()) if task == "mnli" and parts else [measured]
    value = statistics.fmean(float(table[name] or 0.0) for table in tables for name in metrics)
    return Score(task, metrics, value, int(evaluation.counts["examples"]))


def average(scores: Sequence[Score]) -> tuple[float, int]:
    """The mean over tasks, and how many tasks there are; several evaluations of one task count as their mean."""
    tasks: dict[str, list[float]] = {}
    for each in scores:
        tasks.setdefault(each.task, []).append(each.value)
    return statistics.fmean(statistics.fmean(values) for values in tasks.values()), len(tasks)
