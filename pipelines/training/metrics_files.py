"""The files of an evaluation: ``metrics.json``, and the table of predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.engine.stage import Run


def write_metrics(
    run: Run,
    task: str,
    metrics: Mapping[str, float | None],
    signatures: Mapping[str, str],
    counts: Mapping[str, int],
    **more: Any,
) -> None:
    """Write ``metrics.json``, and the same into the counts of the artifact.

    Args:
        metrics: by name; None for a metric that is not defined, such as the precision of a model that found nothing.
        signatures: for each metric how it was computed, or its unit.
        more: further entries of both.
    """
    about = {"schema": 1, "task": task, "split": run.config.split}
    told = {"metrics": dict(metrics), "signatures": dict(signatures)}
    run.out.write_json("metrics.json", {**about, **told, "counts": dict(counts), **more})
    run.out.counts |= {**counts, "task": task, **told, **more}
