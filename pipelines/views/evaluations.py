"""Compares what models say of the same examples, or one model of two sets of examples: is the difference significant?

The objective or task whose models are measured so says how; see `pipelines.training.objective.Objective.compare`.  The
p-values of all comparisons are corrected together by Holm's method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.parquet as pq

from guidance.errors import InputError
from pipelines.metrics.significance import Difference, holm
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.storage.store import Store
from pipelines.training.evaluations import MEASURED
from pipelines.training.plan_inputs import model_folders


@dataclass(frozen=True)
class Tested:
    """The difference of one metric between the baseline and another evaluation.

    Attributes:
        first, second: the metric of both.
        corrected: the p-value, corrected for all comparisons.
        unit: what was counted: examples, seeds or folds.
    """

    baseline: str
    other: str
    metric: str
    first: float
    second: float
    difference: Difference
    corrected: float = float("nan")
    unit: str = "examples"


def compare_evaluations(evaluations: Sequence[Artifact], labels: Sequence[str]) -> list[Tested]:
    """Each metric of the first evaluation beside that of every other one.

    Two models are compared on the same examples; a model is compared with itself on any examples, such as those of a clean
    and of an adversarial test set.

    Raises:
        ArtifactMismatch: they are of different tasks or examples.
        InputError: predictions of this task cannot be compared example by example.
    """
    first, *others = evaluations
    task = first.counts["task"]
    if (row := MEASURED.get(task)) is None:
        raise InputError(f"evaluations of {task} have no predictions that could be compared")
    baseline, *tables = (_predictions(evaluation) for evaluation in evaluations)
    tested: list[Tested] = []
    for other, label, table in zip(others, labels[1:], tables, strict=True):
        if other.counts["task"] != task:
            raise ArtifactMismatch(f"{labels[0]} measures {task}, {label} measures {other.counts['task']}")
        if _is_same_model(first, other) and not _are_same(baseline, table):
            compared = row.compare_sets(baseline, table)
        else:
            _check_same(baseline, table, labels[0], label)
            compared = row.compare(baseline, table, **_settings(row.compared_by, first, other, labels[0], label))
        tested += [Tested(labels[0], label, **vars(each)) for each in compared]
    return corrected(tested)


def _settings(names: Sequence[str], one: Artifact, other: Artifact, *labels: str) -> dict[str, Any]:
    """The settings of both evaluations by these names.  Raises ArtifactMismatch if they differ."""
    found = [{name: value for name, value in each.manifest["config"].items() if name in names} for each in (one, other)]
    for name in names:
        first, second = (settings.get(name) for settings in found)
        if first != second:
            raise ArtifactMismatch(
                f"{labels[0]} was measured with {name} {first}, {labels[1]} with {second}",
                hint=f"guide evaluate --{name.replace('_', '-')} {first} measures both alike",
            )
    return found[0]


def corrected(tests: Sequence[Tested]) -> list[Tested]:
    """Comparisons with their p-values corrected for how many there are (Holm)."""
    p_values = holm([tested.difference.p for tested in tests])
    return [replace(tested, corrected=p) for tested, p in zip(tests, p_values, strict=True)]


def labels_of(results: Sequence[Artifact], references: Sequence[str], store: Store) -> list[str]:
    """How people call evaluations or searches, no two the same: by their own names, or else those of their models.

    Args:
        references: how the user called them; used where there are no names, or no different ones.
    """
    own, models, data = [], [], []
    for result, reference in zip(results, references, strict=True):
        inputs = result.manifest["inputs"]
        own.append(reference if store.named(reference) else _name(result.kind, {"recipe": result.recipe}, store))
        models.append(_name("model", inputs.get("model"), store) or _folder_of_model(result))
        data.append(_name("corpus", inputs.get("corpus"), store) or _name("sequences", inputs.get("sequences"), store))
    both = [f"{model} on {name}" if model and name else "" for model, name in zip(models, data, strict=True)]
    for names in (models, both):
        labels = [first or second or last for first, second, last in zip(own, names, references, strict=True)]
        if len(set(labels)) == len(labels):
            return labels
    return list(references)


def _folder_of_model(result: Artifact) -> str:
    """The name of the folder of the model of an evaluation; empty if that was an artifact."""
    return model_folders(result.manifest).get("model", "")


def _name(kind: str, described: Mapping[str, Any] | None, store: Store) -> str:
    """The name of an artifact; empty if it has none."""
    recipe = (described or {}).get("recipe")
    name = store.name_of(kind, recipe) if recipe else ""
    return name if store.named(name) else ""


def _predictions(evaluation: Artifact) -> dict[str, list[Any]]:
    with evaluation.open("predictions.parquet") as file:
        columns: dict[str, list[Any]] = pq.read_table(file).to_pydict()
    return columns


def _is_same_model(*evaluations: Artifact) -> bool:
    made = [evaluation.manifest for evaluation in evaluations]
    models = {(one["inputs"].get("model", {}).get("content"), one["config"].get("weights")) for one in made}
    return len(models) == 1 and None not in {model for model, _ in models}


def _are_same(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> bool:
    return all(one.get(column) == other.get(column) for column in ("id", "gold", "reference"))


def _check_same(one: dict[str, list[Any]], other: dict[str, list[Any]], *labels: str) -> None:
    for column in ("id", "gold", "source", "reference"):
        if one.get(column) != other.get(column):
            raise ArtifactMismatch(
                f"{labels[0]} and {labels[1]} are of other examples: their columns {column!r} differ",
                hint="evaluate both models on the same split of the same dataset",
            )
