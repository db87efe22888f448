"""What a probe, an evaluation or a search found, as the tables that its command shows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from guidance.errors import GuideError
from pipelines.engine.declaration import Table
from pipelines.stages import find
from pipelines.storage.artifacts import Artifact
from pipelines.training.task import SPARSITY_ROWS
from pipelines.training.tasks import TASKS
from pipelines.views.search_tables import search_tables

MOST_CLASSES = 30
"""With more classes their scores are only in ``metrics.json``."""


def findings_of(artifact: Artifact) -> list[Table]:
    """What a probe, a discovery, an evaluation or a search found; empty for other artifacts, and for those that are damaged or of
    another version."""
    with contextlib.suppress(GuideError, OSError, LookupError, ValueError):
        if artifact.kind == "search":
            return search_tables(artifact)
        if artifact.kind == "evaluation":
            return metric_tables(artifact.counts)
        if artifact.kind in ("probe", "discovery") and (stage := find(artifact.manifest["stage"])):
            fields, given = stage.config.model_fields, artifact.manifest["config"]
            config = stage.config(**{name: value for name, value in given.items() if name in fields})
            return [stage.command.show(artifact, config)]
    return []


def metric_tables(counts: Mapping[str, Any]) -> list[Table]:
    """The metrics of an evaluation with its floors; and of each class precision, recall, F1 and size, unless there are no classes,
    or too many to read."""
    rows = [
        (name, _number(value), str(counts["signatures"].get(name, "nats per token" if name == "nll" else "")))
        for name, value in counts["metrics"].items()
    ]
    unit = "nats per token" if counts["task"] == "causal-lm" else "nats per masked token"
    rows += [(f"floor: {name}", _number(value), unit) for name, value in counts.get("floors", {}).items()]
    if "sparsity" in counts:
        rows.append(
            (
                "sparsity",
                _number(counts["sparsity"]),
                f"share of query-key pairs that the heads cannot use, in the first {SPARSITY_ROWS} examples",
            )
        )
    metrics = Table(("metric", "value", "how it is computed"), rows)
    classes = counts.get("classes", {})
    if not 0 < len(classes) <= MOST_CLASSES:
        return [metrics]
    scores = [
        (label, *(_number(own[name], 3) for name in ("precision", "recall", "f1")), f"{own['examples']:,}")
        for label, own in classes.items()
    ]
    return [metrics, Table(("class", "precision", "recall", "f1", TASKS[counts["task"]].counted), scores)]


def _number(value: float | None, digits: int = 4) -> str:
    return "undefined" if value is None else f"{value:.{digits}f}"
